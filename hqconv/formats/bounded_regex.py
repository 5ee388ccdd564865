"""Regular expressions of untrusted configs, with a bound on the time that a match can take.

Python's `re` backtracks: `(a+)+b` takes 2**L steps on L letters. Here a pattern's parse tree is analysed before its
first use. A pattern whose steps grow exponentially is refused. For a pattern whose steps grow as a power of the name's
length (every `.*` is a factor) the length of names is bounded.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any, NamedTuple

from hqconv.errors import InputError

_parser: Any = importlib.import_module("re._parser")  # the only parser of re's syntax; it has no public name
_MAX_PATTERN = 10_000  # characters
_MAX_STEPS = 50_000_000  # of one match: about a second
_MIN_NAME = 64  # characters that a name may always have
_MANY = 16  # repetitions that count as unbounded
_OTHER = 128  # stands for all characters beyond ASCII
_ALL = frozenset(range(_OTHER + 1))
_END = frozenset([-1])  # what `$` needs next
_CLASSES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
_Chars = frozenset[int]
_Tree = Sequence[tuple[Any, Any]]  # of operators and their arguments


class _SlowPatternError(Exception):
    """Pattern that takes too many steps, with the reason."""


class _Cost(NamedTuple):
    """Cost of a match on L characters: factor * L**steps steps, and factor * L**ways ways to go on after it."""

    steps: int = 0
    ways: int = 0
    factor: int = 1


class BoundedRegex:
    """A regular expression of a config that is matched from the start of names, or anywhere, in bounded time.

    after: what must follow a match, a regular expression of ours. is_trusted: the pattern is ours too.
    Raises InputError for a pattern that is no regular expression or takes too long.
    """

    def __init__(
        self, pattern: str, where: str, *, after: str = "", is_anywhere: bool = False, is_trusted: bool = False
    ) -> None:
        self._where, self._shown = where, repr(pattern[:200])
        cost = _Cost()
        try:
            if len(pattern) > _MAX_PATTERN:
                raise _SlowPatternError(f"more than {_MAX_PATTERN} characters")
            regex = re.compile(f"(?:{pattern}){after}" if after else pattern)
            if set("*+?{|") & set(pattern) and not is_trusted:
                cost = _cost_of_all(_parser.parse(regex.pattern), frozenset())
            self._max_name = _longest_name(cost.steps + is_anywhere, cost.factor)
            if self._max_name < _MIN_NAME:
                raise _SlowPatternError("too many repetitions or alternatives of the same characters")
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(
                "A pattern of the quantization config is no regular expression.",
                where=where,
                expected="Python's syntax of regular expressions",
                found=f"{self._shown}: {error}",
            ) from error
        except _SlowPatternError as error:
            raise InputError(
                "A pattern of the quantization config can take too long to match.",
                where=where,
                expected="a regular expression without repetitions of repetitions, or many of the same characters",
                found=f"{self._shown}: {error}",
                remedy="Write the pattern more simply, or list the modules by name.",
            ) from error
        self._match = regex.search if is_anywhere else regex.match

    def matches(self, name: str) -> bool:
        """Return True if the name matches. Raises InputError for a name so long that the match could take too long."""
        if len(name) > self._max_name:
            raise InputError(
                "A module's name is too long for a pattern of the quantization config.",
                where=self._where,
                expected=f"names of at most {self._max_name} characters for {self._shown}",
                found=f"{len(name)} characters: {name[:100]!r} …",
            )
        return self._match(name) is not None


def _longest_name(steps: int, factor: int) -> int:
    """Return the number of characters that are matched in `_MAX_STEPS`."""
    low, high = 0, 1 << 16
    while low < high:
        length = (low + high + 1) // 2
        is_fast = comb(length + steps, steps) * factor <= _MAX_STEPS
        low, high = (length, high) if is_fast else (low, length - 1)
    return low


# --- steps of a parse tree. follow: the characters that may come next; empty at the end of the pattern, where a match
# has succeeded and is not tried in another way ---


def _cost_of_all(items: _Tree, follow: _Chars) -> _Cost:
    """Return the cost of items in sequence."""
    follows = [follow]
    for item in reversed(items):
        chars, is_nullable = _first(*item)
        follows.append(chars | follows[-1] if is_nullable else chars)
    steps, ways, factor = _Cost()
    for item, after in zip(items, reversed(follows[:-1]), strict=True):
        cost = _cost_of(*item, after)
        steps, ways, factor = max(steps, ways + cost.steps), ways + cost.ways, factor * cost.factor
    return _Cost(steps, ways, factor)


def _cost_of(operator: Any, argument: Any, follow: _Chars) -> _Cost:
    kind = str(operator)
    if kind in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _cost_of_all(argument[-1] if kind == "SUBPATTERN" else argument, follow)
    if kind in ("ASSERT", "ASSERT_NOT"):  # left in one way, or not at all
        return _cost_of_all(argument[1], frozenset())._replace(ways=0)
    if kind == "BRANCH":
        costs = [_cost_of_all(branch, follow) for branch in argument[1]]
        steps, ways, factor = (max(values) for values in zip(*costs, strict=True))
        return _Cost(steps, ways, factor * _num_alike(argument[1], follow))
    if kind.endswith("REPEAT"):
        least, most, body = argument
        return _cost_of_repeat(least, most, body, follow)
    return _Cost()


def _cost_of_repeat(least: int, most: int, body: _Tree, follow: _Chars) -> _Cost:
    first, is_nullable = _first_of_all(body)
    last = _cost_of_all(body, follow)
    steps = last.steps
    if most > 1:
        inner = _cost_of_all(body, first)  # of one repetition before the next
        if is_nullable or inner.ways or inner.factor > 1:
            raise _SlowPatternError("a repetition whose parts match the same text in several ways")
        steps = max(steps, inner.steps)
    is_choice = least != most and (is_nullable or bool(first & follow))
    if most >= _MANY:
        return _Cost(steps + 1, last.ways + is_choice, last.factor)
    return _Cost(steps, last.ways, last.factor * (most - least + 1 if is_choice else 1))


def _num_alike(branches: Sequence[_Tree], follow: _Chars) -> int:
    """Return the maximum number of alternatives that can match at the same place."""
    if all(str(operator) == "LITERAL" for branch in branches for operator, _ in branch):
        texts = Counter(tuple(char for _, char in branch) for branch in branches)
        return max(sum(texts[text[:size]] for size in range(len(text) + 1)) for text in texts)
    counts: Counter[int] = Counter()
    for branch in branches:
        chars, is_nullable = _first_of_all(branch)
        counts.update(chars | follow if is_nullable else chars)
    return max(counts.values(), default=len(branches))


def _first_of_all(items: _Tree) -> tuple[_Chars, bool]:
    """Return the characters that a match of items in sequence may begin with, and True if the match may be empty."""
    chars: _Chars = frozenset()
    for item in items:
        more, is_nullable = _first(*item)
        chars |= more
        if not is_nullable:
            return chars, False
    return chars, True


def _first(operator: Any, argument: Any) -> tuple[_Chars, bool]:
    """Return `_first_of_all` of one item. Raises _SlowPatternError for items that are not analysed here."""
    kind = str(operator)
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _characters(kind, argument), False
    if kind in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _first_of_all(argument[-1] if kind == "SUBPATTERN" else argument)
    if kind == "BRANCH":
        firsts = [_first_of_all(branch) for branch in argument[1]]
        return frozenset().union(*(chars for chars, _ in firsts)), any(empty for _, empty in firsts)
    if kind.endswith("REPEAT"):
        chars, is_nullable = _first_of_all(argument[2])
        return chars, is_nullable or argument[0] == 0
    if kind == "AT" and str(argument) in ("AT_END", "AT_END_STRING"):
        return _END, False
    if kind in ("AT", "ASSERT", "ASSERT_NOT"):
        return frozenset(), True
    raise _SlowPatternError("a reference to an earlier group")


def _characters(kind: str, argument: Any) -> _Chars:
    """Return the characters that one item matches, letters in both cases; maybe more than the exact set."""
    if kind == "LITERAL":
        return frozenset(min(ord(char), _OTHER) for text in (chr(argument),) for char in text + text.swapcase())
    if kind in ("NOT_LITERAL", "ANY"):
        return _ALL
    chars: _Chars = frozenset()
    is_negated = False
    for operator, value in argument:
        if str(operator) == "NEGATE":
            is_negated = True
        elif str(operator) == "LITERAL":
            chars |= {min(value, _OTHER)} if is_negated else _characters("LITERAL", value)
        elif str(operator) == "RANGE":
            span = range(min(value[0], _OTHER), min(value[1], _OTHER) + 1)
            chars |= frozenset(span)
            if not is_negated:
                chars |= frozenset(ord(chr(char).swapcase()[0]) for char in span if char < _OTHER)
        else:
            chars |= _of_class(str(value).removeprefix("CATEGORY_"))
    return (_ALL - chars) | {_OTHER} if is_negated else chars


def _of_class(name: str) -> _Chars:
    """Return the characters of \\d, \\s, \\w or their opposites, whose characters beyond ASCII are in both."""
    found = {char for char in range(_OTHER) if re.match(_CLASSES[name.removeprefix("NOT_")], chr(char))}
    return frozenset(set(range(_OTHER)) - found if name.startswith("NOT_") else found) | {_OTHER}
