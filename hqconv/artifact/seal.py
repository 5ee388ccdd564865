"""A finished manifest's bytes, sealed by its digest of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from hqconv.artifact.build import json_bytes
from hqconv.artifact.own_digest import DIGEST, END, FIELD


def sealed(words: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with `digest` as its last field: the SHA-256 of all bytes before that field.

    A digest that `words` have already is replaced.
    """
    body = json_bytes({key: value for key, value in words.items() if key != DIGEST}).removesuffix(END)
    return body + FIELD + hashlib.sha256(body).hexdigest().encode() + b'"' + END
