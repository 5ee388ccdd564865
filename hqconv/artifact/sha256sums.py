"""SHA256SUMS: the digests of an artifact's files, the manifest's among them, as `sha256sum -c` reads them.

The file and the model card may be edited by people, and the card may have got an evaluation; the functions here detect
this.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from hqconv.artifact.manifest import FileEntry, Manifest
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import CARD, MANIFEST, SUMS

EVALUATION_BEGIN, EVALUATION_END = b"<!-- hqconv: evaluation ", b"<!-- hqconv: end of the evaluation -->\n"
EVALUATION = re.compile(re.escape(EVALUATION_BEGIN) + rb"(.*?)-->\n.*?" + re.escape(EVALUATION_END), re.DOTALL)

MAX_CARD_BYTES = 64 << 20  # of a card that is searched for an evaluation
_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def sums_bytes(files: Mapping[str, FileEntry], manifest_sha256: str, card_sha256: str | None = None) -> bytes:
    """Return the bytes of SHA256SUMS. files: of the manifest. manifest_sha256: of hqconv.json.

    card_sha256: of a model card that has got an evaluation since.
    """
    digests = {path: entry.sha256 for path, entry in files.items()} | {MANIFEST: manifest_sha256}
    digests |= {} if card_sha256 is None else {CARD: card_sha256}
    return "".join(_line(path, digests[path]) for path in sorted(digests)).encode()


def is_own_sums(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's SHA256SUMS exists and fits its manifest. Raises OSError."""
    path = root / SUMS
    if SUMS in manifest.files or not path.is_file():
        return False
    found, expected = path.read_bytes(), sums_bytes(manifest.files, manifest.sha256)
    if found != expected and (root / CARD).is_file():
        expected = sums_bytes(manifest.files, manifest.sha256, sha256_of(root / CARD))
    return found == expected


def are_sums(root: Path) -> bool:
    """Return whether SHA256SUMS exists and lists a manifest, so that it can be written again. Raises OSError."""
    path = root / SUMS
    return (
        path.is_file()
        and re.search(rf"^[0-9a-f]{{64}}  {re.escape(MANIFEST)}$".encode(), path.read_bytes(), re.M) is not None
    )


def is_own_card(root: Path, manifest: Manifest, *, with_evaluation: bool = False) -> bool:
    """Return whether an artifact's model card is the one that its manifest lists. Raises OSError.

    with_evaluation: the card may have got an evaluation since.
    """
    path, entry = root / CARD, manifest.files.get(CARD)
    if entry is None or not path.is_file():
        return False
    if path.stat().st_size == entry.size_bytes:
        return sha256_of(path) == entry.sha256
    if not with_evaluation or path.stat().st_size > MAX_CARD_BYTES:
        return False
    return hashlib.sha256(EVALUATION.sub(b"", path.read_bytes())).hexdigest() == entry.sha256


def _line(path: str, sha256: str) -> str:
    """Format one line; a name that would break it is escaped, marked by the line's first character."""
    name = path.translate(_ESCAPED)
    return f"{'' if name == path else chr(92)}{sha256}  {name}\n"
