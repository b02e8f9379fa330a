"""Members of enums in metadata, as every version of Python writes them, and nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from mfsdp_core.errors import CheckpointError
from mfsdp_core.state.safe_dcp import _Unpickler


class ByAttribute:
    """Pickled as `getattr(owner, name)`, as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def loaded(thing: object) -> Any:
    return _Unpickler(io.BytesIO(pickle.dumps(thing))).load()


def test_a_member_of_an_enum_is_read_by_its_name() -> None:
    assert loaded(ByAttribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")) is (
        _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    )


@pytest.mark.parametrize(
    ("owner", "name"), [(TensorProperties, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_no_other_attribute_is(owner: object, name: str) -> None:
    with pytest.raises(CheckpointError, match="could run code"):
        loaded(ByAttribute(owner, name))
