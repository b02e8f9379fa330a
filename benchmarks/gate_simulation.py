"""Does a gate cry wolf, and what does it sleep through? Simulated through the path of a real gate.

Simulated step times become records in memory; from there everything is the code of the product:
steady window, run median (`bench.derive.summary`), paired statistics and verdict
(`reports.gates.judgement`). As a script it prints the tables of reports/README.md:

    python -m benchmarks.gate_simulation              # everything, tens of minutes
    python -m benchmarks.gate_simulation --gates 100  # a taste
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from bench.derive.metrics import STEP_TIME, default_rules
from bench.derive.summary import summarise
from bench.record import RunRecord, RunStatus, StepSample
from bench.spec import (
    DataSpec,
    EngineSpec,
    LaunchSpec,
    MeasureSpec,
    ModelShape,
    ResolvedDtypes,
    ResolvedRun,
    TrainSpec,
)
from benchmarks.simulated_steps import MODELS, NoiseModel, session
from reports.gates.judgement import Case, Judgement, judge_intervals
from reports.gates.policy import DEFAULT_ALPHA

STEPS = 30
ALARMS = frozenset({"regressed", "improved"})


@dataclass(frozen=True)
class Rate:
    """How often something happened, with the exact 95 % interval (Clopper and Pearson 1934)."""

    count: int
    of: int

    @property
    def value(self) -> float:
        """The observed fraction."""
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Two-sided, 95 %."""
        found = stats.binomtest(self.count, self.of).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:7.2%}  ({low:.2%} to {high:.2%})"


def simulated_gates(
    model: NoiseModel,
    *,
    gates: int,
    blocks: int = 8,
    effect: float = 1.0,
    tolerance: float = 0.02,
    seed: int = 1,
    randomised: bool = True,
) -> Iterator[Judgement]:
    """One judgement of step time per gate; a gate without a usable block is left out.

    Args:
        model: the noise.
        gates: how many gates, each a session of its own.
        blocks: interleaved pairs of runs per gate.
        effect: true time ratio of head to base; 1 is A/A.
        tolerance: of the verdict; 0 makes it a plain two-sided test at 5 %.
        seed: the same seed gives the same gates.
        randomised: whether the first arm of a block is drawn.
    """
    for case in simulated_cases(
        model, gates=gates, blocks=blocks, effect=effect, seed=seed, randomised=randomised
    ):
        if case.blocks:
            yield verdict_of(case, tolerance)


def simulated_cases(
    model: NoiseModel,
    *,
    gates: int,
    blocks: int = 8,
    effect: float = 1.0,
    seed: int = 1,
    randomised: bool = True,
) -> Iterator[Case]:
    """The run medians of each session, not judged yet."""
    rng = np.random.default_rng([seed, blocks, round(effect * 1e6)])
    for _ in range(gates):
        base, head = session(
            rng, model, blocks=blocks, steps=STEPS, effect=effect, randomised=randomised
        )
        yield Case("cell", run_medians(base), run_medians(head), paired=True, tolerance=0.02)


def slowed(case: Case, effect: float) -> Case:
    """The same session with a slower head.

    The steady window looks at relative changes only, so scaling the steps of a run scales its
    median and nothing else (tested).
    """
    return replace(case, head={block: effect * value for block, value in case.head.items()})


def verdict_of(case: Case, tolerance: float) -> Judgement:
    """The verdict of a gate with this one cell."""
    rule = default_rules()["step_time"]
    case = replace(case, tolerance=tolerance)
    return judge_intervals([case], STEP_TIME, rule, DEFAULT_ALPHA, bootstrap=False)[0]


def run_medians(milliseconds: np.ndarray) -> dict[int, float]:
    """Steady-state median by block, of step times of shape (blocks, steps); unsteady runs lack."""
    found = {}
    for block, times in enumerate(milliseconds):
        middle = summarise(simulated_record(times)).step_milliseconds_median
        if middle is not None:
            found[block] = middle
    return found


def alarm_rate(judgements: Sequence[Judgement]) -> Rate:
    """Share of gates that claim a change."""
    return Rate(sum(j.verdict in ALARMS for j in judgements), len(judgements))


