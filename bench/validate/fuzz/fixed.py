"""Programs of `mfsdp-bench validate mfsdp`: behaviours that no toy model with a plain loop shows.

Each has to end as plain torch does; a refusal counts as a failure here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.validate.fuzz.program import META, Cycle, Pass, Program, UnitShape


@dataclass(frozen=True)
class ProgramCase:
    """A program among the cases of an engine."""

    name: str
    program: Program

    @property
    def id(self) -> str:
        """As that of a case."""
        return f"{self.engine}/program/{self.name.replace(' ', '-').replace(',', '')}"

    @property
    def engine(self) -> str:
        """The engine under test."""
        return self.program.engine

    @property
    def ranks(self) -> int:
        """That it needs."""
        return self.program.ranks


_ADAPTER = UnitShape("Adapter", frozen="part")
_TIED = UnitShape("Block", tie="root")


def _cycle(*passes: str, kind: str = "micro", **settings: object) -> Cycle:
    """One pass per path."""
    return Cycle(tuple(Pass(kind, (path,)) for path in passes), **settings)  # type: ignore[arg-type]


_PROGRAMS: dict[str, Program] = {
    "frozen layer first": Program(
        "mfsdp", units=(_ADAPTER, UnitShape(), _ADAPTER), cycles=(_cycle("rrr", "rrr"),)
    ),
    "two buckets per slot": Program(
        "mfsdp",
        options=(("allocator", "fixed_pool"),),
        units=(UnitShape(frozen="part"), UnitShape(frozen="part"), UnitShape(frozen="part")),
        cycles=(_cycle("rrr", "rrr"), _cycle("KCK")),
    ),
    "tied on the meta device": Program(
        "mfsdp",
        options=((META, True),),
        root="tied",
        units=(_TIED, UnitShape("Conv")),
        cycles=(_cycle("rr"),),
    ),
    "resumed on two axes": Program(
        "mfsdp",
        ranks=4,
        mode="hfsdp",
        units=(UnitShape(hidden=10),),
        cycles=(_cycle("r"), _cycle("r", resumes=True)),
    ),
    "resumed and loaded": Program(
        "mfsdp",
        strategy=1,
        units=(UnitShape(), UnitShape("Gain")),
        cycles=(_cycle("rr"), _cycle("rr", resumes=True), _cycle("rr", loads=True)),
    ),
    "large gradients under the guard": Program(
        "mfsdp",
        options=(("check_for_nan_in_grad", True), ("report_nan_in_param_grad", True)),
        dtype="float32",
        cycles=(_cycle("r", optimizes=False),),
        units=(UnitShape("Rows"),),
        loss_scale=1.4e38,
    ),
    "recomputed in nested graphs": Program(
        "mfsdp", strategy=1, root="tied", units=(_TIED, _TIED), cycles=(_cycle("kk", "kc"),)
    ),
    "nested graphs, one microbatch": Program(
        "mfsdp", strategy=0, root="tied", units=(_TIED, _TIED), cycles=(_cycle("kk"),)
    ),
    "nested graphs, gradients sharded": Program(
        "mfsdp", strategy=2, root="tied", units=(_TIED, _TIED), cycles=(_cycle("kk", "ck"),)
    ),
    "recomputed twice": Program("mfsdp", strategy=1, units=(UnitShape(),), cycles=(_cycle("K"),)),
    "no_sync inside sync": Program(
        "mfsdp", strategy=1, units=(UnitShape(),), cycles=(_cycle("r", kind="double"),)
    ),
    "ranks on other paths": Program(
        "mfsdp",
        units=(UnitShape(),) * 3,
        cycles=(
            Cycle((Pass("micro", ("rsr", "srs")), Pass("micro", ("rrs", "srr")))),
            Cycle((Pass("micro", ("ssr", "rrr")),)),
        ),
    ),
    "sums in the order of ranks": Program(
        "mfsdp",
        ranks=4,
        strategy=2,
        options=(("transport", "point_to_point"),),
        dtype="float32",
        cycles=(_cycle("r", optimizes=False),),
        exact=True,
    ),
    "per token and average": Program(
        "mfsdp",
        options=(("average_in_collective", True), ("calculate_per_token_loss", True)),
        cycles=(_cycle("r", "r"),),
    ),
    "decoupled gradients": Program(
        "mfsdp",
        options=(("use_decoupled_grad", True),),
        cycles=(
            _cycle("r", "r", optimizes=False),
            Cycle(optimizes=False),
            _cycle("r", optimizes=False),
        ),
    ),
    "decoupled gradients, attached twice": Program(
        "mfsdp",
        options=(("use_decoupled_grad", True),),
        cycles=(_cycle("r", "r", end="each", optimizes=False),) * 2,
    ),
    "exceptions": Program(
        "mfsdp",
        units=(UnitShape(),) * 3,
        cycles=(
            Cycle((Pass("micro", ("rrr",)), Pass("failing", ("rrr",), ("forward", 1)))),
            Cycle((Pass("failing", ("rcr",), ("recompute", 1)), Pass("micro", ("rrr",)))),
            Cycle((Pass("failing", ("rrr",), ("backward", 1)),)),
        ),
    ),
    "exceptions, gradients whole, in pools": Program(
        "mfsdp",
        strategy=1,
        options=(("sync_model_each_microbatch", True), ("allocator", "fixed_pool")),
        units=(UnitShape(),) * 3,
        cycles=(
            Cycle((Pass("micro", ("rrr",)), Pass("failing", ("rrr",), ("backward", 0)))),
            Cycle((Pass("failing", ("rrr",), ("forward", 2)), Pass("micro", ("rrr",)))),
        ),
    ),
    "the guard refuses": Program(
        "mfsdp",
        options=(("report_nan_in_param_grad", True),),
        units=(UnitShape("Gain"), UnitShape("Table"), UnitShape()),
        cycles=(Cycle((Pass("guarded", ("rrr",)), Pass("micro", ("rrr",)))),),
    ),
    **{
        f"the guard refuses infinite gradients, {option}": Program(
            "mfsdp",
            strategy=strategy,
            root="frozen",
            options=((option, True),),
            units=(UnitShape(frozen="all"),),
            cycles=(Cycle((Pass("guarded", ("r",), ("inf", 0)), Pass("micro", ("r",)))),),
        )
        for strategy, option in ((0, "check_for_nan_in_grad"), (3, "report_nan_in_param_grad"))
    },
    "used from the third cycle on": Program(
        "mfsdp", strategy=1, units=(UnitShape(),) * 2, cycles=(_cycle("ps"), _cycle("ps", "ps"))
    ),
    "scaled on two axes": Program(
        "mfsdp",
        ranks=4,
        strategy=2,
        mode="hfsdp",
        cycles=(_cycle("r", "r", scale=0.5), _cycle("r", scale=3.0, clip=0.05)),
    ),
    "behind the calls of FSDP2": Program(
        "mfsdp",
        ranks=4,
        mode="hsdp",
        options=(("front", "fsdp2"),),
        root="tied",
        units=(UnitShape("Gain"), UnitShape("Table", frozen="part"), UnitShape("Outer")),
        cycles=(
            _cycle("rtp", "crk", clip=0.05),
            Cycle(
                (
                    Pass("micro", ("rrr",)),
                    Pass("failing", ("rrr",), ("forward", 1)),
                    Pass("micro", ("rpr",)),
                )
            ),
            _cycle("rsr", kind="pair", loads=True),
        ),
    ),
    "modules that nobody calls": Program(
        "mfsdp",
        options=(("enable_fine_grained_param_gather", True),),
        units=(UnitShape("Table"), UnitShape(), UnitShape("Table", frozen="part")),
        cycles=(_cycle("rrr", "rrr"),),
    ),
}
FIXED = tuple(ProgramCase(name, program) for name, program in _PROGRAMS.items())
