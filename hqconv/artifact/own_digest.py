"""The manifest's digest of itself: its last field, by which any altered byte of it shows. Loads no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
FIELD = f',\n  "{DIGEST}": "'.encode()
END = b"\n}\n"
_LAST = "tensors"  # of the manifests that are older than the digest


def digest_of(data: bytes) -> str | None:
    """What a manifest's last field must say, by the bytes before it; None where they do not end as `sealed` has it."""
    body, field, rest = data.rpartition(FIELD)
    digest = hashlib.sha256(body).hexdigest()
    return digest if field and len(rest) == len(digest) + 1 + len(END) and rest.endswith(b'"' + END) else None


def alteration(data: bytes, words: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """What is wrong with a manifest's bytes by its own digest: what, expected, found; None where nothing is.

    data: of the file. words: what they say. One without a digest is good where it ends as those of before it do.
    """
    if DIGEST not in words:
        last = next(reversed(list(words)), "")
        if last == _LAST:
            return None
        return (
            "The manifest does not end as one does.",
            f"{DIGEST}, or {_LAST} in older ones",
            repr(last)[:80],
        )
    found = digest_of(data)
    if words[DIGEST] == found:
        return None
    what = "The manifest's bytes are not those that its digest was made of."
    expected = f"sha256 {str(words[DIGEST])[:80]}, as the manifest's last field"
    return what, expected, found or "another end of the file"
