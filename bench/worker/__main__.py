"""Start of a rank. Light until the process is safe; then torch, then the work."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from bench.launch.failure import write_failure
from bench.launch.parent_death import die_with_parent
from bench.launch.process import check_checkout, end_by_signal_alone, parent_process_id


def main(arguments: list[str]) -> int:
    """Exit code of this rank: 0 after a full run, 1 with a failure file, 2 for a wrong call."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write("usage: python -m bench.worker RUN_DIR (a folder with spec.json)\n")
        return 2
    run_dir = Path(arguments[0])
    end_by_signal_alone()
    if sys.platform == "linux":
        die_with_parent(parent_process_id())
    try:
        check_checkout()
        from bench.worker.rank import run_rank

        run_rank(run_dir)
    except Exception as error:
        _report(run_dir, error)
        return 1
    return 0


def _report(run_dir: Path, error: Exception) -> None:
    traceback.print_exception(error)
    # The folder may be what failed (a full disk); the exit code still says that the run failed.
    with contextlib.suppress(Exception):
        write_failure(run_dir, int(os.environ.get("RANK", "0")), error)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: after a failure it could wait inside a broken process group.
    os._exit(code)
