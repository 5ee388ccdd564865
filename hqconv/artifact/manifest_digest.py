"""The manifest's digest of itself: its last field, by which any altered byte of it shows. Loads no torch."""

from __future__ import annotations

import hashlib
import json
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


def sealed(words: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with `digest` as its last field: the SHA-256 of all bytes before that field.

    A digest that `words` have already is replaced.
    """
    body = json_bytes({key: value for key, value in words.items() if key != DIGEST}).removesuffix(END)
    return body + FIELD + hashlib.sha256(body).hexdigest().encode() + b'"' + END


def json_bytes(words: Mapping[str, Any]) -> bytes:
    """A JSON document as it is written into an artifact."""
    return (json.dumps(words, indent=2, ensure_ascii=False) + "\n").encode()
