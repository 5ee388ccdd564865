"""Regular expressions of untrusted configs, with a bound on the time that matching can take.

Python's `re` backtracks and knows no limit: `(a+)+b` can take 2**L steps on L letters. The `regex` package matches the
same syntax and stops at a time limit.
"""

from __future__ import annotations

import re
import time
import warnings

from hqconv.errors import InputError

_MAX_PATTERN = 10_000  # characters
_SECONDS = 5.0  # of one pattern, over all names; patterns of published configs take microseconds a name
_FUZZY = re.compile(r"\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)


class BoundedRegex:
    """A regular expression of a config that is matched from the start of names, or anywhere, in bounded time.

    after: what must follow a match, a regular expression of ours. Raises InputError for a pattern that is no regular
    expression of Python's `re`.
    """

    def __init__(self, pattern: str, where: str, *, after: str = "", is_anywhere: bool = False) -> None:
        import regex

        self._where, self._shown, self._seconds_left = where, repr(pattern[:200]), _SECONDS
        try:
            if len(pattern) > _MAX_PATTERN:
                raise ValueError(f"more than {_MAX_PATTERN} characters")
            if "[[:" in pattern:
                raise ValueError("[[: means a class of POSIX or a set of characters")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of sets in sets
                re.compile(pattern)  # `regex` knows more syntax, which no server does
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

    def matches(self, name: str) -> bool:
        """Return True if the name matches. Raises InputError if the pattern's names take more than `_SECONDS`."""
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
