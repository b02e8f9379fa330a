"""What a user may import from mfsdp_core: adding or removing a name is a decision."""

from __future__ import annotations

import mfsdp_core

PUBLIC_NAMES = [
    "CapturedStep",
    "Float8Reference",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "annotated",
    "clip_grad_norm_",
    "errors",
    "export_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gather_full",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_safetensors",
    "uneven_dtensor",
]


def test_the_public_names_are_pinned() -> None:
    assert sorted(mfsdp_core.__all__) == PUBLIC_NAMES


def test_every_public_name_is_listed_before_it_is_loaded_and_documents_itself() -> None:
    assert set(PUBLIC_NAMES) <= set(dir(mfsdp_core))
    assert [name for name in PUBLIC_NAMES if not getattr(mfsdp_core, name).__doc__] == []
