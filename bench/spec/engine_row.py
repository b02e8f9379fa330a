"""What the harness knows about one engine before it loads it: one row of the table of engines."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, Field

from bench.spec.names import (
    STRATEGIES,
    DeviceType,
    DtypeName,
    Frozen,
    OuterStrategyName,
    ParallelismName,
    StrategyName,
)


class SharedSettings(Frozen):
    """Settings that every engine has."""

    name: str = "mfsdp"
    """The engine; package.module:factory runs code of that module in the ranks."""
    strategy: StrategyName | None = None
    """What is sharded over ranks; null is the engine's default."""
    outer_strategy: OuterStrategyName = "no_shard"
    """What is sharded over the outer data-parallel axis as well."""
    outer_size: int = Field(default=1, ge=1)
    """Size of the outer data-parallel axis; 1 is none."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every layer of a Llama and train on the same data."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts of a hybrid and train on data of their own."""


SHARED_SETTINGS = tuple(SharedSettings.model_fields)


class EngineSettings(Frozen):
    """Base of an engine's own settings: single values, each with a default.

    A sweep writes them as `engine.NAME`. Only values that differ from their default are hashed, so
    a setting may be added at any time without giving old runs another name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class DtypePolicies:
    """The dtype policies that an engine follows exactly; without arguments: every one.

    main: dtypes of main weights; None is any. gradients_as_main: gradients have the dtype of the
    main weights. autocast: compute dtypes that it reaches from fp32 main weights by autocast; None
    says that it casts by itself, to any. wire: dtypes it can send gradients in besides their own;
    None is any, () says that it sends nothing. sums: whether it adds up what ranks send in a dtype
    that holds more than the wire's, if wanted; else in the wire's, as torch's collectives do.
    sends_as_computed: gradients travel in the compute dtype alone.
    """

    main: tuple[DtypeName, ...] | None = None
    gradients_as_main: bool = False
    autocast: tuple[DtypeName, ...] | None = None
    wire: tuple[DtypeName, ...] | None = None
    sums: bool = False
    sends_as_computed: bool = False


@dataclass(frozen=True)
class EngineRow:
    """One engine.

    factory: `package.module:name`, called with a model, a `ResolvedRun` and a device; loaded
    in the ranks alone. settings: its own, besides those of `SHARED_SETTINGS`. strategies: the first
    one is the default. outer_axis: whether it splits ranks over a second data-parallel axis.
    hybrids: the strategies on both axes that it offers then; None is every pair. parallel: the ways
    to split a model that it shards as well. one_process: it has no process group, and one rank
    consumes the whole global batch. devices: what it runs on.
    needs: modules that must be installed. install: the command that does it. code: files that are
    the engine, as patterns below a checkout of this repository; a factory elsewhere is found by its
    package. torch_code: those of torch, and of packages that are installed with it. colour: in
    figures, as `#0072B2`; None takes the next free one. established: a reference that the
    numerics of others may be compared with.
    """

    name: str
    factory: str
    summary: str = ""
    settings: type[EngineSettings] = EngineSettings
    strategies: tuple[StrategyName, ...] = STRATEGIES
    outer_axis: bool = False
    hybrids: tuple[tuple[StrategyName, OuterStrategyName], ...] | None = None
    parallel: tuple[ParallelismName, ...] = ()
    one_process: bool = False
    devices: tuple[DeviceType, ...] = ("cpu", "cuda")
    dtypes: DtypePolicies = DtypePolicies()
    needs: tuple[str, ...] = ("torch",)
    install: str = ""
    code: tuple[str, ...] = ()
    torch_code: tuple[str, ...] = ()
    colour: str | None = None
    established: bool = False

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError(f"engine {self.name}: expected at least one strategy, found none")
        for name, field in self.settings.model_fields.items():
            if name in SHARED_SETTINGS:
                raise ValueError(
                    f"engine {self.name}: its own setting {name!r} has the name of one that all"
                    f" engines share ({', '.join(SHARED_SETTINGS)}): choose another name"
                )
            if field.is_required():
                raise ValueError(
                    f"engine {self.name}: its setting {name!r} has no default: give it one"
                )
