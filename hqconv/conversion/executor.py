"""Fills a plan's groups in stages: read → encode → write → finish, for as many batches at once as there are slots.

A batch holds its slot from the moment it is read until it is written: that is the only back-pressure, and the bound on
memory (see `resources`). No stage waits for a block's end; groups are finished, flushed and hashed, beside the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hqconv.conversion.batches import Batch, Piece, Run, cut, shares
from hqconv.conversion.devices import STAGE as SLOTS
from hqconv.conversion.devices import Lane, Slot, Slots, entered, make_lane
from hqconv.conversion.encode import DeferredCheckError
from hqconv.conversion.encode_batch import EncodedRuns, encode_to_runs
from hqconv.conversion.hub_prefetch import HubPrefetch
from hqconv.conversion.input_scales import InputScales, create_files
from hqconv.conversion.journal import Destination, JournalEntry
from hqconv.conversion.output_writer import UnitWriter
from hqconv.conversion.profile import StageProfile
from hqconv.conversion.progress import Meter
from hqconv.conversion.quant_error import Measurements
from hqconv.conversion.resources import Resources, Staging
from hqconv.conversion.source_integrity import SourceIntegrity
from hqconv.conversion.stages import Stages
from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.errors import InputError
from hqconv.io.open_files import open_limit
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.protocols import Source
from hqconv.planning.output_units import OutFile, OutputUnit
from hqconv.schemas.tensors import TensorRef

# Groups whose files are open: one that is made ahead, one in work, the rest being finished. More than the first number
# only while their files are few.
_OPEN_GROUPS, _MAX_OPEN_GROUPS = 4, 24
_MAX_THREADS = 16  # of a stage that reads, writes or hashes
_SHARE_BYTES = 16 << 20  # of a batch that one thread reads or writes, while others do the rest


@dataclass(eq=False)
class _Job:
    """A group on its way. What several threads count (`num_left`, `files`, `measured`) is under the executor's lock."""

    unit: OutputUnit
    writer: UnitWriter | None = None
    num_left: int = 0  # batches and pieces; one more until all are handed in
    files: dict[str, Any] = field(default_factory=dict)
    measured: Measurements = field(default_factory=Measurements)
    sources: set[str] = field(default_factory=set)  # the files that it is read from
    is_done: bool = False


@dataclass(eq=False)
class _Flight:
    """A batch or a piece on its way, with the slot that it holds."""

    job: _Job
    item: Batch | Piece
    slot: Slot
    sources: set[str]
    raw: RawExperts | None = None
    num_reads_left: int = 0  # under the executor's lock, and so is the next
    num_writes_left: int = 0


