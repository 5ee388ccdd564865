"""Front matter of a model card: the YAML between `---` lines at the head of a README.md, which the Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FRONT = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class FrontMatter:
    """Parsed front matter of a card.

    words: the document, keys and values, empty if it is missing or unreadable. raw: its lines without the `---`, None
    if it is missing. body: the text after it. problem: why it cannot be read, else "".
    """

    body: bytes
    words: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    problem: str = ""

    @classmethod
    def of(cls, card: bytes) -> FrontMatter:
        """Parse the front matter of a card's bytes, which may be anything."""
        found = _FRONT.match(card)
        if found is None:
            return cls(card)
        raw, body = found[1], card[found.end() :]
        document = _parsed(raw) if len(raw) <= _MAX_BYTES else None
        if document is None:
            return cls(body, raw=raw, problem="it is no YAML of keys and values, or larger than 4 MiB")
        return cls(body, document, raw)

    def texts(self, key: str) -> str | list[str] | None:
        """Return a value that is a text or a list of texts; None for any other value and for a missing key."""
        value = self.words.get(key)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return list(value)
        return value if isinstance(value, str) and value else None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Parse a YAML mapping; return None for anything else. The library's error text differs by its build."""
    import yaml

    try:
        document = yaml.load(raw.decode(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return document if isinstance(document, dict) else {} if document is None else None


def in_yaml(document: Mapping[str, Any]) -> bytes:
    """Write front matter with its `---` lines from texts and lists of texts, in their order."""
    import yaml

    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=10_000)
    return b"---\n" + text.encode() + b"---\n"
