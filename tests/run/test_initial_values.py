"""Initial values: the published generator, equal bits for every split and vector unit, the spread.

What engines make of them: test_one_start.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bench.models.build import build_model
from bench.models.initial_values import CHUNK_ELEMENTS, InitialValues, philox
from bench.resolve.presets import PRESETS

CPU = torch.device("cpu")
#: Counter, key and words of Random123's `kat_vectors`, philox4x32 of ten rounds.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SHAPES = {"even": (31, 12), "odd": (29, 13), "deep": (4, 6, 8)}
VALUES = InitialValues(seed=5, residual_writes=2, shapes=SHAPES)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_words_are_the_published_ones_of_numbers_and_of_tensors(counter, key, expected):
    assert list(philox(tuple(words(counter)), tuple(words(key)))) == words(expected)
    found = philox(tuple(torch.tensor([w, 0]) for w in words(counter)), tuple(words(key)))
    assert [int(word[0]) for word in found] == words(expected)


def whole(name: str) -> torch.Tensor:
    values = torch.empty(SHAPES[name])
    VALUES.fill_(values, name)
    return values


@given(st.sampled_from(sorted(SHAPES)), st.lists(st.integers(0, 377), max_size=6))
def test_any_stretches_in_any_order_have_the_bits_of_the_whole(name, cuts):
    expected = whole(name).flatten()
    found = torch.full_like(expected, math.nan)
    ends = sorted({0, found.numel(), *(min(cut, found.numel()) for cut in cuts)})
    for start, end in reversed(list(itertools.pairwise(ends))):
        VALUES.fill_(found[start:end], name, start)
    assert torch.equal(found, expected)


@given(st.data(), st.sampled_from(sorted(SHAPES)))
def test_a_part_cut_along_two_dims_has_the_bits_of_the_whole(data, name):
    shape, other = SHAPES[name], data.draw(st.integers(1, len(SHAPES[name]) - 1))
    part, offsets = whole(name), [0] * len(shape)
    for dim in (0, other):
        offsets[dim] = data.draw(st.integers(0, shape[dim]))
        part = part.narrow(dim, offsets[dim], data.draw(st.integers(0, shape[dim] - offsets[dim])))
    found = torch.empty(part.shape)
    VALUES.fill_part_(found, name, offsets)
    assert torch.equal(found, part)


def test_what_is_drawn_at_once_changes_no_bit(monkeypatch):
    expected = {name: whole(name) for name in SHAPES}
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 20)
    for name in SHAPES:
        assert torch.equal(whole(name), expected[name])


def test_counters_beyond_32_bits_go_on():
    far = InitialValues(5, 2, {"far": (2**40,)} | {"far.weight": (2**20, 2**20)})
    first = 2**34 - 8
    both, behind = torch.empty(16), torch.empty(8)
    far.fill_(both, "far.weight", first)
    far.fill_(behind, "far.weight", first + 8)
    assert torch.equal(both[8:], behind)
    begin = torch.empty(8)
    far.fill_(begin, "far.weight", 0)
    assert not torch.equal(begin, behind)


def test_mean_spread_and_tails_are_those_of_sums_of_bytes():
    values = torch.empty(2**21, dtype=torch.float32)
    InitialValues(1, 2, {"w": (2**11, 2**10)}).fill_(values, "w")
    deviations = values.double() / 0.02
    assert abs(deviations.mean()) < 4 / math.sqrt(values.numel())
    assert deviations.square().mean().item() == pytest.approx(1, abs=0.004)
    # Of a sum of four uniform numbers: 3 - 1.2 / 4.
    assert deviations.pow(4).mean().item() == pytest.approx(2.7, abs=0.02)
    assert 3 < deviations.abs().max() < 3.46
    neighbours = (deviations[1:] * deviations[:-1]).mean()
    assert abs(neighbours) < 4 / math.sqrt(values.numel())


def hybrid() -> nn.Module:
    """A model whose vectors have rules of their own."""
    return build_model(PRESETS["hybrid-tiny"], recompute="none", seed=3, device=CPU)


def digest() -> str:
    """Of all initial values of a hybrid model."""
    found = hashlib.sha256()
    for name, parameter in hybrid().named_parameters():
        found.update(name.encode() + parameter.detach().numpy().tobytes())
    return found.hexdigest()


def test_every_vector_unit_writes_the_same_bits():
    code = "import test_initial_values as t; print(t.digest())"
    plain = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=plain, stdout=subprocess.PIPE, timeout=200, check=True
    )
    assert found.stdout.decode().strip() == digest()


def test_vectors_of_state_space_blocks_span_the_ranges_of_mamba():
    mamba = next(m for m in hybrid().modules() if type(m).__name__ == "Mamba")
    rates = mamba.log_decay.detach().exp()
    sizes = torch.nn.functional.softplus(mamba.step_bias.detach())
    assert rates.aminmax() == pytest.approx((1.0, 16.0), rel=1e-5)
    assert sizes.aminmax() == pytest.approx((1e-3, 1e-1), rel=1e-4)
    assert not mamba.conv_bias.any()


ENGINES = {"mfsdp": 2, "fsdp2": 2, "ddp": 2, "single": 1}
LENGTHS = 2 * (4 * 128 + 3 * 512) + 128  # more than the sums on the way from a token to its logits


@pytest.mark.nightly
@pytest.mark.processes
def test_every_engine_starts_with_the_same_bits_and_loss_on_every_vector_unit(tmp_path):
    """Losses: a sum of n products is off by at most n u of it (Higham 2002, 3.1), in any order."""
    cells = [
        {"label": name, "engine.name": name, "launch.ranks": ranks}
        for name, ranks in ENGINES.items()
    ]
    base = {
        "model": {"preset": "debug", "layers": 2},
        "dtypes": {"compute": "fp32"},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "seq_len": 32},
    }
    sweep = {"name": "units", "base": base, "matrix": {"product": {"engine": cells}}}
    (tmp_path / "units.yaml").write_text(json.dumps(sweep))
    starts, losses = [], []
    for unit in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        results = tmp_path / f"results{len(unit)}"
        command = [sys.executable, "-m", "bench", "run", "units.yaml", "--results", str(results)]
        paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
        environment = os.environ | paths | unit
        subprocess.run(command, env=environment, cwd=tmp_path, timeout=400, check=False)
        found = {}
        for file in sorted(results.glob("runs/*/*/runtime.json")):
            lines = (file.parent / "steps.node0.jsonl").read_text().splitlines()
            steps = map(json.loads, lines)
            first = {step["rank"]: step["loss"] for step in steps if step["step"] == 1}
            found[file.parts[-3]] = [first[rank] for rank in sorted(first)]
            starts.append(json.dumps(json.loads(file.read_text())["start"], sort_keys=True))
        losses.append(found)
    assert len(starts) == 2 * len(ENGINES)
    assert len(set(starts)) == 1
    vectorised, plain = losses
    assert vectorised.keys() == plain.keys()
    for name in plain:
        assert vectorised[name] == pytest.approx(plain[name], rel=2 * LENGTHS * 2**-24)
