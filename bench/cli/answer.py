"""What a verb has found, and how it is shown: text or JSON, remarks, an exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.cli import console
from bench.cli.exit_codes import OK


@dataclass(frozen=True)
class Answer:
    """Of the two forms only the one that is asked for is made.

    remarks: to stderr, behind it. as_it_is: the text is a log, whose characters stay. as_json: the
    form that was asked for. failure: of a later step (a report on runs that are made); it is told
    behind what there is, and `code` and `document` count it.
    """

    document: Callable[[], Any]
    text: Callable[[], str]
    code: int = OK
    remarks: tuple[str, ...] = ()
    as_it_is: bool = False
    as_json: bool = False
    failure: Exception | None = None

    def show(self) -> int:
        """Print it, and return the exit code."""
        if self.as_json:
            console.data_json(self.document())
        elif text := self.text().rstrip("\n"):
            (console.raw if self.as_it_is else console.data)(text)
        for line in self.remarks:
            console.note(line)
        return self.code
