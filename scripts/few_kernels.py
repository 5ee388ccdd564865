"""A vLLM plugin for comparisons: two tile sizes for each GEMM, one for few rows and one for many, not some twenty.

Compiling them all takes minutes of processor time for each schema and grid, and says nothing about weights. All engines
of a comparison get the same. `check_serving.py --few-kernels` puts it into use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FEW, MANY = 16, 512  # rows whose tile sizes are kept


def register() -> None:
    """Have vLLM's questions for tuning answered with two of Humming's settings, which add up in one order always.

    Other settings (stream-K) let several blocks of threads add to an element in the order in which they come: two
    answers of one engine differ in the last bits, where many rows go to one expert.
    """
    facade: Any = importlib.import_module("vllm.utils.humming")
    work_out = facade.get_heuristics_config

    def answer(**words: Any) -> list[Any]:
        return shortened(work_out(**{**words, "use_batch_invariant": True}))

    facade.get_heuristics_config = answer


def shortened(table: list[Any]) -> list[Any]:
    """The table [[least rows, most rows, settings], …] with the settings for FEW and for MANY rows only."""
    few, many = (_entry(table, rows) for rows in (FEW, MANY))
    if few == many:
        return [[table[0][0], table[-1][1], table[few][2]]]
    return [[table[0][0], table[few][1], table[few][2]], [table[few + 1][0], table[-1][1], table[many][2]]]


def keep(rows: Sequence[int]) -> None:
    """Have this process's questions for tuning answered with Humming's own choices for these numbers of rows only."""
    facade: Any = importlib.import_module("vllm.utils.humming")
    work_out = facade.get_heuristics_config

    def answer(**words: Any) -> Any:
        found = work_out(**words)
        return kept(found, rows) if isinstance(found, list) else found

    facade.get_heuristics_config = answer


def kept(table: list[Any], rows: Sequence[int]) -> list[Any]:
    """The table with the settings of these numbers of rows; rows between them get those of the next larger one."""
    numbers = sorted({_entry(table, count) for count in rows})
    begins = [0, *(number + 1 for number in numbers[:-1])]
    ends = [*numbers[:-1], len(table) - 1]
    return [
        [table[begin][0], table[end][1], table[number][2]]
        for begin, end, number in zip(begins, ends, numbers, strict=True)
    ]


def _entry(table: list[Any], rows: int) -> int:
    return next((n for n, (_, most, _) in enumerate(table) if rows <= most), len(table) - 1)


def use(work: Path) -> None:
    """Have all engines that this process starts take the plugin, and a kernel cache of its own."""
    from scripts.engines import take_plugin

    take_plugin(work, "few_kernels")
    os.environ["HUMMING_CACHE_DIR"] = str(work / "few-cache")  # whose tuning tables are short
