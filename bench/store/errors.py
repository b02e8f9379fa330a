"""What can go wrong with a results folder.

UsageError                 2
├── NotAResultsFolderError    the path is something else, or of a newer version
├── StoreLockedError          another runner owns the folder
└── DamagedRecordError        the run asked for cannot be read at all
NothingMeasuredError       3
├── StoreFullError            no space left; what was finished before is safe
└── StoreGoneError            the folder was removed while it was written to
"""

from __future__ import annotations

from bench.errors import NothingMeasuredError, UsageError


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