class Executor:
    """The stages of one conversion."""

    def __init__(
        self,
        source: Source,
        folder: Destination,
        resources: Resources,
        staging: Staging,
        meter: Meter,
        profile: StageProfile,
        scales: Mapping[str, InputScales],
        supply: HubPrefetch,
    ) -> None:
        self._scales, self._supply = scales, supply
        self._source, self._folder, self._device = source, folder, resources.device
        self._staging, self._meter, self._profile = staging, meter, profile
        num_threads = min(_MAX_THREADS, max(4, resources.num_threads))
        self._stages = Stages(
            {
                "open": 1,
                SLOTS: 1,
                "read": num_threads,
                # A GPU's lanes are streams: one thread feeds them all, and is not held up by another's Python.
                "encode": 1 if resources.is_cuda else staging.num_lanes,
                "collect": 1,
                "write": num_threads,
                "finish": num_threads,
                "publish": 1,
            },
            profile,
        )
        self._share = 1 if resources.is_cuda else resources.threads_per_lane
        self._helpers = Helpers(resources.num_threads) if self._share > 1 else None
        self._slots = Slots(staging, self._device, self._stages, profile)
        self._proofs = SourceIntegrity(source, self._stages, profile, "finish")
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._jobs: list[_Job] = []

    def run(self, units: Iterable[OutputUnit]) -> None:
        """Fill and finish the groups. Raises the first error of any stage; nothing half done keeps its final name."""
        try:
            self._supply.start(self._stages)
            jobs = (_Job(unit) for unit in units)
            job = next(jobs, None)
            while job is not None:
                self._supply.bring(job.unit)
                if job not in self._jobs:
                    self._stages.wait(self._may_open)
                    self._open(job)
                ahead = next(jobs, None) if self._may_open() else None
                if ahead is not None and self._supply.has(ahead.unit):
                    self._open(ahead)
                self._feed(job)
                job = ahead or next(jobs, None)
            self._stages.wait(lambda: all(job.is_done for job in self._jobs))
        finally:
            self._supply.stop()
            self._stages.stop()
            if self._helpers is not None:
                self._helpers.stop()
            for job in self._jobs:
                if job.writer is not None and not job.is_done:
                    job.writer.abandon()

    # --- the thread that owns the stages

    def _may_open(self) -> bool:
        counts = [len(job.unit.files) for job in self._jobs if not job.is_done]
        are_few = sum(counts) < (_OPEN_GROUPS - 1) * open_limit()
        return len(counts) < (_MAX_OPEN_GROUPS if are_few else _OPEN_GROUPS)

    def _open(self, job: _Job) -> None:
        """Have a group's files made, ahead of their first bytes."""
        self._jobs.append(job)
        self._stages.start("open", 0, self._create, job)

    def _feed(self, job: _Job) -> None:
        job.num_left = 1
        piece_bytes = min(self._staging.slot_bytes, _SHARE_BYTES)
        for item in cut(job.unit, self._staging.num_experts, piece_bytes):
            flight = _Flight(job, item, self._slots.take(), self._proofs.begin(item))
            job.sources |= flight.sources
            with self._lock:
                job.num_left += 1
            self._read_ahead(flight)
        self._leave(job)

    def _read_ahead(self, flight: _Flight) -> None:
        """Have a batch's bytes read by several threads, or a piece by one."""
        item = flight.item
        if isinstance(item, Piece):
            self._stages.start("read", item.num_bytes, self._read_piece, flight, item)
        elif self._source.reads_ahead:
            flight.raw = RawExperts(item.layout, flight.slot.raw)
            pieces = item.layout.pieces(_SHARE_BYTES)
            flight.num_reads_left = len(pieces)
            for places in pieces:
                num_bytes = sum(ref.num_bytes for ref, _ in places)
                self._stages.start("read", num_bytes, self._read, flight, item, places)
        else:
            self._stages.start("encode", item.num_bytes, self._encode, flight, item)

    # --- stages

    def _create(self, job: _Job) -> None:
        job.writer = create_files(self._folder.root, job.unit, self._scales)
        self._stages.tell()

    def _read_piece(self, flight: _Flight, piece: Piece) -> None:
        runs, reads, end = list[Run](), [], 0
        for one in piece.stretches():
            data = flight.slot.raw[end : end + one.num_bytes]
            runs.append(one.run(data))
            reads.append((one.part, data.numpy().data))
            end += one.num_bytes
        try:
            self._source.read_all_into(reads)
        except InputError:
            for ref, start, size in piece.spans:  # one by one, for the name of the tensor that it is
                self._source.read_into(ref, flight.slot.raw[:size].numpy().data, start)
            raise
        self._write_out(flight, runs)

    def _read(self, flight: _Flight, batch: Batch, places: list[tuple[TensorRef, int]]) -> None:
        assert flight.raw is not None
        self._source.read_raw(flight.raw, places)
        with self._lock:
            flight.num_reads_left -= 1
            is_last = flight.num_reads_left == 0
        if is_last:
            self._stages.start("encode", batch.num_bytes, self._encode, flight, batch)

    def _encode(self, flight: _Flight, batch: Batch) -> None:
        lane = self._lane()
        with entered(lane), self._proofs.first(flight.sources):
            produced = encode_to_runs(self._source, batch, flight.raw, lane, flight.slot)
        if produced.wait is None:
            self._collect(flight, batch, lane, produced)
        else:
            self._stages.start("collect", batch.num_bytes, self._collect, flight, batch, lane, produced)

    def _lane(self) -> Lane:
        """The thread's own lane, or the next one of those that its only thread feeds."""
        if not hasattr(self._lanes, "lanes"):
            count = self._staging.num_lanes if self._device.type == "cuda" else 1
            self._lanes.lanes = deque(
                make_lane(self._device, self._helpers, self._share) for _ in range(count)
            )
        lanes: deque[Lane] = self._lanes.lanes
        lanes.rotate()
        return lanes[0]

    def _collect(self, flight: _Flight, batch: Batch, lane: Lane, produced: EncodedRuns) -> None:
        """Take what comes back, once it is there; have it done again where a check that was put off finds something."""
        with self._proofs.first(flight.sources):
            try:
                costs = produced.costs()
            except DeferredCheckError:
                with entered(lane):
                    produced = encode_to_runs(
                        self._source, batch, flight.raw, lane, flight.slot, is_careful=True
                    )
                    costs = produced.costs()
        with self._lock:
            flight.job.measured.add(batch.experts, costs, produced.sums())
        self._write_out(flight, produced.runs)

    def _writer(self, job: _Job) -> UnitWriter:
        """A group's files, as soon as they are made."""
        if job.writer is None:
            with self._profile.waiting("files to write into"):
                self._stages.wait(lambda: job.writer is not None)
        assert job.writer is not None
        return job.writer

    def _write_out(self, flight: _Flight, runs: list[Run]) -> None:
        """Have runs written by several threads."""
        dealt = shares(runs, _SHARE_BYTES)
        flight.num_writes_left = len(dealt)
        for share in dealt:
            self._stages.start("write", sum(run.num_bytes for run in share), self._write, flight, share)

    def _write(self, flight: _Flight, runs: list[Run]) -> None:
        writer = self._writer(flight.job)
        for run in runs:
            writer.write_at(run.file, run.offset_bytes, run.data.numpy())
        runs.clear()
        with self._lock:
            flight.num_writes_left -= 1
            if flight.num_writes_left:
                return
        self._slots.give(flight.slot)
        self._profile.begin()
        self._meter.advance(flight.job.unit.name, flight.item.num_bytes)
        self._leave(flight.job)

    def _leave(self, job: _Job) -> None:
        """One batch or piece less is to be written; after the last one the files are finished."""
        with self._lock:
            job.num_left -= 1
            is_last = job.num_left == 0
        if is_last:
            for file in job.unit.files:
                self._stages.start("finish", file.size_bytes, self._finish_file, job, file)

    def _finish_file(self, job: _Job, file: OutFile) -> None:
        record = self._writer(job).finish_file(file, self._stages.keep_on)
        with self._lock:
            job.files[file.path] = record
            is_last = len(job.files) == len(job.unit.files)
        if is_last:
            self._stages.start("publish", 0, self._publish, job)

    def _publish(self, job: _Job) -> None:
        """Give a group's files their names and put them down in the journal, one group after the other."""
        self._proofs.settle(job.sources)
        self._writer(job).publish()
        records = [job.files[file.path] for file in job.unit.files]
        measured, digests = job.measured, self._proofs.digests(job.sources)
        words = (measured.errors(job.unit), measured.sums(), digests)
        self._folder.record(JournalEntry(job.unit.name, records, *words))
        self._supply.release(job.unit)
        job.is_done = True
        self._meter.finish(job.unit.name)
        self._stages.tell()
