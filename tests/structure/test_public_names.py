"""What a user may import from mfsdp_core: adding or removing a name is a decision."""

from __future__ import annotations

import mfsdp_core

PUBLIC_NAMES = [
    "CapturedStep",
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
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


def test_every_public_name_can_be_had_and_documents_itself() -> None:
    for name in mfsdp_core.__all__:
        assert getattr(mfsdp_core, name).__doc__


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(mfsdp_core.__all__) <= set(dir(mfsdp_core))
