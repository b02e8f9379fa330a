"""Loading is strict: what does not fit is refused on every rank before anything is changed."""

from __future__ import annotations

import hashlib
import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from mfsdp_core import fully_shard_model, gather_full, load_checkpoint, save_checkpoint
from mfsdp_core.errors import CheckpointError, ConfigurationError, MfsdpError, StateDictError
from oracle.checkpoints import Layout, different, toy
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

NAME = "linear_stack"
LAYOUT: Layout = (4, "optim_grads_params", "none")


class Counted(nn.Module):
    """A buffer, extra state of its own, and a scalar parameter."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, features)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "history": (1, [2, None]), "last": torch.tensor([self.calls])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["history"] == (1, [2, None])
        assert state["last"].tolist() == [state["calls"]]
        self.calls = state["calls"]


def refusal(
    folder: str, change: Callable[[Path], Any] | None, error: type[MfsdpError], **target: Any
) -> tuple[str, list[str]]:
    """Message of a refused load, and what it changed nevertheless."""
    source = toy(NAME, LAYOUT)
    source.train(1)
    save_checkpoint(folder, source.model, source.optimizer)
    if change is not None and dist.get_rank() == 0:
        change(Path(folder))
    dist.barrier()
    found = toy(target.pop("name", NAME), LAYOUT, seed=8, **target)
    found.train(1)
    before = found.whole()
    with pytest.raises(error) as caught:
        load_checkpoint(folder, found.model, found.optimizer)
    return str(caught.value), different(found.whole(), before)


def edited_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "manifest.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return edit


def metadata_without(key: str, folder: Path) -> None:
    """Drop one tensor from the metadata, as a checkpoint of a smaller model has it."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - this test's own
    del metadata.state_dict_metadata[key]
    replace_metadata(folder, pickle.dumps(metadata))


def replace_metadata(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)

    def know(document: dict[str, Any]) -> None:
        document["files"][".metadata"] = len(content)
        document["sha256"][".metadata"] = hashlib.sha256(content).hexdigest()

    edited_manifest(know)(folder)


