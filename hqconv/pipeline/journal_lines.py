"""The lines of a journal, in words: what is converted, finished groups, fetched files, and who is at work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hqconv.artifact.build import FileRecord
from hqconv.errors import OutputError

FETCHED = "fetched"


@dataclass(frozen=True)
class JournalEntry:
    """A finished group: its files, what its conversion measured, and of a block the content sums.

    sources: the SHA-256 of the source's files that were read for it, where they were hashed.
    """

    group: str
    files: list[FileRecord]
    measured: dict[str, Any]
    sums: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def parse_identity(path: Path, line: bytes) -> dict[str, Any]:
    """What a journal's first line says was begun. Raises OutputError where it says nothing that can be read."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise OutputError(
            "The journal of an unfinished conversion cannot be read.",
            where=str(path),
            remedy="Start anew in another folder with -o, or remove this one.",
        ) from None


def lines_of(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines, and what follows the last of them."""
    *lines, torn = data.split(b"\n")
    return lines, torn


def parse_entry(line: bytes) -> JournalEntry | None:
    """A finished group, or None for a line that is none."""
    try:
        words = json.loads(line)
        files = [FileRecord(**record) for record in words["files"]]
        are_records = all(
            (type(f.path), type(f.size_bytes), type(f.sha256)) == (str, int, str) for f in files
        )
        measured, sums, sources = words["measured"], words["sums"], words.get("sources", {})
        are_digests = all(isinstance(sha256, str) for sha256 in sources.values())
        are_words = isinstance(measured, dict) and isinstance(sums, dict) and are_digests
        is_whole = are_records and isinstance(words["group"], str) and are_words
        return JournalEntry(words["group"], files, measured, sums, sources) if is_whole else None
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_fetch(line: bytes) -> str | None:
    """A fetched file, or None for a line that is of none."""
    try:
        name = json.loads(line)[FETCHED]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def last_process(lines: list[bytes]) -> str:
    """Who noted last that it is at work."""
    for line in reversed(lines):
        try:
            words = json.loads(line)
            return f"process {int(words['process'])} on {words['host']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return "a process that has just begun"


def compare_identities(root: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume another conversion, naming the first difference."""
    for key in {**now, **before}:  # in their own order: what was asked for before what follows from it
        if before.get(key) != now.get(key):
            raise OutputError(
                f"The unfinished conversion differs from this one in: {key}.",
                where=str(root),
                expected=_short(before.get(key)),
                found=_short(now.get(key)),
                remedy="Repeat the first command with --resume, or start anew with --overwrite.",
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " …"
