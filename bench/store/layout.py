"""Names of the files in a results folder, and the check that a folder is one.

results/
  SCHEMA                 integer version of everything below
  runner.lock            held by the one runner of the folder
  runs/<slug>-<cfg12>/<UTC>-<rand4>/
    spec.json            ResolvedRun, as the code of the run's arm knows it     written first
    owner.lock           held while the run is alive       [Note: liveness by flock]
    status.json env.json summary.json memory.json runtime.json failure.rank<N>.json
    trace.rank<N>.json   of runs with measure.profile torch
    counts.json          what one step did, of runs that count it
    steps.node<K>.jsonl  one line per rank and step     [Note: one writer per line]
    logs/                agent.log, agent.json, rank<N>.log,
                         issued.rank<N>.json of ranks that stand still,
                         expected_code.json, code_proof.node<K>.jsonl
    nccl/                rank<N>.log, iterations.rank<N>.jsonl, groups.rank<N>.json (evidence runs)
  sweeps/<id>/plan.json  of arms with code of their own, <id> ends with what they are
  arms/                  worktrees and packages of arms; may be removed, it is made again
  baselines/<name>.json  noise/<hardware-key>.json
  validations/<id>/verdict.json
  imports/<id>/           workload.json steps.jsonl    runs of other frameworks
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.errors import NotAResultsFolderError, UsageError
from bench.record import SCHEMA_VERSION
from bench.store.atomic import reporting_failed_writes, write_text_atomically

SCHEMA = "SCHEMA"
RUNS = "runs"
SWEEPS = "sweeps"
BASELINES = "baselines"
NOISE = "noise"
VALIDATIONS = "validations"
IMPORTS = "imports"
LOGS = "logs"
NCCL = "nccl"
PLAN = "plan.json"
SPEC = "spec.json"
STATUS = "status.json"
ENVIRONMENT = "env.json"
RUNTIME = "runtime.json"
MEMORY = "memory.json"
COUNTS = "counts.json"
SUMMARY = "summary.json"
OWNER_LOCK = "owner.lock"
RUNNER_LOCK = "runner.lock"
FAILURE = "failure"
ISSUED = "issued"
TRACE = "trace"
FAILURE_GLOB = f"{FAILURE}.rank*.json"
ISSUED_GLOB = f"{ISSUED}.rank*.json"

IDENTITY_DIGITS = 8
"""Hex digits that say what the arms of a sweep are, at the end of its id."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_RANK = re.compile(r"\.rank(\d+)\.")


def rank_file(kind: str, rank: int) -> str:
    """Name of a rank's own file of this kind: `failure.rank3.json`."""
    return f"{kind}.rank{rank}.json"


def nccl_log(run_dir: Path, rank: int) -> Path:
    """Where the NCCL of a rank writes."""
    return run_dir / NCCL / f"rank{rank}.log"


def is_of_arms(sweep_id: str, name: str) -> bool:
    """Whether the sweep is `name` with what its arms are behind it: `two-base-vs-head-0a1b2c3d`."""
    return bool(re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{{IDENTITY_DIGITS}}}", sweep_id))


def rank_of(path: Path) -> int | None:
    """Rank in a name such as `failure.rank3.json`, None if there is none."""
    match = _RANK.search(path.name)
    return int(match.group(1)) if match else None


def checked_identifier(kind: str, name: str) -> str:
    """`name` if it can be a folder name on its own.

    Raises:
        UsageError: it could leave the results folder or confuse a shell.
    """
    if not _IDENTIFIER.fullmatch(name):
        raise UsageError(
            f"{kind} {name!r} cannot be a folder name: expected letters, digits, '.', '_' and '-',"
            " starting with a letter or digit, at most 151 characters"
        )
    return name


def open_layout(root: Path, *, create: bool) -> None:
    """Check that `root` is a results folder of a version we can use, or make it one.

    Raises:
        NotAResultsFolderError: missing (without `create`), not a folder, a folder of something
            else, or written by a newer version.
        StoreFullError: no space to create it.
    """
    try:
        _check_kind(root, create=create)
    except OSError as error:
        raise NotAResultsFolderError(
            f"{root} cannot be opened: {error.strerror}; give a folder that you may read"
        ) from error
    if create:
        _create(root)


def _check_kind(root: Path, *, create: bool) -> None:
    if root.is_symlink() and not root.exists():
        raise NotAResultsFolderError(
            f"{root} is a link to {root.readlink()}, which does not exist; make that folder, or"
            " remove the link"
        )
    if root.exists() and not root.is_dir():
        raise NotAResultsFolderError(
            f"{root} is a file; expected a results folder: give the path of a folder"
        )
    # Listed before SCHEMA is looked for: [Note: SCHEMA comes first].
    # What SCHEMA is written to before it has its name, and the folders of our tools.
    ours = re.compile(rf"\.{SCHEMA}\..*\.tmp|gpu-check|mutation")
    others = create and root.exists() and not all(ours.fullmatch(o.name) for o in root.iterdir())
    if (root / SCHEMA).is_file():
        _check_version(root)
    elif not create:
        described = "a folder without a SCHEMA file" if root.exists() else "nothing"
        raise NotAResultsFolderError(
            f"{root} is not a results folder (found {described}); expected one that"
            " `mfsdp-bench run` has written: check --results"
        )
    elif others:
        raise NotAResultsFolderError(
            f"{root} is not empty and not a results folder (it has no SCHEMA file); nothing was"
            " written there: give an empty or a new folder"
        )


def _create(root: Path) -> None:
    """Make what is missing.

    [Note: SCHEMA comes first] Several commands may make the same folder at once: hosts that were
    started together, jobs, two terminals. Until SCHEMA is there, only drafts of it are in the
    folder; who finds anything else there, and then no SCHEMA, has found a folder of something else.
    """
    with reporting_failed_writes(root):
        root.mkdir(parents=True, exist_ok=True)
    if not (root / SCHEMA).exists():
        write_text_atomically(root / SCHEMA, f"{SCHEMA_VERSION}\n")
    with reporting_failed_writes(root):
        for folder in (root / RUNS, root / SWEEPS):
            folder.mkdir(exist_ok=True)


def _check_version(root: Path) -> None:
    text = (root / SCHEMA).read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise NotAResultsFolderError(
            f"{root / SCHEMA} holds {text[:40]!r}; expected an integer version such as"
            f" {SCHEMA_VERSION}: this folder was not written by mfsdp-bench, or was damaged"
        )
    if int(text) > SCHEMA_VERSION:
        raise NotAResultsFolderError(
            f"{root} was written by a newer version (schema {text}; this one reads up to"
            f" {SCHEMA_VERSION}): update mfsdp-bench, or use another results folder"
        )
