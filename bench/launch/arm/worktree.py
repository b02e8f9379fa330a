"""A commit as a folder: a git worktree in the cache, made once per commit and used again."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from bench.errors import UsageError

_TIMEOUT_SECONDS = 300.0


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
    found = git(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if found.returncode != 0:
        raise UsageError(
            f"{who}: git knows no commit {ref!r} in {repository}; expected a branch, tag or commit"
            " (a shallow clone holds only the newest: `git fetch --unshallow`), `.` for the working"
            " tree, or checkout:PATH"
        )
    return found.stdout.strip()


def worktree(repository: Path, commit: str, cache: Path, who: str) -> Path:
    """A clean checkout of `commit` below `cache`; the repository's own tree is not touched.

    Entries of worktrees whose folder is gone are pruned on the way. Where `repository` is a folder
    inside a repository, the same folder of the checkout is returned.

    Raises:
        UsageError: the folder was changed by hand, git cannot make it, or the commit lacks it.
    """
    prefix = git(repository, "rev-parse", "--show-prefix").stdout.strip()
    folder = _whole_worktree(repository, commit, cache, who) / prefix
    if not folder.is_dir():
        raise UsageError(
            f"{who}: commit {commit[:12]} has no folder {prefix}; name a repository with repo:PATH"
        )
    return folder


def _whole_worktree(repository: Path, commit: str, cache: Path, who: str) -> Path:
    origin = git(repository, "rev-parse", "--path-format=absolute", "--git-common-dir").stdout
    name = hashlib.sha256(origin.encode()).hexdigest()[:6]
    folder = cache / "worktrees" / f"{commit[:12]}-{name}"
    git(repository, "worktree", "prune")
    if folder.exists():
        _check_unchanged(folder, commit, who)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = git(repository, "worktree", "add", "--quiet", "--detach", str(folder), commit)
    if made.returncode != 0:
        raise UsageError(f"{who}: git cannot check out {commit[:12]}: {_last_line(made.stderr)}")
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


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, whatever its exit code.

    Raises:
        UsageError: there is no git, or it does not come back.
    """
    command = ["git", "-C", str(folder), *arguments]
    # A git hook that runs this sets GIT_DIR and others, which would name the hook's repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git cannot be run ({error}); arms of a git ref need it") from error


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it gave no reason"
