"""Reading a quantization config: values with their key in every complaint, and the ways configs name modules."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from hqconv.errors import InputError, RequestError
from hqconv.formats.source_format import PLAIN, SourceFormat

Text = Mapping[str, Any]  # the language model's config
Matcher = Callable[[str], bool]
# What one rule of a config says of a module; None: nothing. A config's first rule that speaks decides.
Rule = Callable[[str], SourceFormat | None]
LARGEST = 1 << 24


class ConfigReader:
    """One JSON object of a config; null counts as absent.

    path: what the object is called in errors. origins: the paths of keys that come from another object.
    """

    def __init__(self, values: object, path: str, origins: Mapping[str, str] | None = None) -> None:
        if not isinstance(values, Mapping):
            raise InputError(
                "The quantization config has a value of the wrong type.",
                where=path,
                expected="an object",
                found=repr(values),
            )
        self.values: Mapping[str, Any] = values
        self.path = path
        self._origins = origins or {}

    def where(self, key: str) -> str:
        """What a key is called in errors."""
        return f"{self._origins.get(key, self.path)}.{key}"

    def has(self, *keys: str) -> bool:
        """Whether one of the keys holds a value."""
        return any(self.values.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str:
        """The first of several names of one key that holds a value; the first name if none does."""
        return next((key for key in keys if self.has(key)), keys[0])

    def wrong(self, key: str, expected: object) -> InputError:
        """The error for a value that makes no sense."""
        found = repr(self.values[key]) if key in self.values else "nothing"
        what = "The quantization config has a value that makes no sense."
        return InputError(what, where=self.where(key), expected=expected, found=found)

    def unsupported(self, key: str, expected: object) -> RequestError:
        """The error for a value that is sound but cannot be read here."""
        what = "The checkpoint is quantized in a way that is not supported."
        found = repr(self.values.get(key))
        return RequestError(what, where=self.where(key), expected=expected, found=found)

    def integer(self, key: str, low: int, high: int = LARGEST, default: int | None = None) -> int:
        """A whole number in low … high; without a default the key must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"a whole number, {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, choices: Collection[str] = (), default: str | None = None) -> str:
        """A string, in lower case, one of `choices` if there are any; without a default it must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or (choices and value.lower() not in choices):
            raise self.wrong(key, "one of " + ", ".join(choices) if choices else "a string")
        return value.lower()

    def names(self, *keys: str) -> list[str]:
        """A list of module names or patterns under the first key that holds one; [] where none does."""
        key = self.first(*keys)
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return list(value)

    def pair(self, key: str) -> tuple[int, int]:
        """Rows and columns of a block, both at least 1."""
        value = self.values.get(key)
        if isinstance(value, list | tuple) and len(value) == 2:
            rows, columns = value
            if all(type(size) is int and 1 <= size <= LARGEST for size in value):
                return int(rows), int(columns)
        raise self.wrong(key, "two whole numbers, at least 1: rows and columns of a block")

    def group_size(self, *keys: str) -> int:
        """Columns that share a scale: at least 1, or 0 where the config says -1 (all of them)."""
        key = self.first(*keys)
        size = self.integer(key, -1)
        if size == 0:
            raise self.wrong(key, "-1 (all columns) or at least 1")
        return max(size, 0)

    def table(self, key: str) -> ConfigReader:
        """The object under a key, which must be there."""
        return ConfigReader(self.values.get(key), self.where(key))

    def tables(self, key: str) -> Iterator[tuple[str, ConfigReader]]:
        """The objects of an object under a key, in order; none where the key is absent."""
        if self.has(key):
            outer = self.table(key)
            for name in outer.values:
                yield name, outer.table(name)

    def overridden(self, by: ConfigReader) -> ConfigReader:
        """These words with another object's written over them; errors name the object a key comes from."""
        origins = {key: self._origins.get(key, self.path) for key in self.values if key not in by.values}
        return ConfigReader({**self.values, **by.values}, by.path, origins)

    def replaced(self, **values: Any) -> ConfigReader:
        """These words with some values of our own."""
        return ConfigReader({**self.values, **values}, self.path, self._origins)


