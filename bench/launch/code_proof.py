"""The launcher's side of the proof of code: what ranks must import, and what they said they did.

Before the ranks start, the expectation is written into the run folder; each rank compares itself
with it and leaves its proof (`rank_entry/mfsdp_bench_rank.py`). Afterwards the proofs go into
runtime.json, and the verdict into the status: the record says which code was measured.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from bench.launch.code import expected_code
from bench.launch.command import WORKER_MODULE
from bench.launch.protocol import Order
from bench.launch.rank_entry.mfsdp_bench_rank import EXPECTED, PROOFS_GLOB
from bench.spec import known_engine
from bench.store import RunFolder, StoreFullError
from bench.store.atomic import (
    reporting_failed_writes,
    write_json_atomically,
    write_text_atomically,
)
from bench.store.layout import RUNTIME, SPEC

Verdict = Literal["proven", "mismatch"]
_RANKS = re.compile(rb'^\{"rank": (\d+),', re.MULTILINE)


def expect_code(order: Order) -> None:
    """Write what the ranks compare themselves with, and the spec as their `bench` understands it.

    Raises:
        StoreFullError: no space.
    """
    resolved, code = order.resolved, order.code
    # The worker loads these anyway. A stand-in for it in a test may need no torch.
    engine = known_engine(resolved.engine.name).factory.partition(":")[0]
    imports = ("bench.worker.rank", engine) if order.worker_module == WORKER_MODULE else ()
    file = order.run_dir / EXPECTED
    with reporting_failed_writes(file):  # of use only while the run goes on: not forced to disk
        expected = expected_code(resolved, code, imports)
        file.write_text(json.dumps(expected, indent=2), encoding="utf-8")
    if code.unknown_settings:
        document = resolved.model_dump(mode="json")
        for place in code.unknown_settings:
            _drop(document, place)
        write_text_atomically(order.run_dir / SPEC, json.dumps(document, indent=2) + "\n")


def _drop(document: dict[str, Any], place: tuple[str, ...]) -> None:
    section = document
    for key in place[:-1]:
        section = section[key]
    section.pop(place[-1], None)


def read_proofs(folder: RunFolder, ranks: int) -> dict[int, dict[str, Any]]:
    """The last proof of every rank that left one."""
    found: dict[int, dict[str, Any]] = {}
    for file in folder.path.glob(PROOFS_GLOB):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line that was cut off by a full disk proves nothing.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                proof = json.loads(line)
                found[int(proof.pop("rank"))] = proof
    return {rank: found[rank] for rank in range(ranks) if rank in found}


def proven_ranks(path: Path) -> set[int]:
    """Ranks of the run in folder `path` that have left a proof so far."""
    texts = [file.read_bytes() for file in path.glob(PROOFS_GLOB)]
    return {int(rank) for text in texts for rank in _RANKS.findall(text)}


def verdict(proofs: dict[int, dict[str, Any]], ranks: int) -> Verdict | None:
    """`mismatch` if a rank said so, `proven` if all ranks agree, None if some said nothing."""
    if any(proof.get("problems") for proof in proofs.values()):
        return "mismatch"
    return "proven" if len(proofs) == ranks else None


def placement(proofs: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Node and local rank of each rank (`bench.record.Placement`); None where one did not say."""
    ordered = [proofs.get(rank, {}) for rank in range(len(proofs))]
    if not all("host" in proof and "local_rank" in proof for proof in ordered):
        return None
    return {
        "nodes": [proof["host"] for proof in ordered],
        "local_ranks": [proof["local_rank"] for proof in ordered],
    }


def keep_proofs(folder: RunFolder, proofs: dict[int, dict[str, Any]]) -> None:
    """Put the proofs into runtime.json, which the ranks have left.

    A full disk costs this copy, and not the status that is still to be written.
    """
    if proofs:
        runtime = folder.read_runtime() | {"placement": placement(proofs)}
        runtime |= {"code_proof": {str(rank): proof for rank, proof in proofs.items()}}
        with contextlib.suppress(StoreFullError):
            write_json_atomically(folder.path / RUNTIME, runtime)
