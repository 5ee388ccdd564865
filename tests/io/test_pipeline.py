"""The bounded pipeline: order, look-ahead, and no thread left after an error, a close or an interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hqconv.io.pipeline import pipeline


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """An interrupt may come after a pool's thread began and before the pool knows it: then it ends by itself."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("ahead", "num_threads"), [(0, 1), (3, 1), (3, 4), (100, 2)])
def test_results_come_in_order_with_bounded_look_ahead(ahead: int, num_threads: int) -> None:
    begun, used = [], []

    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    def items() -> Iterator[int]:
        for item in range(20):
            begun.append(item)
            yield item

    for result in pipeline(items(), work, ahead, num_threads):
        used.append(result)
        assert len(begun) <= len(used) + ahead
    assert used == [item * item for item in range(20)]


def test_nothing_is_begun_before_the_first_result_is_wanted() -> None:
    pipeline(iter([1]), lambda _: pytest.fail("begun"), 1, 1)


def test_an_error_comes_after_the_results_before_it_and_nothing_is_begun_after_it() -> None:
    begun = []

    def work(item: int) -> int:
        begun.append(item)
        return 6 // (3 - item)

    results = pipeline(range(100), work, 1, 1)
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(begun) <= 6


def test_an_error_of_the_items_ends_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("none")

    with pytest.raises(KeyError, match="none"):
        list(pipeline(items(), lambda item: item, 0, 2))


def test_close_waits_for_the_work_in_progress() -> None:
    ended = []

    def work(item: int) -> int:
        time.sleep(0.05)
        ended.append(item)
        return item

    with closing(pipeline(range(100), work, 4, 2)) as results:
        assert next(results) == 0
    assert 1 <= len(ended) <= 7


def test_an_interrupt_ends_it() -> None:
    def work(item: int) -> int:
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return item

    results = pipeline(range(100), work, 2, 2)
    with pytest.raises(KeyboardInterrupt), closing(results):  # in whichever thread's turn it comes
        deque(results, 0)


def threads_of_torch() -> list[int]:
    """torch's number of threads, in this thread and in a new one."""
    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found


def test_torch_has_its_threads_again_afterwards() -> None:
    """Though one of two ends first, and another by an error."""

    def work(item: int) -> tuple[str, int]:
        if item == 2:
            raise ValueError("two")
        return threading.current_thread().name[:2], torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first, second = (
            pipeline(range(4), work, 1, 2, runs_torch=True, name="x") for _ in range(2)
        )
        assert [next(first), next(second)] == [("x_", 1)] * 2
        first.close()
        assert threads_of_torch() == [1, 1]
        assert next(second) == ("x_", 1)
        with pytest.raises(ValueError, match="two"):
            next(second)
        assert threads_of_torch() == [3, 3]
    finally:
        torch.set_num_threads(before)
