"""Distribution of the experts of the `weights` check over threads, one by one or in batches on a device."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from hqconv.artifact.reader import Artifact
from hqconv.conversion.progress import Meter
from hqconv.verification.check_batch import BatchedJob, BatchStaging, SharedState
from hqconv.verification.check_expert import Job, Outcome

Done = TypeVar("Done")
Judged = tuple[Job, list[Outcome]]


def worker_pool(num_workers: int) -> ThreadPoolExecutor:
    """Threads with one processor each."""
    return ThreadPoolExecutor(num_workers, "hqconv-verify", initializer=partial(torch.set_num_threads, 1))


def layer_bytes(artifact: Artifact, layer: str) -> int:
    """Approximate bytes of a layer's codes: number of weights times the schema's bits."""
    entry = artifact.layers[layer]
    weights = entry.num_experts * entry.hidden_size * entry.intermediate_size * (2 + entry.gated)
    return int(weights) * artifact.schema_of(layer).num_bits // 8


def _told(done: Iterable[Done], meter: Meter | None, count: Callable[[Done], tuple[Job, int]]) -> Iterator[Done]:
    """Yield finished items, and report them to the meter as so many experts of a job, and the job after its last."""
    num_done: Counter[str] = Counter()
    for one in done:
        job, num_experts = count(one)
        name, num_all = job.layer.name, job.layer.num_experts
        if meter is not None:
            meter.advance(name, layer_bytes(job.artifact, name) * num_experts // num_all)
            num_done[name] += num_experts
            if num_done[name] == num_all:
                meter.finish(name)
        yield one


class OneByOne:
    """Checks of single experts in the threads of a pool."""

    def __init__(self, pool: ThreadPoolExecutor, num_workers: int, meter: Meter | None) -> None:
        self._pool, self._num_workers, self._meter = pool, num_workers, meter

    def judge(self, jobs: Iterable[Job]) -> Iterator[Judged]:
        """Check the experts of jobs; yield each job with the outcomes of its experts."""
        tasks = ((job, expert) for job in jobs for expert in range(job.layer.num_experts))
        found_ahead = ahead(self._pool, lambda task: task[0].run(task[1]), tasks, 2 * self._num_workers)
        done = _told(found_ahead, self._meter, lambda one: (one[0][0], 1))
        for job, of_layer in itertools.groupby(done, key=lambda found: found[0][0]):
            yield job, [outcome for _, outcome in of_layer]

    def note(self) -> str:
        """Describe the device of the checks."""
        return "on the CPU"


class InBatches:
    """Checks of batches on a device; the experts that need it are checked again on the CPU, one by one."""

    def __init__(self, staging: BatchStaging, pool: ThreadPoolExecutor, meter: Meter | None) -> None:
        self._staging, self._pool, self._meter = staging, pool, meter
        self._shared = SharedState()
        self._num_again = self._num_all = 0

    def judge(self, jobs: Iterable[Job]) -> Iterator[Judged]:
        """Check the experts of jobs; yield each job with the outcomes of its experts."""
        batched = (BatchedJob(job, self._staging, self._shared) for job in jobs)
        tasks = ((one, experts) for one in batched for experts in one.batches())
        with worker_pool(self._staging.num_readers) as readers:
            found_ahead = ahead(readers, lambda task: task[0].run(task[1]), tasks, 2 * self._staging.num_readers)
            done = _told(found_ahead, self._meter, lambda one: (one[0][0].job, len(one[0][1])))
            for one, of_layer in itertools.groupby(done, key=lambda found: found[0][0]):
                first = [outcome for _, outcomes in of_layer for outcome in outcomes]
                again = self._pool.map(one.job.run, [expert for expert, found in enumerate(first) if found is None])
                outcomes = [found if found is not None else next(again) for found in first]
                self._num_again += first.count(None)
                self._num_all += len(first)
                yield one.job, outcomes

    def note(self) -> str:
        """Describe the device of the checks, and the experts that were checked again."""
        repeated = f"; {self._num_again} of {self._num_all} experts again on the CPU" if self._num_again else ""
        repeated += f", some after {self._shared.errors[0]}" if self._shared.errors else ""
        return f"on {self._staging.device}{repeated}"


Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], num_ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of `work`, `num_ahead` items prefetched at most. Raises the errors of `work`."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > num_ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
