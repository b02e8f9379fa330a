"""Which functions of mfsdp_core a call on a rank goes through."""

from __future__ import annotations

import sys
import threading
from typing import Any

from bench.testing.call import Call

#: File below mfsdp_core, name, first line.
Function = tuple[str, str, int]


def traced(call: Call) -> list[Function]:
    """On a rank: the functions of mfsdp_core that `call` calls: file, name, first line."""
    seen: set[Function] = set()

    def look(frame: Any, _event: str, _argument: object) -> None:
        code = frame.f_code
        _, found, file = code.co_filename.partition("/mfsdp_core/")
        if found:
            seen.add((file, code.co_name, code.co_firstlineno))

    threading.settrace(look)
    sys.settrace(look)
    try:
        call.run()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return sorted(seen)
