"""Rules of a quantization config: names and patterns of modules, and the format that they give."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache

from hqconv.formats.config_reader import ConfigReader
from hqconv.formats.linear_regex import LinearRegex
from hqconv.formats.source_format import PLAIN, SourceFormat

Matcher = Callable[[str], bool]
# A module's format by one rule of a config; None where the rule does not apply. The first rule that applies counts.
Rule = Callable[[str], SourceFormat | None]


class RegexSet:
    """Regular expressions matched from the start of names; a config may have hundreds.

    patterns: each with a text that all its matches begin with, where a dot stands for any character.
    """

    def __init__(self, patterns: Iterable[tuple[str, LinearRegex]]) -> None:
        self._patterns = list(patterns)
        self._candidates = cache(self._that_may_match)

    def match(self, name: str) -> bool:
        """Return True if a pattern matches. Names that differ only in their last two components share a lookup."""
        return any(regex.matches(name) for regex in self._candidates(name.rsplit(".", 2)[0]))

    def _that_may_match(self, stem: str) -> list[LinearRegex]:
        """Return the patterns that may match a name that begins with the stem."""
        return [
            regex
            for start, regex in self._patterns
            if all(char in (".", other) for char, other in zip(start, stem, strict=False))
        ]


def start_of(pattern: str) -> str:
    """Return a text that all matches of a regular expression begin with, a dot for any character."""
    found = re.match(r"\^?((?:[\w.-]|\\\.)*)([*+?{]?)", "" if "|" in pattern else pattern)
    assert found is not None
    start = found[1][: -2 if found[1].endswith("\\.") else -1] if found[2] else found[1]
    return start.replace("\\.", ".")


def when(matches: Matcher, gives: SourceFormat = PLAIN) -> Rule:
    """Return the rule that gives a format to the modules that match."""
    return lambda module: gives if matches(module) else None


def always(gives: SourceFormat) -> Rule:
    """Return the rule that gives a format to every module."""
    return lambda _module: gives


def parents(module: str) -> Iterator[str]:
    """Yield the module's own name, then the names of the modules around it, innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def named_in(patterns: Iterable[str], where: str, *, with_parents: bool = False) -> Matcher:
    """Match names that equal an entry, or match one that begins with "re:" from their start."""
    patterns = list(patterns)
    regexes = [pattern[3:] for pattern in patterns if pattern.startswith("re:")]
    searches = [(start_of(pattern), LinearRegex(pattern, where)) for pattern in regexes]
    return _matcher(
        {pattern for pattern in patterns if not pattern.startswith("re:")}, searches, with_parents
    )


def globbed_in(patterns: Iterable[str], where: str, *, with_parents: bool = False) -> Matcher:
    """Match names that match a shell pattern as a whole, or an entry that begins with "re:" from their start."""
    patterns = list(patterns)
    exact = {pattern for pattern in patterns if not set("*?[:") & set(pattern)}
    searches = []
    for pattern in (p for p in patterns if p not in exact):
        if pattern.startswith("re:"):
            searches.append((start_of(pattern[3:]), LinearRegex(pattern[3:], where)))
        else:
            glob = LinearRegex(fnmatch.translate(pattern), where, is_glob=True)
            searches.append((re.split(r"[*?[]", pattern)[0], glob))
    return _matcher(exact, searches, with_parents)


def _matcher(
    exact: Collection[str], searches: Iterable[tuple[str, LinearRegex]], with_parents: bool
) -> Matcher:
    """Match names by a set of names and patterns. with_parents: also where one of a module around it matches."""
    regexes = RegexSet(searches)
    is_named = cache(lambda name: name in exact or regexes.match(name))
    return lambda module: any(
        is_named(name) for name in (parents(module) if with_parents else [module])
    )


def containing(parts: Iterable[str]) -> Matcher:
    """Match names that contain one of the strings."""
    parts = list(parts)
    return lambda module: any(part in module for part in parts)


def on_path(entries: Iterable[str]) -> Matcher:
    """Match names that have an entry among their components: "gate" is on mlp.gate.x, not on mlp.gate_proj."""
    entries = [f".{entry.strip('.')}." for entry in entries if entry.strip(".")]
    return lambda module: any(entry in f".{module}." for entry in entries)


def skipped_by_transformers(patterns: Iterable[str], where: str) -> Matcher:
    """Match names that transformers leaves unconverted: a pattern covers a whole path from the start, or ends it.

    Source: `should_convert_module` of transformers.quantizers.quantizers_utils.
    """
    patterns = list(patterns)
    after = r"(?:(?<=\.)|(?=\.|$))"
    searches = RegexSet(
        (start_of(entry), LinearRegex(entry, where, after=after)) for entry in patterns
    )
    endings = set(patterns)
    sizes = sorted({len(pattern) for pattern in endings})

    def matches(module: str) -> bool:
        return any(module[-size:] in endings for size in sizes if size) or searches.match(module)

    return (lambda _module: True) if "" in endings else matches


def skipped_names(config: ConfigReader, *keys: str) -> Rule:
    """Return the rule for modules that a config leaves out, as transformers reads its keys."""
    names = [name for key in keys for name in config.names(key)]
    return when(skipped_by_transformers(names, config.where(config.first(*keys))))
