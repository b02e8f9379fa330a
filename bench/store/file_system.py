"""What kind of file system a folder is on, and whether other machines see it too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = frozenset(
    {
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "afs", "gfs2",
        "ocfs2", "glusterfs", "orangefs", "pvfs2", "wekafs", "panfs", "virtiofs", "9p",
    }
)  # fmt: skip
_SHARED_BY_FUSE = ("fuse.", "fuseblk")
_LOCAL_BY_FUSE = frozenset({"fuse.lxcfs", "fuse.fuse-overlayfs", "fuse.overlayfs", "fuseblk"})


@dataclass(frozen=True)
class FileSystem:
    """kind: as the kernel names it, "" where it does not say. mount: where it is mounted."""

    kind: str
    mount: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether other machines write to it, so that what they wrote may be seen late."""
        if self.kind in _LOCAL_BY_FUSE:
            return False
        return self.kind in _SHARED or self.kind.startswith(_SHARED_BY_FUSE)


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> FileSystem:
    """The file system that holds `path`, or would: that of its nearest folder that exists."""
    wanted = nearest_folder(path)
    found = FileSystem("")
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw (proc_pid_mountinfo(5))
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) <= 4 or not after:  # noqa: PLR2004 - the mount point is the fifth field
            continue
        mount = fields[4].encode().decode("unicode_escape")
        # Of mounts over each other, the last one is seen.
        if wanted.is_relative_to(mount) and len(mount) >= len(found.mount):
            found = FileSystem(after.split()[0], mount)
    return found


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path.resolve()
