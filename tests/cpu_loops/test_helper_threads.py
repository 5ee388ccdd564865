"""Loops whose parts are run side by side: all of the range, the same bits, and errors that arrive."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from hqconv.cpu_loops.helper_threads import Helpers, in_parts
from hqconv.quantization import content_sums
from hqconv.quantization.content_sums import compiled_row_sums
from hqconv.schemas.sum_factors import factors
from tests.make.tensors import same_bits


def with_helpers(task: object, count: int = 4) -> None:
    """Run a task in a thread that has helpers."""
    errors = []
    pool = Helpers(count)

    def work() -> None:
        pool.use(count)
        try:
            task()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    pool.stop()
    if errors:
        raise errors[0]


def test_without_helpers_there_is_one_part() -> None:
    parts: list[slice] = []
    in_parts(parts.append, 10)
    assert parts == [slice(0, 10)]


@pytest.mark.parametrize(
    ("length", "least", "count"), [(100, 1, 8), (100, 30, 3), (5, 1, 5), (5, 6, 1)]
)
def test_parts_cover_the_range(length: int, least: int, count: int) -> None:
    parts: list[slice] = []
    with_helpers(lambda: in_parts(parts.append, length, least))
    assert len(parts) == count
    assert sorted(i for part in parts for i in range(length)[part]) == list(range(length))


def test_the_first_error_is_raised_when_all_are_done() -> None:
    done = []

    def task(part: slice) -> None:
        if part.start == 0:
            raise ValueError("of a part")
        done.append(part)

    with pytest.raises(ValueError, match="of a part"):
        with_helpers(lambda: in_parts(task, 80))
    assert len(done) == 7


@pytest.mark.parametrize("are_split", [False, True])
def test_helpers_take_parts_of_large_arrays_only(
    monkeypatch: pytest.MonkeyPatch, are_split: bool
) -> None:
    """A part that takes less than its way to a helper stays with its thread; parts change no bit."""
    scales = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 128, 12), np.uint8))
    sums = (scales.long() * torch.from_numpy(factors("column", 12).astype("int64"))).sum(2)
    if are_split:
        monkeypatch.setattr(content_sums, "_LEAST_WORDS", 1)
    num_parts: list[int] = []
    run = Helpers.run
    monkeypatch.setattr(
        Helpers,
        "run",
        lambda self, task, parts: (num_parts.append(len(parts)), run(self, task, parts)),
    )
    found: list[torch.Tensor] = []
    with_helpers(lambda: found.append(compiled_row_sums(scales)))
    assert same_bits(found[0], sums)
    assert num_parts == ([8] if are_split else [])
