"""Digests of whole files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 1 << 20  # a smaller one is no faster, and asks for Python's one lock more often


def sha256_of(path: Path, keep_on: Callable[[], object] | None = None) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. Raises OSError where it cannot be read.

    keep_on: called between chunks of a MiB; what it raises ends the work.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            if keep_on is not None:
                keep_on()
    return digest.hexdigest()


def blob_sha256(path: Path) -> str | None:
    """The SHA-256 by which the Hub's cache has a file that a repo keeps in LFS; None for any other file.

    It is what the Hub says of the file. Nobody read the file for it.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    is_cached = blob.parent.name == "blobs" and (blob.parent.parent / "snapshots").is_dir()
    return blob.name if is_cached and re.fullmatch(r"[0-9a-f]{64}", blob.name) else None
