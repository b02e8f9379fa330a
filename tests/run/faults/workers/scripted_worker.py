"""A rank without torch that steps in lock-step with its peers and misbehaves as it is told.

MFSDP_TEST_SCRIPT: JSON, rank -> [step, act]. The act happens when the rank is about to finish that
step. A rank waits for its peers as a collective would: without a look at whether they still live,
or, from its act "notice" on, failing as soon as one is gone, as gloo does.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from bench.record import StepSample
from bench.spec import ResolvedRun

run_dir = Path(sys.argv[1])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run = ResolvedRun.model_validate_json((run_dir / "spec.json").read_bytes())
script = json.loads(os.environ.get("MFSDP_TEST_SCRIPT", "{}"))
peers = select.poll()
at_step, act = script.get(str(rank), [0, ""])


def fail(kind: str) -> None:
    document = {"kind": kind, "message": f"scripted {kind}", "time_seconds": time.time()}
    (run_dir / f"failure.rank{rank}.json").write_text(json.dumps(document))
    os._exit(1)


def misbehave() -> None:
    if act == "hang":
        time.sleep(600)
    elif act == "raise":
        raise ValueError("scripted exception")
    elif act == "stop early":
        os._exit(0)
    elif act.startswith("exit "):
        os._exit(int(act.removeprefix("exit ")))
    elif act.startswith("signal "):
        os.kill(os.getpid(), int(act.removeprefix("signal ")))
        time.sleep(600)
    elif act == "notice":
        (peer,) = {0, 1} - {rank}
        peers.register(os.pidfd_open(int((run_dir / f"pid.rank{peer}").read_text())))
    elif act == "ignore SIGTERM":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif act == "start a child":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (run_dir / "pid.child").write_text(str(child.pid))
    else:
        fail(act)


def steps_of(peer: int) -> int:
    try:
        return (run_dir / f"steps.node{peer}.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


(run_dir / f"pid.rank{rank}").write_text(str(os.getpid()))
sys.stdout.write(f"rank {rank} says hello\n")
sys.stdout.flush()
for step in range(1, run.train.steps + 1):
    begun = time.time()
    while any(steps_of(peer) < step - 1 for peer in range(ranks)):
        if peers.poll(10):
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")
    if step == at_step:
        misbehave()
    time.sleep(0.02)
    trained = {"from": begun, "to": time.time()}
    sample = StepSample(step, 20.0, 1.0 / step, 1.0, 0.1, 8, 0, 1, device=trained)
    line: dict[str, object] = {"rank": rank}
    line |= {name: getattr(sample, name) for name in StepSample.__slots__}
    with (run_dir / f"steps.node{rank}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")
if rank == 0:
    (run_dir / "memory.json").write_text("{}")
    (run_dir / "runtime.json").write_text('{"meters": {}}')
