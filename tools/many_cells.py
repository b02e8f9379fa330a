"""A results folder in which every cell of a sweep has run: copies of one run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from bench.launch.code import code_identity
from bench.resolve.machine import Machine
from bench.store import ResultsStore, layout, samples
from bench.store.run_folder import utc_now
from sweeps.definition import load_sweep
from sweeps.planning import make_plan

CELLS: Final = 200
_SWEEP: Final = """name: many
base:
  model: {preset: tiny}
  train: {steps: STEPS, global_batch: 4, micro_batch: 2, seq_len: 64, warmup_steps: 5}
  launch: {ranks: 2, device: cpu}
matrix:
  product:
    engine:
      - {label: ddp, engine.name: ddp}
      - {label: fsdp2, engine.name: fsdp2, engine.strategy: optim_grads_params}
      - {label: mfsdp-optim, engine.name: mfsdp, engine.strategy: optim}
      - {label: mfsdp-optim_grads, engine.name: mfsdp, engine.strategy: optim_grads}
      - {label: mfsdp, engine.name: mfsdp, engine.strategy: optim_grads_params}
    train.lr: [3.0e-4, 1.0e-3]
    train.seed: [SEEDS]
"""


def write_cells(folder: Path, template: Path) -> Path:
    """Fill `folder`/results from the run in folder `template`; returns the sweep file.

    The samples of every run are those of the template, which has as many steps.
    """
    first = (template / samples.node_file(0)).read_text().splitlines()
    seeds = ", ".join(map(str, range(CELLS // 10)))
    steps = str(len(first) // 2)
    file = folder / "many.yaml"
    file.write_text(_SWEEP.replace("SEEDS", seeds).replace("STEPS", steps))
    plan = make_plan(load_sweep(file), Machine.detect())
    store = ResultsStore.open(folder / "results", create=True)
    store.write_plan(plan.id, plan.to_document())
    for cell in plan.cells:
        code = code_identity(cell.resolved)
        with store.new_run(
            cell.resolved, sweep=plan.id, cell=cell.id, repeat=0, arm=None, code=code
        ) as made:
            names = (layout.ENVIRONMENT, layout.RUNTIME, layout.MEMORY, samples.node_file(0))
            for name in names:
                shutil.copy(template / name, made.path / name)
            made.finish(made.status.model_copy(update={"state": "ok", "ended_utc": utc_now()}))
    return file
