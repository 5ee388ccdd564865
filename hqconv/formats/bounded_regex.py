"""Regular expressions of untrusted configs, with a bound on the time that matching can take.

Python's `re` backtracks and knows no limit: `(a+)+b` can take 2**L steps on L letters. The `regex` package matches the
same syntax and stops at a time limit. It takes ten times as long as `re`, so `re` matches simple patterns.
"""

from __future__ import annotations

import math
import re
import time
import warnings

from hqconv.errors import InputError

_MAX_PATTERN = 10_000  # characters
_MAX_QUICK = 2000  # characters of a name
_SECONDS = 5.0  # of one pattern, over all names; patterns of published configs take microseconds a name
_REPEATS = re.compile(r"\\.|[*+?{]", re.DOTALL)  # an escaped character, or what repeats the item before it
_FUZZY = re.compile(r"\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)


class BoundedRegex:
    """A regular expression of a config that is matched from the start of names, or anywhere, in bounded time.

    after: what must follow a match, a regular expression of ours. is_glob: the pattern is `fnmatch.translate`'s, whose
    repetitions are atomic: it takes linear time. Raises InputError for a pattern that is no regular expression of
    Python's `re`.
    """

    def __init__(
        self, pattern: str, where: str, *, after: str = "", is_anywhere: bool = False, is_glob: bool = False
    ) -> None:
        import regex

        self._where, self._shown, self._seconds_left = where, repr(pattern[:200]), _SECONDS
        try:
            if len(pattern) > _MAX_PATTERN:
                raise ValueError(f"more than {_MAX_PATTERN} characters")
            if "[[:" in pattern:
                raise ValueError("[[: means a class of POSIX or a set of characters")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of sets in sets
                re.compile(pattern)  # by itself: `a)|(?:b` is none, whatever stands around it
                plain = re.compile(f"(?:{pattern}){after}" if after else pattern)  # `regex` knows more syntax
            text = _literal_braces(pattern)
            compiled = regex.compile(f"(?:{text}){after}" if after else text)
        except (ValueError, re.error, regex.error, RecursionError, OverflowError) as error:
            raise InputError(
                "A pattern of the quantization config is no regular expression.",
                where=where,
                expected="Python's syntax of regular expressions",
                found=f"{self._shown}: {error}",
            ) from error
        self._match = compiled.search if is_anywhere else compiled.match
        is_quick = is_glob or _is_quick(pattern, is_anywhere)
        self._quick = (plain.search if is_anywhere else plain.match) if is_quick else None
        self._max_quick = math.inf if is_glob else _MAX_QUICK

    def matches(self, name: str) -> bool:
        """Return True if the name matches. Raises InputError if the pattern's names take more than `_SECONDS`."""
        if self._quick is not None and len(name) <= self._max_quick:
            return self._quick(name) is not None
        begin = time.thread_time()
        try:
            found = self._match(name, timeout=max(self._seconds_left, 0.001)) is not None
        except TimeoutError as error:
            raise InputError(
                "A pattern of the quantization config takes too long to match.",
                where=self._where,
                expected=f"less than {_SECONDS:g} s for the names of all modules",
                found=f"{self._shown}, at the name {name[:100]!r}",
                remedy="Write the pattern without repetitions of repetitions, or list the modules by name.",
            ) from error
        self._seconds_left -= time.thread_time() - begin
        return found


def _literal_braces(pattern: str) -> str:
    """Escape braces that are no counts: `re` takes them literally, `regex` as a number of allowed errors."""
    return _FUZZY.sub(lambda match: match[0] if match[0][0] == "\\" else "\\{", pattern)


def _is_quick(pattern: str, is_anywhere: bool) -> bool:
    """Return True if `re` takes at most L**2 steps on L letters: two repetitions, one in a search, none of a group."""
    num_repeats = sum(not match.startswith("\\") for match in _REPEATS.findall(pattern))
    return num_repeats + is_anywhere <= 2 and not re.search(r"\)[*+?{]", pattern)
