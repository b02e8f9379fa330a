"""What the lines suggest beyond what they prove: for a reader, never for a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from reports.nccl.events import ANY
from reports.nccl.job import LoggedJob, is_unknown
from reports.nccl.rows import Verdict, VerdictRow

_MOST_RATIO: Final = 64
_SMALLEST_COMPARED_BYTES: Final = 4096
_MOST_HINTS: Final = 8


def hints(job: LoggedJob, rows: Sequence[VerdictRow]) -> list[str]:
    """Sentences, each with the observation that it rests on."""
    unknown = [row for row in rows if not row.communicator.attributed]
    if not unknown:
        return []
    known = [row for row in unknown if not any(map(is_unknown, row.processes))]
    found = [*_version(job), *_brackets(unknown), *_roots(known), *_cascades(known)]
    return [*found, *_no_multicast(unknown)][:_MOST_HINTS]


def _version(job: LoggedJob) -> Iterator[str]:
    stated = any(process.version_line for process in job.processes.values())
    versions = {process.versions for process in job.processes.values()}
    if not stated and len(versions) == 1 and versions != {ANY}:
        yield (f"No line states the version; the forms of the lines are those of {versions.pop()}.")


def _brackets(rows: Sequence[VerdictRow]) -> Iterator[str]:
    if not all(is_unknown(name) for row in rows for name in row.processes):
        yield (
            "The number in brackets is the local CUDA device, not a rank, and without COLL lines no"
            " line says which communicator it is about."
        )
    if any(row.at_least for row in rows):
        yield (
            "Symmetric lines of 2.27 are printed by every rank, all others by rank 0 of the"
            " communicator alone: that a process prints only symmetric lines says nothing about its"
            " other collectives, and which processes print none proves nothing."
        )


def _roots(rows: Sequence[VerdictRow]) -> Iterator[str]:
    """The same regular line from two processes comes from two communicators."""
    for row in rows:
        if row.verdict is Verdict.REGULAR and len(row.processes) > 1:
            shown = ", ".join(row.processes[:4])
            yield (
                f"{shown} each print {row.operation} of {row.size_bytes:,} bytes as rank 0 of a"
                f" communicator: there are at least {len(row.processes)} of them."
            )
            return


def _cascades(rows: Sequence[VerdictRow]) -> Iterator[str]:
    """Sizes that are an exact multiple of another process's, as in a reduction over two axes."""
    scatters = [row for row in rows if row.operation == "ReduceScatter"]
    scatters = [row for row in scatters if row.size_bytes > _SMALLEST_COMPARED_BYTES]
    for large in scatters:
        for small in scatters:
            ratio = large.size_bytes // small.size_bytes
            apart = not set(large.processes) & set(small.processes)
            if apart and large.size_bytes == ratio * small.size_bytes and 1 < ratio <= _MOST_RATIO:
                yield (
                    f"ReduceScatter of {large.size_bytes:,} bytes"
                    f" ({', '.join(large.processes[:2])}) is exactly {ratio} x the"
                    f" {small.size_bytes:,} bytes of {', '.join(small.processes[:4])}: this looks"
                    " like a reduction over an inner axis, then over an outer one of"
                    f" {ratio} ranks."
                )
                return


def _no_multicast(rows: Sequence[VerdictRow]) -> Iterator[str]:
    kernels = {k for row in rows if row.verdict is Verdict.SYMMETRIC for k in row.kernels}
    plain = sorted(k for k in kernels if "MC" not in k and not k.startswith("AllGather_Rail"))
    if plain and len(plain) == len(kernels):
        yield (
            f"{', '.join(plain)} uses no multicast (no MC in its name): its communicator has no"
            " NVLS, which needs more than two local ranks."
        )