def regex(pattern: str, where: str) -> re.Pattern[str]:
    """A config's regular expression, compiled. Raises InputError for one that cannot be."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(
            "A pattern of the quantization config is no regular expression.",
            where=where,
            expected="Python's syntax of regular expressions",
            found=f"{pattern!r}: {error}",
        ) from error


class Searches:
    """Regular expressions that are matched from the start of names, of which a config may have hundreds.

    patterns: each with a text that all its matches begin with, where a dot stands for any character.
    """

    def __init__(self, patterns: Iterable[tuple[str, re.Pattern[str]]]) -> None:
        self._patterns = list(patterns)
        self._near = cache(self._that_may_match)

    def match(self, name: str) -> bool:
        """Whether one matches. Names that differ in their last two words only are looked up together."""
        return any(search.match(name) for search in self._near(name.rsplit(".", 2)[0]))

    def _that_may_match(self, stem: str) -> list[re.Pattern[str]]:
        """Those that may match a name that begins with the stem."""
        return [
            search
            for start, search in self._patterns
            if all(one in (".", other) for one, other in zip(start, stem, strict=False))
        ]


def start_of(pattern: str) -> str:
    """What all matches of a regular expression begin with, a dot for any character; maybe less than all of that."""
    found = re.match(r"\^?((?:[\w.-]|\\\.)*)([*+?{]?)", "" if "|" in pattern else pattern)
    assert found is not None
    start = found[1][: -2 if found[1].endswith("\\.") else -1] if found[2] else found[1]
    return start.replace("\\.", ".")


def when(matches: Matcher, gives: SourceFormat = PLAIN) -> Rule:
    """The rule that gives a format to the modules that match."""
    return lambda module: gives if matches(module) else None


def always(gives: SourceFormat) -> Rule:
    """The rule that gives a format to every module."""
    return lambda _module: gives


def parents(module: str) -> Iterator[str]:
    """The module's own name, then the names of those it lies in, innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def named_in(patterns: Iterable[str], where: str) -> Matcher:
    """Names that equal an entry, or match one that begins with "re:" from their start; parents count too."""
    patterns = list(patterns)
    exact = {pattern for pattern in patterns if not pattern.startswith("re:")}
    expressions = [pattern[3:] for pattern in patterns if pattern.startswith("re:")]
    searches = Searches((start_of(pattern), regex(pattern, where)) for pattern in expressions)
    is_named = cache(lambda name: name in exact or searches.match(name))
    return lambda module: any(is_named(name) for name in parents(module))


def globbed_in(patterns: Iterable[str], where: str, with_parents: bool) -> Matcher:
    """Names that match a shell pattern as a whole, or an entry that begins with "re:" from their start."""
    patterns = list(patterns)
    exact = {pattern for pattern in patterns if not set("*?[:") & set(pattern)}
    globs = [p for p in patterns if p not in exact and not p.startswith("re:")]
    expressions = [p[3:] for p in patterns if p not in exact and p.startswith("re:")]
    searches = Searches(
        [
            *((re.split(r"[*?[]", glob)[0], regex(fnmatch.translate(glob), where)) for glob in globs),
            *((start_of(expression), regex(expression, where)) for expression in expressions),
        ]
    )
    is_named = cache(lambda name: name in exact or searches.match(name))
    return lambda module: any(is_named(name) for name in (parents(module) if with_parents else [module]))


def beginning_with(search: re.Pattern[str]) -> Matcher:
    """Names that match the regular expression from their start."""
    return lambda module: search.match(module) is not None


def holding(search: re.Pattern[str]) -> Matcher:
    """Names that the regular expression matches anywhere."""
    return lambda module: search.search(module) is not None


def containing(parts: Iterable[str]) -> Matcher:
    """Names that contain one of the strings."""
    parts = list(parts)
    return lambda module: any(part in module for part in parts)


def on_path(entries: Iterable[str]) -> Matcher:
    """Names that have an entry among their components: "gate" is on mlp.gate.x, not on mlp.gate_proj."""
    entries = [f".{entry.strip('.')}." for entry in entries if entry.strip(".")]
    return lambda module: any(entry in f".{module}." for entry in entries)


def skipped_by_transformers(patterns: Iterable[str], where: str) -> Matcher:
    """Names that transformers leaves unconverted: a pattern covers a whole path from the start, or ends it.

    Source: `should_convert_module` of transformers.quantizers.quantizers_utils.
    """
    patterns = list(patterns)
    after = r"(?:(?<=\.)|(?=\.|$))"
    searches = Searches((start_of(one), regex(rf"(?:{one}){after}", where)) for one in patterns)
    endings = set(patterns)
    sizes = sorted({len(pattern) for pattern in endings})

    def matches(module: str) -> bool:
        return any(module[-size:] in endings for size in sizes if size) or searches.match(module)

    return (lambda _module: True) if "" in endings else matches


def skipped_names(words: ConfigReader, *keys: str) -> Rule:
    """The rule for modules that a method's words name as left out, as transformers reads them."""
    names = [name for key in keys for name in words.names(key)]
    return when(skipped_by_transformers(names, words.where(words.first(*keys))))
