"""Which switches make a run fit, and what each of them costs in traffic and recomputed work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, Final

from bench.derive.flops import flops_per_global_batch
from bench.errors import ConfigError, UnsupportedError
from bench.fit.prediction import Prediction, predict
from bench.fit.verdict import Verdict
from bench.resolve import resolve
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun, RunSpec

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
    def cost(self) -> tuple[bool, float, float]:
        """What fits first, then by recomputed work, then by traffic."""
        return (not _fits(self), self.recomputed_flops, self.wire_bytes)

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
    found: list[Choice] = []
    for strategy, recompute in product(_STRATEGIES, _RECOMPUTE):
        for micro in _MICRO:
            switches = {
                "engine.strategy": strategy,
                "model.recompute": recompute,
                "train.micro_batch": micro,
            }
            choice = _chosen(spec, machine, switches)
            found.append(choice)
            if choice.verdict is None or not choice.verdict.fits:
                break
    best = min(
        found, key=lambda one: (one.cost[0], *(one.cost[1:] if _fits(one) else (_peak(one),)))
    )
    found += [
        _chosen(spec, machine, {**best.switches, **more})
        for more in (*_MORE, *_hybrids(spec))
        if best.prediction is not None
    ]
    return sorted(found, key=lambda one: one.cost)


def _fits(choice: Choice) -> bool:
    return choice.verdict is not None and choice.verdict.fits


def _peak(choice: Choice) -> float:
    return inf if choice.prediction is None else choice.prediction.peak_bytes


def _hybrids(spec: RunSpec) -> Iterator[Mapping[str, Any]]:
    """Shards within a node, and replicas or a sharded optimizer across nodes."""
    if spec.launch.nodes > 1:
        for outer in ("no_shard", "optim"):
            yield {"engine.outer_size": spec.launch.nodes, "engine.outer_strategy": outer}


def fewest_gpus(spec: RunSpec, machine: Machine) -> Iterator[Choice]:
    """Powers of two up to the GPUs of `spec`, with everything sharded, from one node up.

    Ends with the first number that fits.
    """
    ranks = min(8, spec.launch.ranks)
    while ranks <= spec.launch.ranks:
        switches = {"engine.strategy": "optim_grads_params", "launch.ranks": ranks}
        choice = _chosen(spec, machine, switches)
        yield choice
        if choice.verdict is not None and choice.verdict.fits:
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
        found = predict(resolved, check=False)
    except ConfigError as error:
        return Choice(switches, None, None, refusal=str(error))
    except UnsupportedError as error:
        return Choice(switches, None, None, refusal=error.reason)
    tokens = resolved.train.micro_batch * resolved.train.seq_len * resolved.microbatches
    return Choice(
        switches,
        found,
        Verdict.of(found, machine),
        (found.wire_bytes or 0) / tokens,
        recomputed_flops(resolved) / tokens,
    )


def recomputed_flops(resolved: ResolvedRun) -> float:
    """Matrix products that one rank computes a second time in a step.

    A third of the model's FLOPs are the forward pass; recomputed are those of the layers (full),
    or of the attention's products alone (selective).
    """
    shape, train = resolved.shape, resolved.train
    if shape is None or resolved.recompute == "none":
        return 0.0
    rows = train.micro_batch * resolved.microbatches
    whole = flops_per_global_batch(shape, train.seq_len, rows)
    tokens = float(rows * train.seq_len)
    if resolved.recompute == "full":
        head = 6.0 * tokens * shape.hidden * shape.vocab
        return (whole - head) / 3
    layers = shape.layers if shape.hybrid is None else shape.hybrid.pattern.count("*")
    return 2.0 * tokens * train.seq_len * shape.heads * shape.head_dim * layers