def cut_last_file(folder: Path) -> None:
    file = max(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    file = max(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Malicious:
    """Unpickling it creates the file `trace`."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def missing_weight(folder: str) -> tuple[str, list[str]]:
    def drop(path: Path) -> None:
        metadata_without("model/head.bias", path)

    return refusal(folder, drop, StateDictError)


def unexpected_and_missing(folder: str) -> tuple[str, list[str]]:
    return refusal(folder, None, StateDictError, name="root_owned")


def missing_moment(folder: str) -> tuple[str, list[str]]:
    """State of one parameter is in the checkpoint of another optimizer's kind only."""
    return refusal(folder, edited_manifest(lambda d: d["values"].pop("groups")), StateDictError)


def other_groups(folder: str) -> tuple[str, list[str]]:
    def shift(document: dict[str, Any]) -> None:
        document["values"]["groups"][0]["names"].pop()

    return refusal(folder, edited_manifest(shift), StateDictError)


def other_version(folder: str) -> tuple[str, list[str]]:
    return refusal(folder, edited_manifest(lambda d: d.update(version=99)), CheckpointError)


def no_manifest(folder: str) -> tuple[str, list[str]]:
    return refusal(folder, lambda path: (path / "manifest.json").unlink(), CheckpointError)


def changed_file(folder: str) -> tuple[str, list[str]]:
    return refusal(folder, flip_a_bit, CheckpointError)


def short_file(folder: str) -> tuple[str, list[str]]:
    return refusal(folder, cut_last_file, CheckpointError)


def malicious_metadata(folder: str) -> tuple[str, list[str]]:
    def poison(path: Path) -> None:
        replace_metadata(path, pickle.dumps(Malicious(Path(folder).with_name("trace"))))

    message, changed = refusal(folder, poison, CheckpointError)
    assert not Path(folder).with_name("trace").exists()
    return message, changed


def file_outside(folder: str) -> tuple[str, list[str]]:
    def redirect(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - own
        next(iter(metadata.storage_data.values())).relative_path = "../secret"
        replace_metadata(path, pickle.dumps(metadata))

    return refusal(folder, redirect, CheckpointError)


CASES: list[tuple[Callable[[str], tuple[str, list[str]]], str]] = [
    (missing_weight, "Missing from the checkpoint: ['model/head.bias']"),
    (unexpected_and_missing, "Unexpected in it: ['model/blocks.2.down.weight'"),
    (missing_moment, "has no optimizer"),
    (other_groups, "parameter groups differ"),
    (other_version, "expected 'mfsdp_core checkpoint' version 1"),
    (no_manifest, "has no manifest.json"),
    (changed_file, "the file has changed since it was written"),
    (short_file, "is damaged; load another one"),
    (malicious_metadata, "which no metadata needs: loading it could run code"),
    (file_outside, "names a file outside of its folder: '../secret'"),
]


@pytest.mark.parametrize(("case", "says"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_r18_what_does_not_fit_is_refused_before_anything_is_changed(
    ranks: RankPool, case: Callable[[str], tuple[str, list[str]]], says: str
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for message, changed in ranks.run(case, f"{parent}/checkpoint"):
            assert says in message
            assert changed == []


def sharded_count(features: int = 6) -> Any:
    return fully_shard_model(Counted(features), zero_dp_strategy=3)


def other_shape(folder: str) -> tuple[str, bool]:
    save_checkpoint(folder, sharded_count(6))
    model = sharded_count(7)
    before = gather_full(next(iter(model.parameters())).detach())
    with pytest.raises(StateDictError) as caught:
        load_checkpoint(folder, model)
    after = gather_full(next(iter(model.parameters())).detach())
    return str(caught.value), torch.equal(before, after)


def everything_else(folder: str) -> tuple[Any, ...]:
    """Buffers, extra state, a scalar parameter and the caller's own values come back."""
    source, target = sharded_count(), fully_shard_model(Counted(), zero_dp_strategy=0)
    inner: Any = source.module
    inner.calls = 5
    inner.seen.fill_(3 + dist.get_rank())
    with torch.no_grad():
        inner.scale.mul_(4)
    extra = {"rates": (0.1, float("inf")), "decays": {3: "x"}, "state": torch.arange(3)}
    save_checkpoint(folder, source, extra=extra)
    loaded = load_checkpoint(folder, target)
    loaded["state"] = loaded["state"].tolist()
    counted: Any = target.module
    return loaded, counted.calls, counted.seen.tolist(), float(gather_full(counted.scale))


def refusals_to_save(folder: str) -> list[str]:
    model = sharded_count()
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    Path(folder, "no-checkpoint").mkdir(parents=True, exist_ok=True)
    calls: list[tuple[type[MfsdpError], Callable[[], None]]] = [
        (CheckpointError, lambda: save_checkpoint(f"{folder}/a", model, extra={"a": [{1, 2}]})),
        (ConfigurationError, lambda: save_checkpoint(f"{folder}/a", model, foreign)),
        (ConfigurationError, lambda: save_checkpoint(f"{folder}/a", nn.Linear(2, 2))),
        (CheckpointError, lambda: save_checkpoint(f"{folder}/no-checkpoint", model)),
        (
            CheckpointError,
            lambda: save_checkpoint(f"{folder}/no-checkpoint", model, overwrite=True),
        ),
        (CheckpointError, lambda: load_checkpoint(f"{folder}/a", model)),
    ]
    messages = []
    for error, call in calls:
        with pytest.raises(error) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def safe_readers_of_plain_checkpoints(folder: str) -> tuple[bool, str]:
    """A value that is pickled data loads; one that would run code does not."""
    from mfsdp_core.state.safe_dcp import SafeLoadPlanner, SafeReader

    trace = Path(folder).with_name(f"trace-{dist.get_rank()}")
    good, bad = {"options": {"lr": [0.5]}}, {"options": Malicious(trace)}
    for name, state in (("good", good), ("bad", bad)):
        dcp.save(state, checkpoint_id=f"{folder}-{name}")
    read: Any = {"options": {"lr": None}}
    dcp.load(read, storage_reader=SafeReader(f"{folder}-good"), planner=SafeLoadPlanner())
    assert read == good
    with pytest.raises(BaseException, match="loading it could run code") as caught:
        dcp.load(
            {"options": None}, storage_reader=SafeReader(f"{folder}-bad"), planner=SafeLoadPlanner()
        )
    return trace.exists(), str(caught.value)


def test_another_shape_is_refused(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for message, unchanged in ranks.run(other_shape, f"{parent}/checkpoint"):
            assert "model/linear.bias: the model has shape (7,), the checkpoint (6,)" in message
            assert unchanged


def test_buffers_extra_state_scalars_and_values_come_back_from_the_first_rank(
    ranks: RankPool,
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for loaded, calls, seen, scale in ranks.run(everything_else, f"{parent}/checkpoint"):
            assert loaded["rates"] == (0.1, float("inf"))
            assert loaded["decays"] == {3: "x"}
            assert loaded["state"] == [0, 1, 2]
            assert (calls, seen, scale) == (5, [3.0] * 3, 4.0)


def test_what_cannot_be_saved_or_is_not_there_is_refused(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for answers in ranks.run(refusals_to_save, parent):
            value, foreign, unsharded, taken, other, absent = answers
            assert "values/extra/a/0: cannot store a set" in value
            assert "not the model's" in foreign
            assert "expected a model that fully_shard_model has returned, found Linear" in unsharded
            assert "pass overwrite=True" in taken
            assert "is no checkpoint of this package, so it is not replaced" in other
            assert "no checkpoint there" in absent


def test_plain_checkpoints_can_be_read_without_running_their_code(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        for ran, message in ranks.run(safe_readers_of_plain_checkpoints, f"{parent}/plain"):
            assert not ran
            assert "could run code" in message
