"""`mfsdp-bench`: one command is run, and every ending becomes an exit code.

Only typer is imported here. A verb imports what it needs when it runs, so that `--help` stays fast.

An exception that nobody expected becomes a short message, with its traceback in a file.
"""

from __future__ import annotations

import gc
import io
import os
import platform
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import typer

from bench.cli import console
from bench.cli.app import app
from bench.cli.exit_codes import INTERNAL, INTERRUPTED, OK, USAGE, of_error
from bench.cli.verb import Verb
from bench.redaction import redact_text
from bench.removed import removed

# The class of all refusals by the argument parser; typer carries its own copy of click in some
# versions, so it is found through a class that typer exports.
_ParserError: type[Any] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

_UNKNOWN = re.compile(
    r"No such (?:command|option):? '?([\w-]+)|Invalid value for '([\w-]+)': [^']*'([\w-]+)'"
    r"|Got unexpected extra argument(?:\(s\))? \(([\w-]+)\)"
)
"""How the parser refuses a verb, an option, a value or an argument that it does not know."""


def run_command_line(arguments: list[str]) -> int:
    """Run one command and return its exit code; never raises.

    With --json, stdout holds one JSON document whatever happens: an ending without a result is
    `{"exit_code": 2, "error": "..."}`.
    """
    code, reason = _ended(arguments)
    if reason is not None and "--json" in arguments:
        console.data_json({"exit_code": code, "error": redact_text(reason)})
    return code


def _ended(arguments: list[str]) -> tuple[int, str | None]:
    """The exit code, and where there is no answer, why."""
    try:
        return _answered(arguments), None
    except (KeyboardInterrupt, typer.Abort):
        console.note("interrupted")
        return INTERRUPTED, "interrupted"
    except (BrokenPipeError, SystemExit) as end:
        # The reader of the parser's own output (--help) has gone: click then leaves with 1, which
        # would read as a regression. A shell that has its completions: 0. Nothing else raises it.
        if not isinstance(end, SystemExit) or end.code:
            console.silence(sys.stdout)
        return OK, None
    except Exception as error:
        return _refused(error, arguments)


def _answered(arguments: list[str]) -> int:
    verb = app(arguments, prog_name="mfsdp-bench", standalone_mode=False)
    if verb == INTERRUPTED:  # what some versions of the parser make of a Ctrl-C
        raise KeyboardInterrupt
    if not isinstance(verb, Verb):
        return OK
    answer = verb.run()
    code = answer.show(as_json=verb.as_json, form=getattr(verb, "form", "table"))
    if answer.failure is not None:
        _refused(answer.failure, arguments)
    sys.stdout.flush()
    return code


def _refused(error: Exception, arguments: list[str]) -> tuple[int, str]:
    """Print what is wrong; the exit code, and the message."""
    from bench.errors import BenchError

    if isinstance(error, _ParserError):
        return USAGE, _wrong_usage(error)
    code, message = of_error(error), str(error)
    if code == INTERNAL:
        place = write_crash_report(error, arguments)
        where = f"the traceback is in {place}" if place else "the traceback could not be written"
        first = (message.splitlines() or [""])[0]
        message = f"internal error: {type(error).__name__}: {first[:300]}; {where}"
    elif not isinstance(error, BenchError):
        console.silence(sys.stdout)  # what is left in its buffer cannot be written either
        message = f"no space to write to: {getattr(error, 'filename', None) or 'the output'}"
    console.error(message)
    return code, message


def _wrong_usage(error: Any) -> str:
    """Tell what the parser refuses, and whose help says what is expected."""
    context, message = getattr(error, "ctx", None), str(error.format_message())
    command = "mfsdp-bench" if context is None else str(context.command_path)
    if message.startswith("Usage:"):  # without a verb the parser's message is the help
        print(message, file=sys.stderr)
        return f"expected a command ({command} --help lists them)"
    if message:
        if unknown := _UNKNOWN.match(message):
            word, verb = " ".join(filter(None, unknown.groups())), command.partition(" ")[2]
            if (instead := removed(f"{verb} {word}") or removed(word)) or unknown[1]:
                message = message.rstrip(".") + instead
        message = f"{message} ({command} --help says what is expected)"
        console.error(message)
    return message


def main() -> None:
    """Entry point of the `mfsdp-bench` command."""
    # What a report makes lives to its end, so the collector looks through it less often.
    gc.set_threshold(50_000, 20, 100)
    # A stream that the caller has closed is None; what would go there is dropped.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        # A locale without a character of a description or path is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout.isatty():
        from reports.renderers.terminal import show_on_terminal

        show_on_terminal(shutil.get_terminal_size().columns)
    sys.exit(run_command_line(sys.argv[1:]))


def write_crash_report(error: BaseException, arguments: list[str]) -> Path | None:
    """Write the traceback to a new file in the temporary folder; None if that fails too."""
    lines = [
        f"command: mfsdp-bench {' '.join(arguments)}\n",
        f"python: {platform.python_version()} on {platform.platform()}\n\n",
        *traceback.format_exception(error),
    ]
    try:
        handle, name = tempfile.mkstemp(prefix="mfsdp-bench-crash-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
            stream.writelines(redact_text(line) for line in lines)
    except OSError:
        return None
    return Path(name)


if __name__ == "__main__":
    main()
