"""Random sequences of passes never leave a wrong gradient, a leaked buffer or a deadlock."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from oracle.programs import LETTERS, MIXED_LETTERS, UNITS, Program, Step, run_program
from oracle.ranks import RankPool

pytestmark = pytest.mark.processes

#: Shrinking a deadlock starts a pool of ranks per attempt: a failure is reported as it was found.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
UNCHECKED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


def paths(letters: str) -> st.SearchStrategy[str]:
    return st.text(letters, min_size=UNITS, max_size=UNITS)


#: The same path on all ranks, or another one on every second rank.
ROUTES = st.one_of(st.tuples(paths(LETTERS)), st.tuples(paths(MIXED_LETTERS), paths(MIXED_LETTERS)))
FAILING = st.builds(
    lambda letters, phase, unit: Step(
        "failing",
        (letters[:unit] + ("c" if phase == "recompute" else letters[unit]) + letters[unit + 1 :],),
        (phase, unit),
    ),
    paths("rc"),
    st.sampled_from(["forward", "recompute", "backward"]),
    st.integers(0, UNITS - 1),
)
STEPS = st.one_of(
    st.builds(Step, st.just("micro"), ROUTES),
    st.builds(Step, st.just("micro"), ROUTES),
    st.builds(Step, st.sampled_from(["eval", "unused"]), ROUTES),
    FAILING,
)
CYCLES = st.tuples(
    st.lists(STEPS, max_size=4).map(tuple),
    st.sampled_from(["finish", "start", "sync"]),
    st.booleans(),
)
KINDS = [(s, m) for s in range(4) for m in ("flat", "hsdp", "hfsdp") if s or m != "hfsdp"]
PROGRAMS = st.builds(
    lambda kind, prefetch, cycles: Program(*kind, prefetch, cycles),
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(CYCLES, min_size=1, max_size=3).map(tuple),
)


@settings(
    max_examples=40, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=UNCHECKED
)
@given(program=PROGRAMS)
def test_random_programs_agree_with_plain_torch(ranks: RankPool, program: Program) -> None:
    ranks.run(run_program, program, seconds=60)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None, phases=PHASES, suppress_health_check=UNCHECKED)
@given(program=PROGRAMS)
def test_thousands_of_random_programs_agree_with_plain_torch(
    ranks: RankPool, program: Program
) -> None:
    ranks.run(run_program, program, seconds=60)
