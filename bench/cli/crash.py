"""An exception that nobody expected: a short message, and the traceback in a file."""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from pathlib import Path

from bench.redaction import redact_text


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
