"""The work of a rank; `bench.launch.rank` has made the process safe, and ends it."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from bench.worker.rank import run_rank

    run_rank(Path(sys.argv[1]))
