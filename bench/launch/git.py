"""What git says of a repository: its state, its commits, and a commit as a folder."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from bench.errors import UsageError

_TIMEOUT_SECONDS = 300.0
_STATE_SECONDS = 20.0  # at the start of every run: a stalled file system must not hold it for long
# What names a repository: a git hook that runs this sets some of them, to its own.
_REPOSITORY_VARIABLES = re.compile(
    "GIT_(DIR|WORK_TREE|INDEX_FILE|COMMON_DIR|(ALTERNATE_)?OBJECT_DIRECTOR(Y|IES)|PREFIX|NAMESPACE)"
)
_HEX_DIGITS = 16
_COMMIT = b"# branch.oid "
_NO_CODE = tuple(
    f":(exclude)*.{ending}"
    for ending in ("yaml", "yml", "md", "txt", "log", "csv", "html", "json", "pyc")
)


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, whatever its exit code.

    Raises:
        UsageError: there is no git, or it does not come back.
    """
    done = _run(folder, *arguments)
    texts = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def _run(
    folder: Path, *arguments: str, seconds: float = _TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(folder), *arguments]
    variables = {k: v for k, v in os.environ.items() if not _REPOSITORY_VARIABLES.fullmatch(k)}
    try:
        return subprocess.run(
            command, env=variables, capture_output=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git cannot be run ({error}); arms of a git ref need it") from error


def git_state(root: Path) -> dict[str, Any]:
    """`commit`, `dirty` and `dirty_hash` of the repository at `root`; None where git cannot say.

    dirty_hash covers the difference to the commit and the names and contents of untracked files
    that git does not ignore; None for a clean tree. Untracked files that are no code, as a sweep
    file or a log next to it, or what Python has compiled, change nothing.
    """
    ask = partial(_run, root, seconds=_STATE_SECONDS)
    changes = untracked = b""
    try:
        # A clean tree needs no other question, and this one comes at the start of every run.
        form = ("--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=all")
        lines = ask("--no-optional-locks", "status", *form).stdout.split(b"\0")
        commit = next((line[len(_COMMIT) :] for line in lines if line.startswith(_COMMIT)), b"(")
        if any(line.startswith((b"1 ", b"u ")) for line in lines):
            # A viewer that the user has set (`diff.external`) prints something else, or nothing.
            plain = ("--no-ext-diff", "--no-textconv", "--no-color")
            changes = ask("diff", *plain, "HEAD", "--binary").stdout
        if any(line.startswith(b"? ") for line in lines):
            listing = ("ls-files", "--others", "--exclude-standard", "-z", "--", ".", *_NO_CODE)
            untracked = ask(*listing).stdout
    except UsageError:
        commit = b"("
    if commit.startswith(b"("):  # no git, no repository, or one without a commit: (initial)
        return {"commit": None, "dirty": None, "dirty_hash": None}
    dirty = bool(changes or untracked)
    return {
        "commit": commit.decode(),
        "dirty": dirty,
        "dirty_hash": _hash(root, changes, untracked) if dirty else None,
    }


def _hash(root: Path, changes: bytes, untracked: bytes) -> str:
    digest = hashlib.sha256(changes)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        digest.update(b"\0" + name + b"\0")
        path = root / name.decode(errors="surrogateescape")
        try:
            digest.update(path.read_bytes())
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()[:_HEX_DIGITS]


def commit_of(repository: Path, ref: str, who: str) -> str:
    """The commit that `ref` names in `repository`.

    Raises:
        UsageError: no repository, or no such ref. `who` begins the message.
    """
    if not repository.is_dir():
        raise UsageError(f"{who}: {repository} is not a folder; expected a git repository")
    if git(repository, "rev-parse", "--git-dir").returncode != 0:
        raise UsageError(
            f"{who}: {repository} is not in a git repository, so {ref!r} means nothing there;"
            " name one with repo:PATH, or a folder with checkout:PATH"
        )
    resolved = git(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if resolved.returncode != 0:
        raise UsageError(
            f"{who}: git knows no commit {ref!r} in {repository}; expected a branch, tag or commit"
            " (a shallow clone holds only the newest: `git fetch --unshallow`), `.` for the working"
            " tree, or checkout:PATH"
        )
    return resolved.stdout.strip()


def worktree(repository: Path, commit: str, cache: Path, who: str) -> Path:
    """A clean checkout of `commit` below `cache`; the repository's own tree is not touched.

    Entries of worktrees whose folder is gone are pruned on the way. Where `repository` is a folder
    inside a repository, the same folder of the checkout is returned.

    Raises:
        UsageError: the folder was changed by hand, git cannot make it, or the commit lacks it.
    """
    prefix = git(repository, "rev-parse", "--show-prefix").stdout.strip()
    origin = git(repository, "rev-parse", "--path-format=absolute", "--git-common-dir").stdout
    name = hashlib.sha256(origin.encode()).hexdigest()[:6]
    whole_tree = cache / "worktrees" / f"{commit[:12]}-{name}"
    git(repository, "worktree", "prune")
    if whole_tree.exists():
        _check_unchanged(whole_tree, commit, who)
    else:
        whole_tree.parent.mkdir(parents=True, exist_ok=True)
        made = git(repository, "worktree", "add", "--quiet", "--detach", str(whole_tree), commit)
        if made.returncode != 0:
            said = (made.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise UsageError(f"{who}: git cannot check out {commit[:12]}: {said}")
    folder = whole_tree / prefix
    if not folder.is_dir():
        raise UsageError(
            f"{who}: commit {commit[:12]} has no folder {prefix}; name a repository with repo:PATH"
        )
    return folder


def _check_unchanged(folder: Path, commit: str, who: str) -> None:
    head = git(folder, "rev-parse", "HEAD").stdout.strip()
    top = git(folder, "rev-parse", "--show-toplevel").stdout.strip()
    status = git(folder, "status", "--porcelain", "--untracked-files=all").stdout
    # Not every repository ignores what Python leaves behind when it imports from it.
    changes = [line.strip() for line in status.splitlines() if "__pycache__" not in line]
    if head == commit and not changes and Path(top).resolve() == folder.resolve():
        return
    what = f"has changes ({changes[0]})" if changes else "is at another commit"
    raise UsageError(
        f"{who}: the prepared checkout {folder} {what}; expected commit {commit[:12]} untouched."
        " Remove that folder; it is made again"
    )
