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
from hqconv.verification.result import CheckResult

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


def each_expert(
    jobs: Iterable[Job], pool: ThreadPoolExecutor, num_workers: int, meter: Meter | None
) -> Iterator[Judged]:
    """Check experts one by one; yield each job with the outcomes of its experts."""
    tasks = ((job, expert) for job in jobs for expert in range(job.layer.num_experts))
    done = _told(
        ahead(pool, lambda task: task[0].run(task[1]), tasks, 2 * num_workers), meter, lambda one: (one[0][0], 1)
    )
    for job, of_layer in itertools.groupby(done, key=lambda found: found[0][0]):
        yield job, [outcome for _, outcome in of_layer]


def in_batches(
    jobs: Iterable[Job], staging: BatchStaging, pool: ThreadPoolExecutor, result: CheckResult, meter: Meter | None
) -> Iterator[Judged]:
    """Check batches on a device, and repeat on the CPU, one by one, the experts that need it."""
    shared, num_again, num_all = SharedState(), 0, 0
    batched = (BatchedJob(job, staging, shared) for job in jobs)
    tasks = ((one, experts) for one in batched for experts in one.batches())
    with worker_pool(staging.num_readers) as readers:
        found_ahead = ahead(readers, lambda task: task[0].run(task[1]), tasks, 2 * staging.num_readers)
        done = _told(found_ahead, meter, lambda one: (one[0][0].job, len(one[0][1])))
        for one, of_layer in itertools.groupby(done, key=lambda found: found[0][0]):
            first = [outcome for _, outcomes in of_layer for outcome in outcomes]
            again = pool.map(one.job.run, [expert for expert, found in enumerate(first) if found is None])
            outcomes = [found if found is not None else next(again) for found in first]
            num_again, num_all = num_again + first.count(None), num_all + len(first)
            yield one.job, outcomes
    repeated = f"; {num_again} of {num_all} experts again on the CPU" if num_again else ""
    repeated += f", some after {shared.errors[0]}" if shared.errors else ""
    result.notes.append(f"on {staging.device}{repeated}")


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