def detection_rate(judgements: Sequence[Judgement]) -> Rate:
    """Share of gates that say regressed."""
    return Rate(sum(j.verdict == "regressed" for j in judgements), len(judgements))


_RUN = ResolvedRun(
    shape=ModelShape(
        preset="simulated",
        layers=1,
        hidden=8,
        ffn_hidden=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        vocab=8,
        tie_embeddings=True,
    ),
    recompute="none",
    data=DataSpec(),
    engine=EngineSpec(name="single", strategy="no_shard"),
    dtypes=ResolvedDtypes(compute="fp32", main_params="fp32", main_grads="fp32", grad_comm="fp32"),
    train=TrainSpec(steps=STEPS, global_batch=1, micro_batch=1, seq_len=8),
    launch=LaunchSpec(ranks=1),
    measure=MeasureSpec(),
    data_parallel=1,
    microbatches=1,
)


def simulated_record(milliseconds: np.ndarray, turns: int | None = None) -> RunRecord:
    """A run with these steps, as many in each of `turns`."""
    count = len(milliseconds)
    samples = [
        StepSample(
            step + 1,
            float(value),
            1.0,
            None,
            1e-3,
            8,
            None,
            0,
            turn=None if turns is None else step * turns // count,
        )
        for step, value in enumerate(milliseconds)
    ]
    return RunRecord("simulated", _RUN, RunStatus(state="ok"), {}, {0: samples})


def _print_false_alarms(gates: int, seed: int) -> None:
    print(f"\nA/A, n=8 blocks, {gates} gates per row: share that claims a change (95 % interval)")
    print(f"{'noise':<16}{'tolerance 0, two-sided 5 %':<30}{'tolerance 2 %':<30}runs not steady")
    for name, model in MODELS.items():
        cases = [case for case in simulated_cases(model, gates=gates, seed=seed) if case.blocks]
        strict = alarm_rate([verdict_of(case, 0.0) for case in cases])
        usual = alarm_rate([verdict_of(case, 0.02) for case in cases])
        lost = 1 - sum(len(case.base) + len(case.head) for case in cases) / (16 * gates)
        print(f"{name:<16}{strict!s:<30}{usual!s:<30}{lost:.2%}", flush=True)


def _print_power(gates: int, seed: int) -> None:
    print(f"\nPower, tolerance 2 %, {gates} gates per entry: share that says regressed")
    effects = (1.02, 1.03, 1.05, 1.10)
    print(f"{'noise':<16}{'blocks':<8}" + "".join(f"{e - 1:<+10.0%}" for e in effects))
    for name in ("plain", "heavy-tailed", "all at once"):
        for blocks in (5, 6, 8, 12, 16):
            cases = [
                case
                for case in simulated_cases(MODELS[name], gates=gates, blocks=blocks, seed=seed)
                if case.blocks
            ]
            row = [
                detection_rate([verdict_of(slowed(case, e), 0.02) for case in cases]).value
                for e in effects
            ]
            shown = "".join(f"{value:<10.1%}" for value in row)
            print(f"{name:<16}{blocks:<8}{shown}", flush=True)


def _print_verdicts(gates: int, seed: int) -> None:
    print(f"\nVerdicts at tolerance 2 %, n=8, plain noise of 1 %, {gates} gates per row")
    for effect in (1.0, 1.01, 1.02, 1.03, 1.05):
        judged = simulated_gates(MODELS["plain"], gates=gates, effect=effect, seed=seed)
        found = Counter(one.verdict for one in judged)
        shares = ", ".join(f"{verdict} {n / gates:.1%}" for verdict, n in found.most_common())
        print(f"true change {effect - 1:+.0%}: {shares}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gates", type=int, default=2000, help="gates per entry (default 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("parts", nargs="*", help="alarms, power, verdicts; all if none")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    parts = {
        "alarms": _print_false_alarms,
        "power": _print_power,
        "verdicts": _print_verdicts,
    }
    for name in asked.parts or parts:
        parts[name](asked.gates, asked.seed)
    print(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
