"""Numbers of Megatron-LM pull request 3067, for the cells of the sweeps that are made after it.

They are of Megatron-LM, step 100, on a machine that the request does not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from bench.workload import Workload
from reports.compare.logs import Shown
from reports.compare.unlike import Pace
from reports.views.cells import Cell

CAPTION: Final = (
    "Published rows are numbers of the pull request: Megatron-LM, step 100, another machine."
)


class _Row(NamedTuple):
    """Peak as allocated, in MiB."""

    sweep: str
    cell: str
    code: str
    model: str
    ranks: int
    seq_len: int
    milliseconds: float
    loss: float
    peak_mib: float | None = None


GLOBAL_BATCH: Final = 128
_MAIN, _REQUEST = "main branch", "pull request"
_8B, _70B = "llama3-8b", "llama3-70b"
PUBLISHED_ROWS: Final = tuple(_Row(f"pr3067_{row[0]}", *row[1:]) for row in (
    ("dtypes", "fsdp-fp32-ub_off", _MAIN, _8B, 8, 8192, 10925.4, 1.154529),
    ("dtypes", "fsdp-fp32-ub_off", _REQUEST, _8B, 8, 8192, 10893.1, 1.154007, 60039.38),
    ("dtypes", "fsdp-bf16-ub_on", _REQUEST, _8B, 8, 8192, 10424.1, 1.154608, 60646.15),
    ("dtypes", "fp32_activations", _REQUEST, _8B, 8, 4096, 19961.1, 1.620105),
    ("short", "fsdp-fp32-ub_off", _MAIN, _8B, 8, 1024, 3789.9, 5.476863, 33573.09),
    ("short", "hfsdp-fp32-ub_off", _REQUEST, _8B, 8, 1024, 3779.1, 5.475965, 33573.09),
    ("short", "hfsdp-fp32-ub_on", _REQUEST, _8B, 8, 1024, 3685.9, 5.475298),
    ("short", "hfsdp-bf16-ub_on", _REQUEST, _8B, 8, 1024, 3482.6, 5.534179),
    ("short", "optim-fp32-ub_off", _MAIN, _8B, 8, 1024, 2793.4, 5.560552),
    ("short", "optim-fp32-ub_off", _REQUEST, _8B, 8, 1024, 2776.0, 5.486691),
    ("nodes", "70b_fp32-timed", _MAIN, _70B, 64, 1024, 3300.5, 2.233609),
    ("nodes", "70b_bf16-timed", _REQUEST, _70B, 64, 1024, 2559.1, 2.234128),
    ("nodes", "8b_four_nodes-timed", _REQUEST, _8B, 32, 8192, 2845.5, 1.209103),
))  # fmt: skip


def published(cells: Iterable[Cell]) -> Iterator[Shown]:
    """The rows of measured cells of the same model, ranks, batch and sequence length."""
    for cell in cells:
        run, status = cell.resolved, cell.runs[0].record.status
        own = (status.sweep, status.cell)
        work = (run.model_name, run.launch.ranks, run.train.seq_len, run.train.global_batch)
        for row in PUBLISHED_ROWS:
            if own == row[:2] and work == (row.model, row.ranks, row.seq_len, GLOBAL_BATCH):
                yield _shown(row)


def _shown(row: _Row) -> Shown:
    work = Workload(
        framework="megatron-lm",
        model=row.model,
        ranks=row.ranks,
        global_batch=GLOBAL_BATCH,
        seq_len=row.seq_len,
    )
    rate = GLOBAL_BATCH * row.seq_len / row.milliseconds * 1e3
    peak = None if row.peak_mib is None else row.peak_mib * 2**20
    name = f"{row.cell}, {row.code}"
    pace = Pace(work, row.milliseconds, rate, None, {})
    return Shown(name, "published, another machine", work, pace, 1, row.loss, peak)
