"""The front matter of a model card: the YAML between `---` lines at the head of a README.md, which the Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FRONT = re.compile(
    rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class FrontMatter:
    """words: what it says, empty where there is none or it cannot be read. raw: its lines without the `---`, None where
    there is none. body: what follows it. problem: why it cannot be read, else "".
    """

    body: bytes
    words: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    problem: str = ""

    @classmethod
    def of(cls, card: bytes) -> FrontMatter:
        """The front matter of a card's bytes, which may be any."""
        found = _FRONT.match(card)
        if found is None:
            return cls(card)
        raw, body = found[1], card[found.end() :]
        words = _parsed(raw) if len(raw) <= _MAX_BYTES else None
        if words is None:
            return cls(body, raw=raw, problem="it is no YAML of keys and values, or larger than 4 MiB")
        return cls(body, words, raw)

    def texts(self, key: str) -> str | list[str] | None:
        """A value that is a text or a list of texts; None for any other, and where there is none."""
        value = self.words.get(key)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return list(value)
        return value if isinstance(value, str) and value else None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """The words of a YAML mapping; None where it is none. What the library says of it differs by its build."""
    import yaml

    try:
        words = yaml.load(raw.decode(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return words if isinstance(words, dict) else {} if words is None else None


def in_yaml(words: Mapping[str, Any]) -> bytes:
    """Front matter with its `---` lines, of texts and lists of texts, in their order."""
    import yaml

    text: str = yaml.safe_dump(dict(words), sort_keys=False, allow_unicode=True, width=10_000)
    return b"---\n" + text.encode() + b"---\n"
