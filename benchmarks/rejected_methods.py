"""What was tried and not used: false alarms of other methods on the same simulated A/A sessions.

python -m benchmarks.rejected_methods --gates 600
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import numpy as np
from scipy import stats

from benchmarks.gate_simulation import STEPS, Rate, run_medians
from benchmarks.simulated_steps import MODELS, session
from reports.statistics.bootstrap import paired_bootstrap
from reports.statistics.interval import subset_means, trimmed
from reports.statistics.permutation import sign_flip_p, two_sample_p

ALPHA = 0.05
STEPS_AS_SAMPLES = "steps as samples"
Method = Callable[[list[float], list[float]], bool]
"""Whether a method sees a change between the log medians of base and of head, block by block."""


def _logs(base: np.ndarray, head: np.ndarray) -> tuple[list[float], list[float]]:
    before, after = run_medians(base), run_medians(head)
    blocks = sorted(set(before) & set(after))
    return [math.log(before[b]) for b in blocks], [math.log(after[b]) for b in blocks]


def _excludes_zero(interval: tuple[float, float] | None) -> bool:
    return interval is not None and not interval[0] <= 0 <= interval[1]


def _paired(test: Callable[[list[float]], bool]) -> Method:
    def sees(before: list[float], after: list[float]) -> bool:
        return test([b - a for a, b in zip(before, after, strict=True)])

    return sees


def _percentile(differences: list[float]) -> bool:
    found = stats.bootstrap(
        (np.asarray(differences),),
        np.mean,
        n_resamples=2_000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return _excludes_zero((float(found.low), float(found.high)))


def _steps_as_samples(base: np.ndarray, head: np.ndarray) -> bool:
    """Every step of every run counted as if it were a run of its own, as is often published."""
    return float(stats.mannwhitneyu(base[:, 3:].ravel(), head[:, 3:].ravel()).pvalue) <= ALPHA


METHODS: dict[str, Method] = {
    "sign flips (used)": _paired(lambda d: sign_flip_p(d) <= ALPHA),
    "its interval (used)": _paired(lambda d: _excludes_zero(trimmed(subset_means(d), ALPHA))),
    "signed ranks": _paired(lambda d: float(stats.wilcoxon(d).pvalue) <= ALPHA),
    "paired t-test": _paired(lambda d: float(stats.ttest_1samp(d, 0).pvalue) <= ALPHA),
    "bootstrap, BCa": _paired(lambda d: _excludes_zero(paired_bootstrap(d, ALPHA))),
    "bootstrap, percentile": _paired(_percentile),
    "unpaired permutation": lambda a, b: two_sample_p(a, b) <= ALPHA,
    "Mann-Whitney": lambda a, b: float(stats.mannwhitneyu(a, b).pvalue) <= ALPHA,
}


def print_rejected(gates: int, seed: int) -> None:
    """False alarms and power (true slow-down of 2 %, tolerance 0) of each method, n=8."""
    print(f"\nOther methods, n=8, tolerance 0, {gates} sessions: false alarms, then power at +2 %")
    for name in ("plain", "all at once"):
        for label, effect, randomised in (
            ("A/A", 1.0, True),
            ("A/A, base always first", 1.0, False),
            ("+2 %", 1.02, True),
        ):
            rng = np.random.default_rng([seed, 77])
            seen = dict.fromkeys([*METHODS, STEPS_AS_SAMPLES], 0)
            for _ in range(gates):
                sides = session(
                    rng,
                    MODELS[name],
                    blocks=8,
                    steps=STEPS,
                    effect=effect,
                    randomised=randomised,
                )
                before, after = _logs(*sides)
                for method, sees in METHODS.items():
                    seen[method] += len(before) > 1 and sees(before, after)
                seen[STEPS_AS_SAMPLES] += _steps_as_samples(*sides)
            for method, count in seen.items():
                print(f"{name:<14}{label:<24}{method:<24}{Rate(count, gates)}")
            sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="False alarms and power of methods not used")
    parser.add_argument("--gates", type=int, default=2000, help="sessions per row (default 2000)")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print_rejected(asked.gates, asked.seed)
