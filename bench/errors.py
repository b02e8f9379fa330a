"""Errors of the harness, each with the exit code that the command line gives it.

BenchError                        6  internal
├── UsageError                    2  bad input; the message says expected, found, what to change
│   ├── ConfigError                  a configuration that cannot mean anything
│   ├── NotAResultsFolderError       the path is something else, or of a newer version
│   ├── StoreLockedError             another runner owns the results folder
│   └── DamagedRecordError           the run that is wanted cannot be read at all
├── UnsupportedError              3  a valid run that cannot run here; a sweep prunes it
├── NothingMeasuredError          3  no run finished, or nothing could be kept
│   ├── StoreFullError               no space left; what was finished before is safe
│   └── StoreGoneError               the folder was removed while it was written to
└── NotComparableError            5  hardware, configuration or schema differ
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class BenchError(Exception):
    """Base of all errors that the harness raises on purpose."""

    exit_code: ClassVar[int] = 6


class UsageError(BenchError):
    """The user must change something; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that is wrong on every machine."""


class UnsupportedError(BenchError):
    """A valid configuration that cannot run here; `rule` names the pruning rule, for good."""

    exit_code = 3

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"{reason} [{rule}]")
        self.rule = rule
        self.reason = reason


class NothingMeasuredError(BenchError):
    """No number came out: every run failed or was pruned, or the disk is full."""

    exit_code = 3


class NotComparableError(BenchError):
    """The two sides differ in hardware, configuration or schema."""

    exit_code = 5


def first_problem(error: ValidationError) -> str:
    """Where a document is damaged, and how: `cells.0.low: Field required`."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


class NotAResultsFolderError(UsageError):
    """The path does not hold results that this version can use."""


class StoreLockedError(UsageError):
    """A second runner on one results folder."""


class DamagedRecordError(UsageError):
    """A run whose `spec.json` cannot be read: nothing says what was measured."""


class StoreGoneError(NothingMeasuredError):
    """A folder that was being written to is not there any more."""


class StoreFullError(NothingMeasuredError):
    """A write failed for lack of space (disk, quota or file size limit)."""
