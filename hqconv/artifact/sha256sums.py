"""SHA256SUMS: the digests of an artifact's files, the manifest's among them, as `sha256sum -c` reads them.

It and the model card may be changed by people; whether they were is said here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import CARD, MANIFEST, SUMS

_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def sums_bytes(files: Mapping[str, Mapping[str, Any]], manifest: bytes) -> bytes:
    """The bytes of SHA256SUMS. files: of the manifest, path → `sha256`. manifest: its bytes."""
    digests = {path: words["sha256"] for path, words in files.items()}
    digests[MANIFEST] = hashlib.sha256(manifest).hexdigest()
    return "".join(_line(path, digests[path]) for path in sorted(digests)).encode()


def is_own_sums(root: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether an artifact's SHA256SUMS is there and is of its manifest, which lists `files`. Raises OSError."""
    path = root / SUMS
    if SUMS in files or not path.is_file():
        return False
    manifest = (root / MANIFEST).read_bytes()
    expected = sums_bytes(files, manifest)
    return path.stat().st_size == len(expected) and path.read_bytes() == expected


def are_sums(root: Path) -> bool:
    """Whether SHA256SUMS is there and lists a manifest, so that it can be made again. Raises OSError."""
    path = root / SUMS
    return (
        path.is_file()
        and re.search(rf"^[0-9a-f]{{64}}  {re.escape(MANIFEST)}$".encode(), path.read_bytes(), re.M)
        is not None
    )


def is_own_card(root: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether an artifact's model card is the one that its manifest lists among `files`. Raises OSError."""
    path = root / CARD
    if CARD not in files or not path.is_file() or path.stat().st_size != files[CARD]["size_bytes"]:
        return False
    return bool(sha256_of(path) == files[CARD]["sha256"])


def _line(path: str, sha256: str) -> str:
    """One line; a name that would break it is escaped, which the line's first character says."""
    name = path.translate(_ESCAPED)
    return f"{'' if name == path else chr(92)}{sha256}  {name}\n"
