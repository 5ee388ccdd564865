"""Fills a plan's groups in stages: read → encode → write → finish, for as many batches at once as there are slots.

A batch holds its slot from the moment it is read until it is written: that is the only back-pressure, and the bound on
memory (see `resources`). No stage waits for a block's end; groups are finished, flushed and hashed, beside the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hqconv.backends.quantize import Cost
from hqconv.pipeline.batches import Batch, Piece, Run, cut
from hqconv.pipeline.costs import block_errors
from hqconv.pipeline.devices import Lane, entered, host_buffer, make_lane
from hqconv.pipeline.journal import JournalEntry
from hqconv.pipeline.produce import produce
from hqconv.pipeline.profile import Profile
from hqconv.pipeline.progress import Meter
from hqconv.pipeline.resources import Resources, Staging
from hqconv.pipeline.stages import Stages
from hqconv.pipeline.writer import GroupWriter
from hqconv.planning.files import OutFile
from hqconv.planning.groups import Group, PlannedBlock
from hqconv.sources.raw import RawExperts
from hqconv.sources.source import Source

_MAX_OPEN_GROUPS = 4  # one that is made ahead, one in work, two that are being finished
_MAX_THREADS = 8  # of a stage that reads, writes or hashes


@dataclass(eq=False)
class _Job:
    """A group on its way. What several threads count (`num_left`, `files`, `costs`) is under the executor's lock."""

    group: Group
    writer: GroupWriter | None = None
    num_left: int = 0  # batches and pieces; one more until all are handed in
    files: dict[str, Any] = field(default_factory=dict)
    costs: dict[int, dict[str, Cost]] = field(default_factory=dict)
    is_done: bool = False


class Destination(Protocol):
    """Where groups are written and put down."""

    root: Path

    def record(self, entry: JournalEntry) -> None:
        """Note a finished group."""
        ...


