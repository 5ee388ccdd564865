"""Loops whose parts are run side by side: all of the range, the same bits, and errors that arrive."""

from __future__ import annotations

import threading

import pytest

from hqconv.jit import Helpers, in_parts


def with_helpers(task: object) -> None:
    """Run a task in a thread that has helpers."""
    errors = []
    pool = Helpers(4)

    def work() -> None:
        pool.use(4)
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
