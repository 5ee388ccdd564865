"""Parts of a conversion: processes that share an output folder, in any order and without a connection (`--part I/N`).

A part's output units follow from the plan alone. It records them in a journal of its own; `OutputFolder.join` and
`OutputFolder.leave` say what the folder's lock guards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hqconv.errors import RequestError

if TYPE_CHECKING:
    from hqconv.planning.output_units import OutputUnit

_MAX_COUNT = 9999


@dataclass(frozen=True)
class Part:
    """One of `count` parts of a conversion; `number` is 1 … count."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse `I/N`, such as 1/4. Raises RequestError for anything else."""
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text.strip(), re.ASCII)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= count:
            expected = f"I/N with I from 1 to N, at most {_MAX_COUNT}, such as 1/4"
            raise RequestError("There is no such part.", where="--part", expected=expected, found=text)
        return cls(number, count)

    def may_work_beside(self, other: str) -> bool:
        """Return whether another part, such as 2/4, has no unit of this one."""
        number, _, count = other.partition("/")
        return count == str(self.count) and number != str(self.number)

    def share(self, units: Sequence[OutputUnit]) -> list[OutputUnit]:
        """Return this part's units: neighbours, so that few shards of a source are read by two parts.

        Parts have equal shares of the bytes of MoE layers, and of the bytes of copied tensors, to half a unit.
        """
        from hqconv.planning.output_units import MoeLayerPlan  # the command line asks for the rank alone

        layers = [unit for unit in units if isinstance(unit, MoeLayerPlan)]
        copied = [unit for unit in units if not isinstance(unit, MoeLayerPlan)]
        return [*self._share(layers), *self._share(copied)]

    def _share(self, units: Sequence[OutputUnit]) -> Iterator[OutputUnit]:
        total = sum(unit.num_bytes_read for unit in units)
        end = 0
        for unit in units:
            begin, end = end, end + unit.num_bytes_read
            number = 1 + (begin + end) * self.count // max(1, 2 * total)  # by the middle of the unit
            if min(number, self.count) == self.number:
                yield unit


def torchrun_part() -> str | None:
    """Return the part of a process that torchrun started beside others; schedulers set RANK and others anywhere."""
    if not os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return f"{torchrun_rank() + 1}/{os.environ['WORLD_SIZE']}"


def torchrun_rank() -> int:
    """Return the rank of a process that torchrun started; 0 of any other."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("TORCHELASTIC_RUN_ID") else 0


def local_rank() -> tuple[int, int]:
    """Return this process's rank on its machine, and the number of torchrun's processes there: 0 and 1 without it."""
    if torchrun_part() is None:
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
