"""The script of the README trains on two ranks as it stands, and leaves a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launch.rank_code import checkout_root

README = checkout_root() / "README.md"


@pytest.mark.processes
def test_the_script_of_the_readme_trains_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout_root()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "train.py"],
        cwd=tmp_path,
        env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"rank 0 step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert any((tmp_path / "checkpoint").iterdir())
