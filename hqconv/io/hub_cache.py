"""Files of a snapshot in the Hub's cache: whether the cache has their bytes already, and how one is removed.

The cache keeps bytes in `blobs`, under their digest, and in `snapshots/<commit>` links to them under the files' names;
where there are no links, the files themselves.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def has_bytes(root: Path, name: str, digest: str | None) -> bool:
    """Whether the cache has a file of the snapshot `root`, or its bytes under another name or commit."""
    blobs = root.parent.parent / "blobs"
    return (root / name).exists() or (digest is not None and os.path.lexists(blobs / digest))


def tidy(root: Path, digest: str | None) -> None:
    """Remove what downloads that were killed left of some bytes, unless somebody is fetching them now.

    Only files that the library cannot go on with: newer versions give each download a name of its own.
    """
    repo = root.parent.parent
    left = [] if digest is None else list((repo / "blobs").glob(f"{digest}.*.incomplete"))
    lock = repo.parent / ".locks" / repo.name / f"{digest}.lock"
    if not left or not lock.is_file():
        return
    with lock.open("rb") as file, suppress(OSError):  # the library's lock is held, or there are none here
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in left:
            path.unlink(missing_ok=True)


def drop(root: Path, name: str) -> None:
    """Remove a file of the snapshot `root`, and its bytes where no other name or commit has them. Raises OSError."""
    path = root / name
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        return
    blob = Path(os.path.normpath(path.parent / path.readlink()))
    if blob.is_symlink():
        _drop_shared(path)
        return
    path.unlink()
    if blob.parent == root.parent.parent / "blobs" and not _is_linked(root.parent, blob):
        blob.unlink(missing_ok=True)


def _is_linked(snapshots: Path, blob: Path) -> bool:
    """Whether a snapshot has a link to these bytes."""
    for folder, _, names in os.walk(snapshots):
        for name in names:
            path = Path(folder) / name
            if path.is_symlink() and Path(os.path.normpath(path.parent / path.readlink())) == blob:
                return True
    return False


def _drop_shared(path: Path) -> None:
    """Newer versions of the library may keep bytes once for all repos, and count who has them."""
    from huggingface_hub import scan_cache_dir

    cache: Any = scan_cache_dir(_cache_of(path))
    of_path = [f for repo in cache.repos for r in repo.revisions for f in r.files if f.file_path == path]
    cache.delete_files(*of_path).execute()


def _cache_of(path: Path) -> Path:
    """The cache's folder, which has the repos' folders in it."""
    return next(folder.parent.parent for folder in path.parents if folder.name == "snapshots")
