"""The launcher's side of the proof of code: what ranks must import, and what they said they did.

Before the ranks start, the expectation is written into the run folder; each rank compares itself
with it and leaves its proof (`rank_entry/mfsdp_bench_rank.py`). Afterwards the proofs go into
runtime.json, and the verdict into the status: the record says which code was measured.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from bench.errors import StoreFullError
from bench.launch.code import OWN_PACKAGES, RANK_PATTERNS, RankCode, named_code
from bench.launch.command import WORKER_MODULE
from bench.launch.protocol import Order
from bench.launch.rank_entry.mfsdp_bench_rank import EXPECTED, PROOFS_GLOB, file_hashes
from bench.spec import ResolvedRun
from bench.store import RunFolder
from bench.store.atomic import reporting_failed_writes, write_json_atomically
from bench.store.layout import RUNTIME, SPEC

Verdict = Literal["proven", "mismatch"]
_RANKS = re.compile(rb'^\{"rank": (\d+),', re.MULTILINE)


def expected_code(resolved: ResolvedRun, code: RankCode, imports: Iterable[str]) -> dict[str, Any]:
    """The document by which a rank judges itself (see `rank_entry/mfsdp_bench_rank.py`).

    Args:
        resolved: the run.
        code: what its ranks should import.
        imports: modules that a rank loads before it looks.
    """
    packages: dict[str, Mapping[str, Any]] = {"torch": {"patterns": ["torch/version.py"]}}
    files, pinned = code.files(), code.pinned
    for name in OWN_PACKAGES:
        own = {file: content for file, content in files.items() if file.startswith(f"{name}/")}
        patterns = [pattern for pattern in RANK_PATTERNS if pattern.startswith(f"{name}/")]
        packages[name] = {"patterns": patterns, "root": str(code.root), "files": own}
    for named in named_code(resolved):
        wanted: dict[str, Any] = {"patterns": named.patterns}
        # An arm may bring its own copy of a user's package, so its place is not prescribed there.
        if pinned is None:
            wanted |= {"root": str(named.root), "files": file_hashes(named.root, named.patterns)}
        packages[named.package] = wanted
    document: dict[str, Any] = {"arm": code.arm, "import": list(imports), "packages": packages}
    if pinned is None:
        return document | {"distributions": {}, "torch": None, "python": None}
    return document | {
        "packages": {**packages, **pinned.packages},
        "distributions": dict(pinned.distributions),
        "torch": pinned.torch,
        "python": pinned.python,
    }


def expect_code(order: Order) -> None:
    """Write what the ranks compare themselves with, and the spec as their `bench` understands it.

    Raises:
        StoreFullError: no space.
    """
    resolved, code = order.resolved, order.code
    # The worker loads these anyway. A stand-in for it in a test may need no torch.
    engine = resolved.engine.known_row.factory.partition(":")[0]
    imports = ("bench.worker.rank", engine) if order.worker_module == WORKER_MODULE else ()
    file = order.run_dir / EXPECTED
    with reporting_failed_writes(file):  # of use only while the run goes on: not forced to disk
        expected = expected_code(resolved, code, imports)
        file.write_text(json.dumps(expected, indent=2), encoding="utf-8")
    if code.unknown_settings:
        document = resolved.model_dump(mode="json")
        for *sections, name in code.unknown_settings:
            reduce(getitem, sections, document).pop(name, None)
        write_json_atomically(order.run_dir / SPEC, document)


def read_proofs(folder: RunFolder, ranks: int) -> dict[int, dict[str, Any]]:
    """The last proof of every rank that left one."""
    proofs: dict[int, dict[str, Any]] = {}
    for file in folder.path.glob(PROOFS_GLOB):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line that was cut off by a full disk proves nothing.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                proof = json.loads(line)
                proofs[int(proof.pop("rank"))] = proof
    return {rank: proofs[rank] for rank in range(ranks) if rank in proofs}


def proven_ranks(path: Path) -> set[int]:
    """Ranks of the run in folder `path` that have left a proof so far."""
    texts = [file.read_bytes() for file in path.glob(PROOFS_GLOB)]
    return {int(rank) for text in texts for rank in _RANKS.findall(text)}


def verdict(proofs: dict[int, dict[str, Any]], ranks: int) -> Verdict | None:
    """`mismatch` if a rank said so, `proven` if all ranks agree, None if some said nothing."""
    if any(proof.get("problems") for proof in proofs.values()):
        return "mismatch"
    return "proven" if len(proofs) == ranks else None


def keep_proofs(folder: RunFolder, proofs: dict[int, dict[str, Any]]) -> None:
    """Put the proofs into runtime.json, which the ranks have left.

    A full disk costs this copy, and not the status that is still to be written.
    """
    if proofs:
        ordered = [proofs.get(rank, {}) for rank in range(len(proofs))]
        placement = None
        if all("host" in proof and "local_rank" in proof for proof in ordered):
            hosts, local = ([entry[name] for entry in ordered] for name in ("host", "local_rank"))
            placement = {"nodes": hosts, "local_ranks": local}  # bench.record.RankPlacement
        runtime = folder.read_runtime() | {"placement": placement}
        runtime |= {"code_proof": {str(rank): proof for rank, proof in proofs.items()}}
        with contextlib.suppress(StoreFullError):
            write_json_atomically(folder.path / RUNTIME, runtime)
