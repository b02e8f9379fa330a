"""`show` and `logs`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.cli import console, exit_codes, validating
from bench.derive.checkpoints import checkpoint_cost
from bench.derive.summary import summarise
from bench.errors import UsageError
from bench.record import RunRecord, RunStatus
from bench.store import ResultsStore
from bench.store.validations import PREFIX as VALIDATION

_ALL_DIGITS_FROM = 1e5

_UNITS = {
    "step_milliseconds_median": "step, median (ms)",
    "step_milliseconds_p90": "step, 90th percentile (ms)",
    "tokens_per_second": "tokens/s",
    "tflops_per_second_per_device": "TFLOP/s per device",
    "mfu": "MFU",
    "final_loss": "final loss",
    "final_grad_norm": "final gradient norm",
    "wire_bytes_per_step": "bytes sent per step, all ranks",
    "rss_peak_bytes": "peak resident bytes",
    "device_peak_bytes": "peak device bytes",
}


def show_run(results: Path, run: str, *, as_json: bool) -> int:
    """Print one run, or a validation by its id."""
    if run.startswith(VALIDATION):
        return validating.show_validation(results, run, as_json=as_json)
    record = ResultsStore.open(results, create=False).read(run)
    if as_json:
        console.data_json(_document(record))
    else:
        console.data(_text(record))
    return exit_codes.OK


def _document(record: RunRecord) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "status": record.status.model_dump(mode="json"),
        "resolved": record.resolved.model_dump(mode="json"),
        "config_hash": record.resolved.config_hash,
        "summary": summarise(record).model_dump(mode="json"),
        "steps_per_rank": {str(rank): len(steps) for rank, steps in record.steps.items()},
        "environment": record.environment,
        "memory": record.memory,
        "checkpoints": record.checkpoints,
        "problems": list(record.problems),
    }


def _text(record: RunRecord) -> str:
    status, resolved = record.status, record.resolved
    summary = summarise(record)
    train, launch, dtypes = resolved.train, resolved.launch, resolved.dtypes
    rows: list[tuple[str, str]] = [
        ("run", record.run_id),
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("sweep, cell", f"{status.sweep or '-'}, {status.cell or '-'} ({_which(status)})"),
        ("started, ended", f"{status.started_utc or '-'}, {status.ended_utc or '-'}"),
        ("code", f"{status.code or '-'} ({_PROOFS[status.code_proof]})"),
        ("model", resolved.model_text),
        ("engine", f"{resolved.engine.name}, {resolved.strategy}"),
        (
            "dtypes",
            f"compute {dtypes.compute}, main weights {dtypes.main_params or 'none'}, gradients"
            f" {dtypes.main_grads}, gradient communication {dtypes.grad_comm}",
        ),
        (
            "batch",
            f"{train.global_batch} sequences of {train.seq_len} tokens, micro batch"
            f" {train.micro_batch}",
        ),
        ("ranks", f"{launch.ranks} on {launch.device}, {launch.threads_per_rank} thread(s) each"),
        ("steps", f"{len(record.losses)} of {train.steps}"),
    ]
    for name, label in _UNITS.items():
        value = getattr(summary, name)
        rows.append((label, _number(value)))
    if summary.steady is not None:
        steady = summary.steady
        window = f"steps {steady.first} to {steady.last}" if steady.stable else "not stable"
        rows.append(("steady state", f"{window} ({steady.reason or steady.method})"))
    rows += [(f"memory: {name}", f"{size:,} bytes") for name, size in _memory(summary)]
    saved = checkpoint_cost(record)
    if saved is not None and saved.saves:
        rows.append(("checkpoints", f"{len(saved.saves)}, one in {saved.every_steps} steps"))
        rows.append(("checkpoint: median ms", _number(saved.median_milliseconds)))
        rows.append(("checkpoint: bytes, all ranks", f"{saved.largest_bytes:,}"))
    rows += [("problem", problem) for problem in record.problems]
    return console.columns(("what", "value"), rows)


def _number(value: float | None) -> str:
    """Six digits, and all of those before the point, without an exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= _ALL_DIGITS_FROM else f"{value:,.6g}"


def _which(status: RunStatus) -> str:
    parts = [f"repeat {status.repeat}"]
    parts += [f"arm {status.arm}"] if status.arm else []
    parts += [f"attempt {status.attempt} at its block"] if status.attempt else []
    return ", ".join(parts)


_PROOFS = {
    "proven": "proven by every rank",
    "mismatch": "not what the ranks found",
    None: "not proven",
}


def _memory(summary: Any) -> list[tuple[str, int]]:
    return sorted(summary.memory_by_category_bytes.items(), key=lambda item: -item[1])


def show_logs(results: Path, run: str, rank: int | None, *, as_json: bool) -> int:
    """Print the logs of one run, each below its name.

    Raises:
        UsageError: the run, or the rank's log, does not exist.
    """
    run_id, folder = ResultsStore.open(results, create=False).find(run)
    files = sorted((folder / "logs").glob("*.log"))
    if rank is not None:
        files = [file for file in files if file.name == f"rank{rank}.log"]
        if not files:
            raise UsageError(f"{run_id} has no log of rank {rank}")
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files}
    if as_json:
        console.data_json({"run_id": run_id, "logs": texts})
        return exit_codes.OK
    for name, text in texts.items():
        if rank is None:
            console.data(f"==> {name} <==")
        console.raw(text.rstrip("\n"))
    if not texts:
        console.note(f"{run_id} has no logs")
    return exit_codes.OK