class Executor:
    """The stages of one conversion."""

    def __init__(
        self,
        source: Source,
        folder: Destination,
        resources: Resources,
        staging: Staging,
        meter: Meter,
        profile: Profile,
    ) -> None:
        self._source, self._folder, self._device = source, folder, resources.device
        self._staging, self._meter, self._profile = staging, meter, profile
        num_threads = min(_MAX_THREADS, max(2, resources.num_threads))
        self._stages = Stages(
            {
                "open": 1,
                "read": num_threads,
                "encode": staging.num_lanes,
                "write": num_threads,
                "finish": num_threads,
                "publish": 1,
            },
            profile,
        )
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._free: list[torch.Tensor] = []
        self._num_slots = 0
        self._jobs: list[_Job] = []

    def run(self, groups: Iterable[Group]) -> None:
        """Fill and finish the groups. Raises the first error of any stage; nothing half done keeps its final name."""
        try:
            jobs = (_Job(group) for group in groups)
            job = next(jobs, None)
            while job is not None:
                if job not in self._jobs:
                    self._stages.wait(self._may_open)
                    self._open(job)
                ahead = next(jobs, None) if self._may_open() else None
                if ahead is not None:
                    self._open(ahead)
                self._feed(job)
                job = ahead or next(jobs, None)
            self._stages.wait(lambda: all(job.is_done for job in self._jobs))
        finally:
            self._stages.stop()
            for job in self._jobs:
                if job.writer is not None and not job.is_done:
                    job.writer.abandon()

    # --- the thread that owns the stages

    def _may_open(self) -> bool:
        return sum(not job.is_done for job in self._jobs) < _MAX_OPEN_GROUPS

    def _open(self, job: _Job) -> None:
        """Have a group's files made, ahead of their first bytes."""
        self._jobs.append(job)
        self._stages.start("open", 0, self._create, job)

    def _feed(self, job: _Job) -> None:
        job.num_left = 1
        for item in cut(job.group, self._staging.num_experts, self._staging.slot_bytes):
            slot = self._take_slot()
            with self._lock:
                job.num_left += 1
            self._stages.start("read", item.num_bytes, self._read, job, item, slot)
        self._leave(job)

    def _take_slot(self) -> torch.Tensor:
        """A buffer that nobody uses; waits for one."""
        with self._lock:
            may_make = not self._free and self._num_slots < self._staging.num_slots
            self._num_slots += may_make
        if may_make:
            return host_buffer(self._staging.slot_bytes, self._device)
        self._stages.wait(lambda: bool(self._free))
        with self._lock:
            return self._free.pop()

    # --- stages

    def _create(self, job: _Job) -> None:
        job.writer = GroupWriter(self._folder.root, job.group.files)
        self._stages.tell()

    def _read(self, job: _Job, item: Batch | Piece, slot: torch.Tensor) -> None:
        if isinstance(item, Piece):
            data = slot[: item.num_bytes]
            self._source.read_into(item.ref, data.numpy().data, item.start)
            place = item.planned.files[0].tensors[item.ref.name]
            runs = [Run(place.file, place.offset_bytes + item.start, item.num_bytes, data)]
            self._stages.start("write", item.num_bytes, self._write, job, item, slot, runs)
            return
        raw = RawExperts(item.layout, slot) if self._source.reads_ahead else None
        if raw is not None:
            self._source.read_raw(raw)
        self._stages.start("encode", item.num_bytes, self._encode, job, item, slot, raw)

    def _encode(self, job: _Job, batch: Batch, slot: torch.Tensor, raw: RawExperts | None) -> None:
        lane = self._lane()
        with entered(lane):
            runs, costs = produce(self._source, batch, raw, lane)
        with self._lock:
            for index, expert in enumerate(batch.experts):
                job.costs[expert] = {role: of_role[index] for role, of_role in costs.items()}
        num_bytes = sum(run.num_bytes for run in runs)
        self._stages.start("write", num_bytes, self._write, job, batch, slot, runs)

    def _lane(self) -> Lane:
        if not hasattr(self._lanes, "lane"):
            self._lanes.lane = make_lane(self._device)
        lane: Lane = self._lanes.lane
        return lane

    def _writer(self, job: _Job) -> GroupWriter:
        """A group's files, as soon as they are made."""
        self._stages.wait(lambda: job.writer is not None)
        assert job.writer is not None
        return job.writer

    def _write(self, job: _Job, item: Batch | Piece, slot: torch.Tensor, runs: list[Run]) -> None:
        writer = self._writer(job)
        for run in runs:
            writer.write_at(run.file, run.offset_bytes, run.data.numpy())
        runs.clear()
        with self._lock:
            self._free.append(slot)
        self._meter.advance(job.group.name, item.num_bytes)
        self._leave(job)
        self._stages.tell()

    def _leave(self, job: _Job) -> None:
        """One batch or piece less is to be written; after the last one the files are finished."""
        with self._lock:
            job.num_left -= 1
            is_last = job.num_left == 0
        if is_last:
            for file in job.group.files:
                self._stages.start("finish", file.size_bytes, self._finish_file, job, file)

    def _finish_file(self, job: _Job, file: OutFile) -> None:
        record = self._writer(job).finish_file(file)
        with self._lock:
            job.files[file.path] = record
            is_last = len(job.files) == len(job.group.files)
        if is_last:
            self._stages.start("publish", 0, self._publish, job)

    def _publish(self, job: _Job) -> None:
        """Give a group's files their names and put them down in the journal, one group after the other."""
        self._writer(job).publish()
        records = [job.files[file.path] for file in job.group.files]
        self._folder.record(JournalEntry(job.group.name, records, _measured(job)))
        job.is_done = True
        self._meter.finish(job.group.name)
        self._stages.tell()


def _measured(job: _Job) -> dict[str, Any]:
    """The quantization error per projection; of copied tensors nothing."""
    if not isinstance(job.group, PlannedBlock):
        return {}
    costs = [job.costs[expert] for expert in range(job.group.block.num_experts)]
    return block_errors(costs, is_coded=job.group.encoding.is_coded)
