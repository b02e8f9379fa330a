"""Checkpoints: whole, right, or refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import mfsdp_core
from conformance.judging import refuses, same
from conformance.small_model import (
    Small,
    Stateful,
    batch,
    compare_weights,
    on_first,
    pair,
    train_beside,
    whole_weights,
)
from mfsdp_core.errors import CheckpointError, ConfigurationError, StateDictError
from mfsdp_core.state.safe_dcp import SafeLoadPlanner, SafeReader

pytestmark = [pytest.mark.processes, pytest.mark.on_ranks(2)]


def _trained(strategy: int, module: Callable[[], nn.Module] = Small) -> tuple[Any, Any, Any, Any]:
    model, plain = pair(strategy, module)
    optimizer = mfsdp_core.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    return model, optimizer, plain, torch.optim.AdamW(plain.parameters(), lr=0.1)


_EXTRA: dict[str, Any] = {
    "tuple": (1, [2.5, None, True], "text"),
    "numbers": {3: "three", 4: {"$odd": 1}},
    "tensor": torch.arange(6).view(2, 3),
    "nested": {"t": (torch.ones(2),)},
}


def test_a_checkpoint_continues_under_another_strategy(tmp_path: Path) -> None:
    """Weights, moments, buffers, extra state, and what the caller has added."""
    for strategy, other in ((3, 0), (0, 2)):
        folder = tmp_path / str(strategy)
        folder.mkdir(exist_ok=True)
        model, optimizer, plain, reference = _trained(strategy, Stateful)
        for number in range(2):
            train_beside(model, optimizer, plain, reference, number)
        model.module.seen = {"steps": 5}
        model.module.shift.add_(1)
        plain.shift.add_(1)
        for _ in range(2):
            mfsdp_core.save_checkpoint(folder / "a", model, optimizer, extra=_EXTRA, overwrite=True)
        left = sorted(file.name for file in folder.iterdir())
        same("nothing else is left", left, ["a"])
        fresh, its_optimizer, _, _ = _trained(other, Stateful)
        its_optimizer.param_groups[0]["lr"] = 0.7
        with torch.no_grad():
            for p in fresh.parameters():
                p.detach().zero_()
        extra = mfsdp_core.load_checkpoint(folder / "a", fresh, its_optimizer)
        same("extra", extra, _EXTRA)
        same("kinds", (type(extra["tuple"]), list(extra["numbers"])), (tuple, [3, 4]))
        same("extra state", fresh.module.seen, {"steps": 5})
        same("a buffer", fresh.module.shift, plain.shift)
        same("the rate", its_optimizer.param_groups[0]["lr"], 0.1)
        compare_weights(fresh, plain)
        before = copy.deepcopy(plain)
        train_beside(fresh, its_optimizer, plain, reference, 2)
        alone, _, _, _ = _trained(other, Stateful)
        mfsdp_core.load_checkpoint(folder / "a", alone)
        compare_weights(alone, before)


def test_moments_wider_than_the_weights_keep_dtype_and_bits(tmp_path: Path) -> None:
    """Under another strategy too. Values that FP32 does not hold."""
    narrow = mfsdp_core.MixedPrecisionPolicy(torch.float32)
    names = ("exp_avg", "exp_avg_sq")

    def trained(strategy: int) -> tuple[Any, Any]:
        model, _ = pair(strategy, dtype=torch.float32, mixed_precision_policy=narrow)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, mfsdp_core.fully_shard_optimizer(optimizer)

    model, optimizer = trained(3)
    model(batch(dtype=torch.float32)).backward()
    optimizer.step()
    for moments in optimizer.state.values():
        moments.update({name: moments[name].double() * 1.1 + 1e-9 for name in names})
    mfsdp_core.save_checkpoint(tmp_path / "a", model, optimizer)
    for strategy in (3, 0):
        fresh, its_optimizer = trained(strategy)
        mfsdp_core.load_checkpoint(tmp_path / "a", fresh, its_optimizer)
        for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
            for name in names:
                wanted = mfsdp_core.gather_full(optimizer.state[old][name])
                found = mfsdp_core.gather_full(its_optimizer.state[new][name])
                same(name, (found.dtype, torch.equal(found, wanted)), (torch.float64, True))


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:  # noqa: PLR0915 - one folder
    """Missing, unfinished, damaged, foreign or dangerous ones; nothing is changed then."""
    folder = tmp_path
    model, optimizer, plain, _ = _trained(3)
    model(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    save, load = mfsdp_core.save_checkpoint, mfsdp_core.load_checkpoint
    save(folder / "a", model, optimizer)
    save(folder / "weights", model)
    before = whole_weights(model)
    refuses(CheckpointError, "exists. Choose", lambda: save(folder / "a", model))
    bad = {"x": object()}
    refuses(CheckpointError, "cannot store a object", lambda: save(folder / "b", model, extra=bad))
    refuses(CheckpointError, "cannot store a dict", save, folder / "b", model, extra={None: 1})
    refuses(ConfigurationError, "that fully_shard_model has returned", save, folder / "b", plain)
    foreign = torch.optim.SGD(plain.parameters(), lr=0.1)
    refuses(ConfigurationError, "are not the model's", lambda: save(folder / "b", model, foreign))
    on_first((folder / "other").mkdir)
    refuses(
        CheckpointError,
        "is no checkpoint of this package",
        save,
        folder / "other",
        model,
        overwrite=True,
    )
    refuses(CheckpointError, "has no manifest.json", lambda: load(folder / "other", model))
    refuses(CheckpointError, "no checkpoint there", lambda: load(folder / "none", model))
    on_first((folder / ".none.replaced-1").mkdir)
    refuses(CheckpointError, "is complete", lambda: load(folder / "none", model))
    for left in (".b.partial-1", ".b.replaced-1"):
        on_first((folder / left).mkdir)
    save(folder / "b", model)
    same("leftovers are gone", (folder / ".b.partial-1").exists(), False)
    same("what was put aside stays", (folder / ".b.replaced-1").exists(), True)

    refuses(StateDictError, "has no optimizer", lambda: load(folder / "weights", model, optimizer))
    some = list(model.parameters())[:-1]
    fewer = mfsdp_core.fully_shard_optimizer(torch.optim.AdamW(some, lr=0.1))
    refuses(StateDictError, "parameter groups differ", lambda: load(folder / "a", model, fewer))
    larger, _ = pair(3, _Larger)
    refuses(StateDictError, "Missing from the checkpoint", lambda: load(folder / "a", larger))
    wider, _ = pair(3, _Wider)
    refuses(StateDictError, "the model has shape", lambda: load(folder / "a", wider))
    stateful, _ = pair(3, _ExtraState)
    refuses(StateDictError, "extra state of modules", lambda: load(folder / "a", stateful))

    manifest = folder / "a" / "manifest.json"
    kept = manifest.read_text()
    document = json.loads(kept)
    sizes, digests = dict(document["files"]), dict(document["sha256"])
    for words, change in (
        ("cannot be read", "{"),
        ("is damaged", "{}"),
        ("expected 'mfsdp_core checkpoint' version 1", {"version": 2}),
        ("expected 'mfsdp_core checkpoint' version 1", {"format": "x"}),
        ("found no file", {"files": sizes | {"more": 3}, "sha256": digests | {"more": ""}}),
        ("expected 1 bytes", {"files": sizes | {".metadata": 1}}),
        ("names files that the manifest does not", {"files": {}, "sha256": {}}),
    ):
        text = change if isinstance(change, str) else json.dumps(document | change)
        on_first(lambda t=text: manifest.write_text(t))
        refuses(CheckpointError, words, lambda: load(folder / "a", model))
    on_first(lambda: manifest.write_text(kept))
    data = max((folder / "a").glob("*.distcp"))
    whole = data.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    on_first(lambda: data.write_bytes(flipped))
    refuses(CheckpointError, "the file has changed since", lambda: load(folder / "a", model))
    on_first(lambda: data.write_bytes(whole))
    for known in (None, {}, dict.fromkeys(sizes), dict.fromkeys([*sizes, "other"], "0")):
        on_first(lambda d=document | {"sha256": known}: manifest.write_text(json.dumps(d)))
        refuses(CheckpointError, "manifest.json is damaged", lambda: load(folder / "a", model))
    on_first(lambda: manifest.write_text(json.dumps(document)))
    metadata = folder / "a" / ".metadata"
    outside = pickle.loads(metadata.read_bytes())  # noqa: S301 - this test's own
    next(iter(outside.storage_data.values())).relative_path = "../secret"
    for words, content in (
        ("names a file outside of its folder: '../secret'", pickle.dumps(outside)),
        ("which no metadata needs", pickle.dumps(_Runs())),
        ("holds no metadata", pickle.dumps(torch.Size([1]))),
        ("but a _MEM_FORMAT_ENCODING", pickle.dumps(_Member("TORCH_CONTIGUOUS_FORMAT"))),
        ("asks for the attribute", pickle.dumps(_Member("__class__"))),
        ("is damaged", b"nonsense"),
    ):
        old = {key: value for key, value in document.items() if key != "sha256"}
        old["files"] = sizes | {".metadata": len(content)}

        def write(c: bytes = content, d: Any = old) -> None:
            metadata.write_bytes(c)
            manifest.write_text(json.dumps(d))

        on_first(write)
        refuses(CheckpointError, words, lambda: load(folder / "a", model))
    same("nothing was changed", whole_weights(model), before)


def test_values_of_others_are_read_without_running_their_code(tmp_path: Path) -> None:
    """A value that is pickled data loads; one that would run code does not."""
    trace = tmp_path / f"trace-{dist.get_rank()}"
    good, bad = {"options": {"lr": [0.5]}}, {"options": _Touches(trace)}
    for name, state in (("good", good), ("bad", bad)):
        dcp.save(state, checkpoint_id=tmp_path / name)
    read: Any = {"options": {"lr": None}}
    dcp.load(read, storage_reader=SafeReader(tmp_path / "good"), planner=SafeLoadPlanner())
    same("read", read, good)
    reader = SafeReader(tmp_path / "bad")
    with pytest.raises(BaseException, match="loading it could run code"):
        dcp.load({"options": None}, storage_reader=reader, planner=SafeLoadPlanner())
    assert not trace.exists()


class _Larger(Small):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.empty(2))


class _Wider(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2, 5))


class _ExtraState(Small):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        del state


class _Member:
    """Of an enum, as Python 3.11.0 to 3.11.3 pickle it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, self.name)


class _Runs:
    """What would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return eval, ("1",)


class _Touches:
    """Unpickling it creates a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)
