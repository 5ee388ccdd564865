"""Regular expressions of untrusted configs, matched in bounded time.

Python's `re` backtracks and knows no limit: `(a+)+b` can take 2**L steps on L letters. Here the positions in a name
that a part of a pattern can end at are found all at once, as the bits of an integer, so that none is tried twice. `re`
itself matches simple patterns, because it is faster.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable
from functools import lru_cache, reduce
from operator import or_
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from hqconv.errors import InputError, RequestError

_MAX_PATTERN = 10_000  # characters
_MAX_STEPS = 20_000_000  # of one pattern over all names: less than ten seconds
_USUAL_NAME = 100  # characters
_FEW_STEPS = 50_000  # that `re` may take on a name of this length
_CHARACTERS = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)

Ends = Callable[
    [int, str], int
]  # bits of the positions where a part may begin, the name → bits of its ends


class LinearRegex:
    """A regular expression that is matched from the start of names, or anywhere.

    after: what must follow a match, a regular expression of ours. is_glob: the pattern is `fnmatch.translate`'s, for
    which `re` takes linear time. Raises InputError for a pattern that is no regular expression of Python's `re`, and
    RequestError for one with parts that cannot be matched in linear time.
    """

    def __init__(
        self,
        pattern: str,
        where: str,
        *,
        after: str = "",
        is_anywhere: bool = False,
        is_glob: bool = False,
    ) -> None:
        self._where, self._shown, self._steps_left = where, repr(pattern[:200]), _MAX_STEPS
        try:
            if len(pattern) > _MAX_PATTERN:
                raise ValueError(f"more than {_MAX_PATTERN} characters")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of sets in sets
                re.compile(pattern)  # by itself: `a)|(?:b` is none, whatever stands around it
                text = f"(?:{pattern}){after}" if after else pattern
                compiled, parsed = re.compile(text), _parser.parse(text)
            num_steps = 0.0 if is_glob else _num_steps(parsed) * (_USUAL_NAME if is_anywhere else 1)
            self._max_length = (
                math.inf if is_glob else _USUAL_NAME * 2 if num_steps <= _FEW_STEPS else -1
            )
            self._ends = self._sequence(parsed) if self._max_length < 0 else None
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            raise InputError(
                "A pattern of the quantization config is no regular expression.",
                where=where,
                expected="Python's syntax of regular expressions",
                found=f"{self._shown}: {error}",
            ) from error
        self._parsed, self._is_anywhere = parsed, is_anywhere
        self._quick = compiled.search if is_anywhere else compiled.match

    def matches(self, name: str) -> bool:
        """Return True if the name matches. Raises RequestError if repetitions take too many steps."""
        if len(name) <= self._max_length:
            return self._quick(name) is not None
        if self._ends is None:
            self._ends = self._sequence(self._parsed)
        starts = (1 << len(name) + 1) - 1 if self._is_anywhere else 1
        return self._ends(starts, name) != 0

    def _sequence(self, nodes: Any) -> Ends:
        """Return the function of parts that follow one another; those of fixed length are one."""
        parts: list[Ends] = []
        for is_fixed, run in itertools.groupby(nodes, _is_fixed):
            if is_fixed:
                parts.append(self._fixed(list(run), nodes.state))
            else:
                parts += [self._variable(*node) for node in run]

        def ends(starts: int, name: str) -> int:
            for part in parts:
                starts = part(starts, name) if starts else 0
            return starts

        return ends

    def _fixed(self, nodes: list[Any], state: Any) -> Ends:
        """Return the function of characters, and of what is looked at before and after them."""
        width, places = (
            sum(operation in _CHARACTERS for operation, _ in nodes),
            _places(nodes, state),
        )
        looks = any(operation in _LOOKS for operation, _ in nodes)

        def ends(starts: int, name: str) -> int:
            self._count(1 + len(name) // 500 + (len(name) ** 2 // 100 if looks else 0), name)
            return (starts & places(name)) << width

        return ends

    def _variable(self, operation: Any, argument: Any) -> Ends:
        """Return the function of one part whose length is not fixed."""
        if operation is _constants.SUBPATTERN and not any(argument[1:3]):  # no flags of its own
            return self._sequence(argument[3])
        if operation is _constants.BRANCH:
            branches = [self._sequence(one) for one in argument[1]]
            return lambda starts, name: reduce(or_, (branch(starts, name) for branch in branches))
        if operation in _REPEATS:
            return self._repeated(*argument)
        raise self._refusal(
            "no backreferences, atomic groups, flags within a pattern, or repetitions looked ahead at"
        )

    def _repeated(self, least: int, most: int, nodes: Any) -> Ends:
        once = self._sequence(nodes)
        is_run = most == _constants.MAXREPEAT and len(nodes) == 1 and nodes[0][0] in _CHARACTERS
        places = _places(list(nodes), nodes.state) if is_run else None

        def ends(starts: int, name: str) -> int:
            for _ in range(least):
                before, starts = starts, once(starts, name)
                if starts in (0, before):
                    break
            if places is not None:  # a carry runs through all characters that fit, from each start
                fits = places(name)
                return ((starts & fits) + fits ^ fits) | starts
            found = new = starts
            for _ in range(min(most - least, len(name) + 1)):
                new = once(new, name) & ~found
                if not new:
                    break
                found |= new
            return found

        return ends

    def _count(self, num_steps: int, name: str) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise self._refusal(
                f"at most {_MAX_STEPS} steps for the names of all modules", f", at {name[:100]!r}"
            )

    def _refusal(self, expected: str, at: str = "") -> RequestError:
        return RequestError(
            "A pattern of the quantization config takes too long to match.",
            where=self._where,
            expected=expected,
            found=f"{self._shown}{at}",
            remedy="Write the pattern without repetitions of repetitions, or list the modules by name.",
        )


def _places(nodes: list[Any], state: Any) -> Callable[[str], int]:
    """Return the function from a name to the bits of all positions where parts of fixed length match."""
    search = _compiler.compile(_parser.SubPattern(state, nodes)).search
    is_dot = nodes == [(_constants.ANY, None)]

    @lru_cache(maxsize=1)
    def places(name: str) -> int:
        if is_dot and "\n" not in name:
            return (1 << len(name)) - 1
        found, match = 0, search(name)
        while match is not None:
            found |= 1 << match.start()
            match = search(name, match.start() + 1) if match.start() < len(name) else None
        return found

    return places


def _is_fixed(node: tuple[Any, Any]) -> bool:
    """Return True for a part of fixed length that `re` matches without many steps."""
    operation, argument = node
    if operation in _LOOKS:
        return _num_steps(argument[1]) <= _USUAL_NAME
    return operation in _CHARACTERS or operation is _constants.AT


def _num_steps(nodes: Any, following: Any = None) -> float:
    """Return about how many ways `re` may try on a name of usual length. following: the part after the nodes."""
    steps, parts = 1.0, [*nodes, following]
    for (operation, argument), after in itertools.pairwise(parts) if len(nodes) else ():
        steps *= _num_steps_of(operation, argument, after, nodes.state)
    return steps


def _num_steps_of(operation: Any, argument: Any, following: Any, state: Any) -> float:
    if operation is _constants.BRANCH:
        return sum(_num_steps(one, following) for one in argument[1])
    if operation is _constants.SUBPATTERN:
        return _num_steps(argument[3], following)
    if operation in _LOOKS:
        return _num_steps(argument[1])
    if operation in _REPEATS:
        least, most, nodes = argument
        inside = _num_steps(nodes)
        if most > 1 and inside > 1:
            return math.inf
        if (
            len(nodes) == 1
            and nodes[0][0] in _CHARACTERS
            and following
            and following[0] is _constants.LITERAL
        ):
            one = _compiler.compile(_parser.SubPattern(state, list(nodes)))
            if (
                one.match(chr(following[1])) is None
            ):  # such as [a-z]+\. where only the longest run can go on
                return 1
        return inside if least == most else inside * min(most - least + 1, _USUAL_NAME)
    return 1 if operation in _CHARACTERS or operation is _constants.AT else math.inf
