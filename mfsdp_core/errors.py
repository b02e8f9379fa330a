"""Typed errors of the core. Each message says what was expected, what was found, what to change.

MfsdpError
├── ConfigurationError            an argument or a combination of arguments is wrong
│   ├── CapabilityNotBuiltError   a valid argument whose capability this version does not have
│   └── UnitSelectionError        `fsdp_unit_modules` names nothing, or not a module class
├── LayoutError                   a flat layout cannot be built or broke one of its invariants
├── GradAlreadyReducedError       a gradient was reduced, then accumulated again in one cycle
├── NonFiniteGradientError        NaN or Inf in a gradient, where looking for them was requested
├── LifecycleError                a call at a time when it cannot mean anything
│   ├── PolicyChangeError         a change of the communication dtype that buffers cannot follow
│   └── MismatchedReadError       ranks that read different sharded tensors at the same time
├── PoolExhaustedError            a buffer pool has no slot that a unit may use now
├── StateDictError                missing, unexpected or wrongly shaped entries
└── CheckpointError               a checkpoint that cannot be written, or must not be read
"""

from __future__ import annotations

from collections.abc import Iterable

#: A condition, and what is raised with which message where it holds.
Refusal = tuple[object, type[Exception], str]


class MfsdpError(Exception):
    """Base of every error that the core raises on purpose."""


class ConfigurationError(MfsdpError, ValueError):
    """An argument, or a combination of arguments, that cannot mean anything."""


class CapabilityNotBuiltError(ConfigurationError, NotImplementedError):
    """A valid argument whose capability this version does not have; it is refused, not ignored."""


class UnitSelectionError(ConfigurationError):
    """`fsdp_unit_modules` holds something that is not a module class or an import path of one."""


class LayoutError(MfsdpError, ValueError):
    """Shapes that cannot be laid out, or a layout that breaks its own invariants."""


class GradAlreadyReducedError(MfsdpError, RuntimeError):
    """A second reduction, or an accumulation after the reduction, within one cycle."""


class NonFiniteGradientError(MfsdpError, ArithmeticError):
    """A NaN or an Inf in a gradient of this rank, found before any reduction.

    rank: in the world. parameters: all names of all parameters concerned. microbatch: index of the
    backward pass in its cycle, from 0; the latest one where the gradient is a sum over several.
    """

    def __init__(
        self, message: str, *, rank: int = -1, parameters: tuple[str, ...] = (), microbatch: int = 0
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameters = parameters
        self.microbatch = microbatch


class LifecycleError(MfsdpError, RuntimeError):
    """A call at a time when it cannot mean anything."""


class PolicyChangeError(LifecycleError):
    """A change of the dtype policy that running buffers cannot follow."""


class MismatchedReadError(LifecycleError):
    """Ranks that read different sharded tensors at the same time; says what each of them reads."""


class PoolExhaustedError(MfsdpError, RuntimeError):
    """A buffer pool has no slot that a unit may use now; names the holders and idle slots."""


class StateDictError(MfsdpError, RuntimeError):
    """A state dict that does not fit the model."""


class CheckpointError(MfsdpError, RuntimeError):
    """A checkpoint that cannot be written, was never finished, is damaged, or is not trusted."""


def refuse(rows: Iterable[Refusal]) -> None:
    """Raise the error of the first row whose condition holds."""
    for holds, error, message in rows:
        if holds:
            raise error(message)


def refuse_configuration(rows: Iterable[tuple[object, str]]) -> None:
    """Raise a ConfigurationError with the message of the first row whose condition holds."""
    refuse((holds, ConfigurationError, message) for holds, message in rows)
