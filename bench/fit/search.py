"""Which switches make a run fit, and what each of them costs in traffic and recomputed work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, Final

from bench.derive.flops import recomputed_flops
from bench.errors import ConfigError, UnsupportedError
from bench.fit.prediction import Prediction, Verdict, predict
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import RunSpec

_STRATEGIES: Final = ("optim", "optim_grads", "optim_grads_params")
_RECOMPUTE: Final = ("none", "selective", "full")
_MICRO: Final = (1, 2, 4, 8)
_BF16_STATE: Final = {"train.optimizer": "precision_aware_adamw", "train.state_dtype": "bf16"}
#: Tried by themselves, on the best that the others give; not every engine has all.
_MORE: Final[tuple[Mapping[str, Any], ...]] = (
    {"dtypes.grad_comm": "bf16"},
    {"dtypes.main_grads": "bf16"},
    _BF16_STATE,
    {"dtypes.main_params": None, "dtypes.main_grads": "bf16"},
    {"engine.allocator": "fixed_pool"},
)


@dataclass(frozen=True)
class Choice:
    """One set of switches. wire_bytes and recomputed_flops: of one rank, per token that it takes.

    prediction: None where it was refused; `refusal` says why.
    """

    switches: Mapping[str, Any]
    prediction: Prediction | None
    verdict: Verdict | None
    wire_bytes: float = 0.0
    recomputed_flops: float = 0.0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Known to."""
        return self.verdict is not None and self.verdict.fits

    @property
    def cost(self) -> tuple[bool, float, float]:
        """What fits first, then by recomputed work, then by traffic."""
        return (not self.fits, self.recomputed_flops, self.wire_bytes)

    @property
    def merit(self) -> tuple[bool, float, float]:
        """The cheapest that fits, else the smallest."""
        peak = inf if self.prediction is None else self.prediction.peak_bytes
        return self.cost if self.fits else (True, peak, 0.0)

    def to_document(self) -> dict[str, Any]:
        """Plain data."""
        held = self.prediction
        return {
            "switches": dict(self.switches),
            "refusal": self.refusal,
            "peak_bytes": None if held is None else held.peak_bytes,
            "by_category": None if held is None else held.by_category,
            "verdict": None if self.verdict is None else vars(self.verdict),
            "wire_bytes_per_token": self.wire_bytes,
            "recomputed_flops_per_token": self.recomputed_flops,
        }


def search(spec: RunSpec, machine: Machine) -> list[Choice]:
    """Strategies, recomputation and micro batches on the GPUs of `spec`, the cheapest first.

    A larger micro batch is tried where the smaller one fits. Dtypes, the dtype of the optimizer's
    state, a pool and, over several nodes, hybrid shapes are tried one by one on the best of these:
    the cheapest that fits, else the smallest.
    """
    choices: list[Choice] = []
    for strategy, recompute in product(_STRATEGIES, _RECOMPUTE):
        for micro in _MICRO:
            switches = {
                "engine.strategy": strategy,
                "model.recompute": recompute,
                "train.micro_batch": micro,
            }
            choice = _chosen(spec, machine, switches)
            choices.append(choice)
            if not choice.fits:
                break
    best, nodes = min(choices, key=lambda choice: choice.merit), spec.launch.nodes
    hybrids: list[Mapping[str, Any]] = [
        {"engine.outer_size": nodes, "engine.outer_strategy": outer}
        for outer in ("no_shard", "optim")
        if nodes > 1
    ]
    if best.prediction is not None:
        more = (*_MORE, *hybrids)
        choices += [_chosen(spec, machine, {**best.switches, **change}) for change in more]
    return sorted(choices, key=lambda choice: choice.cost)


def fewest_gpus(spec: RunSpec, machine: Machine) -> Iterator[Choice]:
    """Powers of two up to the GPUs of `spec`, with everything sharded, from one node up.

    Ends with the first number that fits.
    """
    ranks = min(8, spec.launch.ranks)
    while ranks <= spec.launch.ranks:
        switches = {"engine.strategy": "optim_grads_params", "launch.ranks": ranks}
        choice = _chosen(spec, machine, switches)
        yield choice
        if choice.fits:
            return
        ranks *= 2


def changed(spec: RunSpec, switches: Mapping[str, Any]) -> RunSpec:
    """`spec` with some settings changed; the global batch stays one of whole micro batches."""
    document = spec.model_dump()
    for path, value in switches.items():
        section, _, name = path.partition(".")
        document[section][name] = value
    launch, train = document["launch"], document["train"]
    launch["nodes"] = max(1, launch["ranks"] * spec.launch.nodes // spec.launch.ranks)
    shares = launch["ranks"] // spec.engine.tensor_parallel * train["micro_batch"]
    train["global_batch"] = max(1, round(train["global_batch"] / shares)) * shares
    return RunSpec.model_validate(document)


def _chosen(spec: RunSpec, machine: Machine, switches: Mapping[str, Any]) -> Choice:
    try:
        resolved = resolve(changed(spec, switches), machine)
        prediction = predict(resolved, check=False)
    except ConfigError as error:
        return Choice(switches, None, None, refusal=str(error))
    except UnsupportedError as error:
        return Choice(switches, None, None, refusal=error.reason)
    tokens = resolved.train.micro_batch * resolved.train.seq_len * resolved.microbatches
    return Choice(
        switches,
        prediction,
        Verdict.of(prediction, machine),
        (prediction.wire_bytes or 0) / tokens,
        recomputed_flops(resolved) / tokens,
    )
