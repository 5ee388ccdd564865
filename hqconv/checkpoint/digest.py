"""Digests of whole files."""

from __future__ import annotations

import hashlib
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
