"""SHA256SUMS: the digests of an artifact's files, the manifest's among them, as `sha256sum -c` reads them.

The file and the model card may be edited by people; the functions here detect this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hqconv.artifact.manifest import FileEntry, Manifest
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import CARD, MANIFEST, SUMS

_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def sums_bytes(files: Mapping[str, FileEntry], manifest_sha256: str) -> bytes:
    """Return the bytes of SHA256SUMS. files: of the manifest. manifest_sha256: of hqconv.json."""
    digests = {path: entry.sha256 for path, entry in files.items()} | {MANIFEST: manifest_sha256}
    return "".join(_line(path, digests[path]) for path in sorted(digests)).encode()


def is_own_sums(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's SHA256SUMS exists and fits its manifest. Raises OSError."""
    path = root / SUMS
    if SUMS in manifest.files or not path.is_file():
        return False
    expected = sums_bytes(manifest.files, manifest.sha256)
    return path.stat().st_size == len(expected) and path.read_bytes() == expected


def are_sums(root: Path) -> bool:
    """Return whether SHA256SUMS exists and lists a manifest, so that it can be written again. Raises OSError."""
    path = root / SUMS
    return (
        path.is_file()
        and re.search(rf"^[0-9a-f]{{64}}  {re.escape(MANIFEST)}$".encode(), path.read_bytes(), re.M) is not None
    )


def is_own_card(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's model card is the one that its manifest lists. Raises OSError."""
    path, entry = root / CARD, manifest.files.get(CARD)
    if entry is None or not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    return sha256_of(path) == entry.sha256


def _line(path: str, sha256: str) -> str:
    """Format one line; a name that would break it is escaped, marked by the line's first character."""
    name = path.translate(_ESCAPED)
    return f"{'' if name == path else chr(92)}{sha256}  {name}\n"
