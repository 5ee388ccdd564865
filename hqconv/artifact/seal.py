"""The manifest's digest of itself: its last field, by which any altered byte of it shows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from hqconv.artifact.build import json_bytes

DIGEST = "digest"
_FIELD = f',\n  "{DIGEST}": "'.encode()
_END = b"\n}\n"


def sealed(words: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with `digest` as its last field: the SHA-256 of all bytes before that field.

    A digest that `words` have already is replaced.
    """
    body = json_bytes({key: value for key, value in words.items() if key != DIGEST}).removesuffix(_END)
    return body + _FIELD + hashlib.sha256(body).hexdigest().encode() + b'"' + _END


def digest_of(data: bytes) -> str | None:
    """What a manifest's last field must say, by the bytes before it; None where they do not end as `sealed` has it."""
    body, field, rest = data.rpartition(_FIELD)
    digest = hashlib.sha256(body).hexdigest()
    return (
        digest if field and len(rest) == len(digest) + 1 + len(_END) and rest.endswith(b'"' + _END) else None
    )
