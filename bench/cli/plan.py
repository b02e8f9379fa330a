"""`plan`: the cells of a sweep, and how gradients are added up in each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from bench.cli.verb import Answer, MachineOptions, SweepOptions, columns, pruned_cells
from reports.renderers.document import Block, Code, Paragraph

if TYPE_CHECKING:
    from bench.plan import Plan
    from sweeps.selected_sweep import SelectedSweep


class PlanVerb(MachineOptions, SweepOptions, name="plan"):
    """Show the cells of a sweep, and why others are pruned.

    Starts no process. SWEEP is a file, or the name of a sweep that comes with the tool. With
    --device and --gpus the plan is for such a machine, with all optional packages.

    Examples:
        plan quickstart
        plan my.yaml --only engine.name=mfsdp --set train.steps=50
    """

    def run(self) -> Answer:
        """The plan."""
        from bench.cli.launchers import read_launcher
        from reports.nccl.expectations import gradient_sums

        launcher, settings = read_launcher(self.launcher, self.launcher_options)
        sweep = self.select_arms(self.machine() or launcher.machine(settings))
        cells = {cell.id: cell.resolved for cell in sweep.chosen.cells}
        return Answer(
            plan_blocks(sweep.chosen) + (_arms(sweep) if sweep.arms else []),
            sweep.chosen.to_document()
            | {
                "arms": [{"name": arm.name, "description": arm.described()} for arm in sweep.arms],
                "gradient_sums": {
                    name: [asdict(row) for row in gradient_sums(run)] for name, run in cells.items()
                },
            },
        )


def plan_blocks(plan: Plan) -> list[Block]:
    """Cells, then what is pruned and why, then the totals."""
    blocks: list[Block] = [Paragraph(f"{plan.id}: {plan.description}".rstrip(": "))]
    if plan.cells:
        rows = [
            (cell.id, cell.resolved.config_hash, str(cell.resolved.train.steps), str(cell.repeats))
            for cell in plan.cells
        ]
        blocks.append(columns(("cell", "config", "steps", "runs"), rows, left=2))
    blocks += pruned_cells(plan)
    if sums := sums_text(plan):
        blocks.append(Code(sums))
    if plan.duplicates:
        merged = [(cell.id, cell.reason) for cell in plan.duplicates]
        blocks.append(columns(("merged", "reason"), merged))
    totals = (
        f"cells {plan.size}, to run {len(plan.cells)}, pruned {len(plan.pruned)},"
        f" merged {len(plan.duplicates)}, runs {plan.runs}"
    )
    return [*blocks, Paragraph(totals)]


def _arms(sweep: SelectedSweep) -> list[Block]:
    order = (
        "block by block, the first arm of each block drawn at random"
        if sweep.chosen.interleaved
        else "all runs of the first arm, then all of the next (not interleaved)"
    )
    runs = sweep.chosen.runs * len(sweep.arms)
    return [
        columns(("arm", "code"), [(arm.name, arm.described()) for arm in sweep.arms]),
        Paragraph(f"{runs} runs with all arms: {order}"),
    ]


def sums_text(plan: Plan) -> str:
    """Every kind of reduction once, behind the cells that have it; "" where none needs a word."""
    from reports.nccl.expectations import gradient_sums
    from sweeps.resume import named

    cells: dict[str, list[str]] = {}
    for cell in plan.cells:
        for reduction in gradient_sums(cell.resolved):
            summed = "" if reduction.summed == "unknown" else f"summed {reduction.summed}: "
            text = f"{reduction.text}, sent as {reduction.sent}: {summed}{reduction.why}"
            cells.setdefault(text, []).append(cell.id)
    lines = [f"  {text} ({named(names)})" for text, names in cells.items()]
    return "\n".join(["gradient sums", *lines]) if lines else ""
