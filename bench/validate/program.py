"""A random training program: a model, settings of an engine, and cycles of passes over the model.

Ranks run the same program on data of their own; where a pass says so, they take different paths
through the units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: What a unit does in a pass.
LETTERS = {
    "r": "runs",
    "s": "is skipped",
    "p": "runs without its branch",
    "d": "runs, and its result is dropped",
    "t": "runs twice",
    "c": "runs with its activations recomputed",
    "k": "the same in torch's reentrant way",
    "C": "runs twice, each time as with c",
    "K": "runs twice, each time as with k",
}
#: Of the inputs of a program's model: few shapes divide by the ranks.
FEATURES = 5
META = "init_model_with_meta_device"
#: Passes that add to the gradient: once; twice from one graph; two graphs, the later one first.
BACKWARD = ("micro", "double", "pair")


@dataclass(frozen=True)
class UnitShape:
    """A unit of the model. kind: a class of `units`; hidden: its inner size.

    frozen: "" (nothing), "part" (its first weight) or "all". tie: "" or "root" (its branch shares
    the weight of the first layer) or "unit" (that of the first unit's branch).
    """

    kind: str = "Block"
    hidden: int = 3
    frozen: str = ""
    tie: str = ""


@dataclass(frozen=True)
class Pass:
    """kind: one of `BACKWARD`, `evaluate` (no autograd), `unused` (no backward), or as below.

    `failing`: an exception in a unit; `guarded`: a batch of NaN, or with one target of Inf, which
    the guard refuses. paths: letters of the units, by rank modulo the number of paths. fails: for
    kind `failing`, the phase that an exception comes from (forward, recompute, backward), and the
    unit; for `guarded`, ("inf", 0) for the target.
    """

    kind: str
    paths: tuple[str, ...]
    fails: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Cycle:
    """Passes up to a gradient.

    end: `sync` (the last microbatch says so), `each` (every one does), `finish` or `start`. clip:
    bound of the norm, 0 for none. scale: a factor of the finished gradients. wire: dtype of
    reductions from here on, "" for no change. ahead: weights are gathered before the optimizer
    step. loads: whole weights are loaded first. resumes: a new model continues from a checkpoint
    first.
    """

    passes: tuple[Pass, ...] = ()
    end: str = "sync"
    optimizes: bool = True
    clip: float = 0.0
    wire: str = ""
    ahead: bool = False
    loads: bool = False
    resumes: bool = False
    scale: float = 1.0

    @property
    def last(self) -> int:
        """Index of the last pass that adds to the gradient; -1 without one."""
        return max((i for i, pass_ in enumerate(self.passes) if pass_.kind in BACKWARD), default=-1)


@dataclass(frozen=True)
class Program:
    """strategy: ZeRO stage. mode: `flat`, or `hsdp` and `hfsdp` on 2 outer by ranks/2 inner ranks.

    options: arguments of the engine that differ from their defaults. root: "", "tied" (first and
    last layer share a weight) or "frozen" (the first layer is). loss_scale: a factor. exact: sums
    are to be equal to the bit, which they are if they are taken in the order of the ranks. name: of
    a fixed one, in words.
    """

    engine: str
    ranks: int = 2
    strategy: int = 3
    mode: str = "flat"
    options: tuple[tuple[str, object], ...] = ()
    dtype: str = "float64"
    root: str = ""
    units: tuple[UnitShape, ...] = (UnitShape(),)
    cycles: tuple[Cycle, ...] = (Cycle(),)
    loss_scale: float = 1.0
    exact: bool = False
    name: str = ""

    @property
    def id(self) -> str:
        """As that of a case."""
        return f"{self.engine}/program/{self.name.replace(' ', '-').replace(',', '')}"

    @property
    def driver(self) -> str:
        """Module of `drivers` that runs it: of the interface, where the engine has several."""
        name = str(dict(self.options).get("front", self.engine))
        return name if name in ("mfsdp", "fsdp2", "ddp") else "outside"

    def features(self) -> frozenset[str]:
        """What the program has beyond the plainest one; a shrunk program has few."""
        return frozenset(self._features())

    def _features(self) -> Iterator[str]:
        yield f"strategy {self.strategy}"
        yield f"mode {self.mode}"
        yield from (f"{name}={value}" for name, value in self.options)
        yield from (f"root {self.root}", f"dtype {self.dtype}")
        for unit in self.units:
            yield from (f"kind {unit.kind}", f"frozen {unit.frozen}", f"tie {unit.tie}")
        for cycle in self.cycles:
            yield from (f"end {cycle.end}", f"wire {cycle.wire}", f"optimizes {cycle.optimizes}")
            yield from (f"clip {cycle.clip > 0}", f"ahead {cycle.ahead}")
            yield from (f"loads {cycle.loads}", f"resumes {cycle.resumes}")
            if cycle.last >= 0:
                yield f"last {cycle.passes[cycle.last].kind}"
            for pass_ in cycle.passes:
                yield f"pass {pass_.kind} {pass_.fails[0]}"
                yield f"differing paths {len(set(pass_.paths)) > 1}"
                yield from (f"letter {letter}" for path in pass_.paths for letter in path)
