"""Run a plan's output units through stages: read → encode → collect → write → finish → publish.

A batch holds its slot from its read until it is written; on a GPU until it is encoded, and then a smaller buffer with
its results until these are written. That is the only back-pressure, and the bound on memory (see `resources`). No stage
waits for a layer's end; the files of a unit are flushed and hashed beside the work on others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hqconv.conversion.collect_input_scales import InputScales, create_unit_files
from hqconv.conversion.devices import BUFFER_STAGE, Buffer, Buffers, GpuClock, Lane, Slot, make_lane, using_lane
from hqconv.conversion.encode import DeferredCheckError
from hqconv.conversion.encode_batch import Batch, Piece, Run, encode_on_device, encode_to_runs, split_runs, split_unit
from hqconv.conversion.encoding_graphs import EncodingGraphs
from hqconv.conversion.hub_prefetch import HubPrefetch
from hqconv.conversion.journal import Destination, JournalEntry
from hqconv.conversion.output_folder import UnitWriter
from hqconv.conversion.progress import Meter
from hqconv.conversion.quant_error import Measurements
from hqconv.conversion.resources import Resources, Staging
from hqconv.conversion.source_integrity import SourceIntegrity
from hqconv.conversion.stages import StageProfile, Stages
from hqconv.cpu_loops.helper_threads import Helpers
from hqconv.errors import InputError, plural
from hqconv.io.file_access import open_limit
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import MoeLayerPlan, OutFile, OutputUnit
from hqconv.quantization.content_sums import sums_of_parts
from hqconv.schemas.tensors import TensorRef

_LOG = logging.getLogger(__name__)

# Units whose files are open: those in work, the rest being finished. More than the first number only while their files
# are few.
_OPEN_UNITS, _MAX_OPEN_UNITS = 4, 24
# Units in work: their files are created in parallel, and the first ones whose files are there take turns, by the bytes
# fed to them. Linux lets one thread write to a file at a time, and creating one on a RAM disk takes as long as writing.
_UNITS_IN_WORK, _UNITS_IN_TURN = 3, 2
_PIECES_IN_FLIGHT = 2  # of a copied shard beside a layer: its one file is written by one thread at a time
_SHARED_UNITS_IN_WORK = 2  # where processes share the units: what one has taken no other one does
_MIN_THREADS, _MAX_THREADS = 4, 16  # of a stage that reads or writes
_MAX_FINISH_THREADS = 8  # each hashes more than a gigabyte a second
# Of a batch or a piece, that one thread reads or writes while others take the rest. Every such task waits for Python's
# lock a few times: beside a GPU, whose batches come faster, tasks are larger.
_CHUNK_BYTES, _GPU_CHUNK_BYTES = 16 << 20, 32 << 20
_USE_GRAPHS = 1  # 0: every batch is encoded on a GPU by operations, for comparisons


class EncodedBatch(Protocol):
    """Results of a batch: bytes to write, and measurements. All are valid once `wait` has returned, if it is not None.

    `error_sums` waits by itself. It raises DeferredCheckError where the batch must be encoded again.
    """

    @property
    def runs(self) -> list[Run]: ...

    @property
    def wait(self) -> Callable[[], None] | None: ...

    def error_sums(self) -> Mapping[str, Any]: ...

    def sums(self) -> Mapping[tuple[str, str], list[int]]: ...


class Encode(Protocol):
    """Encode a batch: the arguments of `encode_to_runs`."""

    def __call__(
        self, source: Source, batch: Batch, raw: RawExperts | None, lane: Lane, slot: Slot, *, is_careful: bool = False
    ) -> EncodedBatch: ...


@dataclass(eq=False)
class _Job:
    """An output unit in work. The executor's lock guards `num_left`, `files` and `measured`."""

    unit: OutputUnit
    measured: Measurements
    items: Iterator[Batch | Piece]  # to feed
    writer: UnitWriter | None = None
    num_left: int = 1  # batches and pieces to write; plus one until all are fed
    files: dict[str, Any] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)  # names of the source files
    is_done: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.unit.name


@dataclass(eq=False)
class _InFlight:
    """A batch or a piece in work, with the memory that it holds. The executor's lock guards the counts and the phase.

    track: the name of the slot, later of the buffer with the results. runs: of a piece, as its parts are read. phase:
    `X queue` while the batch waits for a thread of stage X, `X` in that stage, `files` while it waits for the creation
    of its files. since_s: begin of the phase.
    """

    job: _Job
    item: Batch | Piece
    slot: Slot
    sources: set[str]
    track: str
    raw: RawExperts | None = None
    out: Buffer | None = None  # results of a GPU, after the slot is given back
    runs: list[Run] = field(default_factory=list)
    num_reads_left: int = 0
    num_writes_left: int = 0
    phase: str = "read queue"
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        item, name = self.item, self.job.unit.name
        if isinstance(item, Piece):
            return f"{name}: {item.num_bytes} bytes"
        return f"{name}: experts {item.experts.start}-{item.experts.stop - 1}"


class Executor:
    """The stages of one conversion, and the units, slots and lanes in them."""

    def __init__(
        self,
        source: Source,
        folder: Destination,
        resources: Resources,
        staging: Staging,
        meter: Meter,
        profile: StageProfile,
        scales: Mapping[str, InputScales],
        prefetch: HubPrefetch,
        known: Mapping[str, str],
        *,
        is_shared: bool = False,
        encode: Encode | None = None,
        measurements: Callable[[], Measurements] = Measurements,
    ) -> None:
        """known: name → SHA-256 of the source's files that earlier runs hashed.

        is_shared: other processes take units, too.
        encode, measurements: of a run that only measures: its units have no files, and its batches no bytes to write.
        """
        self._encode_batch, self._measurements = encode or encode_to_runs, measurements
        self._scales, self._prefetch = scales, prefetch
        self._source, self._folder, self._device = source, folder, resources.device
        self._staging, self._meter, self._profile = staging, meter, profile
        num_threads = min(_MAX_THREADS, max(_MIN_THREADS, resources.num_threads))
        self._stages = Stages(
            {
                "open": _UNITS_IN_WORK,
                BUFFER_STAGE: 1,
                "read": num_threads,
                # A GPU's lanes are streams: one thread feeds them all, and waits for no other thread's Python.
                "encode": 1 if resources.is_cuda else staging.num_lanes,
                "collect": 1,
                "write": num_threads,
                "finish": min(num_threads, _MAX_FINISH_THREADS),
                "publish": 1,
            },
            profile,
        )
        self._threads_per_lane = 1 if resources.is_cuda else resources.threads_per_lane
        self._helpers = Helpers(resources.num_threads) if self._threads_per_lane > 1 else None

        def pool(kind: str, count: int, num_bytes: int) -> Buffers:
            return Buffers(kind, count, num_bytes, self._device, self._stages, profile)

        self._slots = pool("slot", staging.num_slots, staging.slot_bytes)
        self._outputs = None
        if staging.out_bytes:
            self._outputs = pool("output buffer", staging.num_outputs, staging.out_bytes)
        self._chunk_bytes = _GPU_CHUNK_BYTES if resources.is_cuda else _CHUNK_BYTES
        self._clock = GpuClock(self._device) if resources.is_cuda and profile.trace is not None else None
        self._integrity = SourceIntegrity(source, self._stages, profile, "finish", known)
        self._num_in_work = _SHARED_UNITS_IN_WORK if is_shared else _UNITS_IN_WORK
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._jobs: list[_Job] = []
        self._num_bytes_through = 0  # of the source, written

    def run(self, units: Iterable[OutputUnit]) -> None:
        """Write and finish the units. Raises the first error of any stage; no unfinished file keeps its final name."""
        try:
            self._prefetch.start(self._stages)
            jobs = (
                _Job(unit, self._measurements(), split_unit(unit, self._staging.num_experts, self._staging.slot_bytes))
                for unit in units
            )
            self._feed(jobs)
            self._stages.wait(lambda: all(job.is_done for job in self._jobs))
        finally:
            self._prefetch.stop()
            self._stages.stop()
            if self._helpers is not None:
                self._helpers.stop()
            for job in self._jobs:
                if job.writer is not None and not job.is_done:
                    job.writer.abandon()

    def cancel(self, error: BaseException) -> None:
        """Have `run` raise an error soon; for any thread."""
        self._stages.cancel(error)

    # --- the thread that owns the stages

    def _feed(self, jobs: Iterator[_Job]) -> None:
        """Open the units one after the other, and start to read their batches and pieces in turns."""
        job: _Job | None = None
        in_work: list[_Job] = []
        turns: dict[_Job, int] = {}
        buffer: Buffer | None = None  # for the next batch or piece
        if self._outputs is not None:
            self._outputs.allocate()  # before slots: the first batch waits for it
        while True:
            while len(in_work) < self._num_in_work:
                job = job or next(jobs, None)
                if job is None or not self._may_begin(job, in_work):
                    break
                self._open(job)
                in_work.append(job)
                job = None
            if not in_work:
                break
            buffer = buffer or self._slots.take()  # meanwhile files are created
            chosen = _choose(in_work, turns)
            num_bytes = self._feed_one(chosen, in_work, buffer)
            if num_bytes:
                turns[chosen] += num_bytes
                buffer = None

    def _may_open(self) -> bool:
        counts = [len(job.unit.files) for job in self._jobs if not job.is_done]
        are_few = sum(counts) < (_OPEN_UNITS - 1) * open_limit()
        return len(counts) < (_MAX_OPEN_UNITS if are_few else _OPEN_UNITS)

    def _may_begin(self, job: _Job, in_work: Sequence[_Job]) -> bool:
        """Return whether a unit may be begun. The first one is waited for; beside others nothing is."""
        if in_work:
            is_possible = self._may_open() and self._prefetch.has_shards(job.unit.name)
            if not is_possible or any(_has_importance(one.unit) for one in (job, *in_work)):
                return False
        self._prefetch.wait_for(job.unit.name)
        self._stages.wait(self._may_open)
        return True

    def _open(self, job: _Job) -> None:
        """Start to create a unit's files, ahead of their first bytes."""
        self._jobs.append(job)
        self._stages.start("open", 0, self._create, job)

    def _feed_one(self, job: _Job, in_work: list[_Job], buffer: Buffer) -> int:
        """Start to read the next batch or piece of a unit into `buffer`; after the last one, take it from the list.

        Returns the number of bytes: 0 if nothing is read.
        """
        item = next(job.items, None)
        if item is None:
            in_work.remove(job)
            self._count_written(job)
            return 0
        slot = Slot(buffer)
        in_flight = _InFlight(job, item, slot, self._integrity.begin(item), f"slot {slot.number}")
        job.sources |= in_flight.sources
        with self._lock:
            job.num_left += 1
        self._read_ahead(in_flight)
        return item.num_bytes

    def _read_ahead(self, in_flight: _InFlight) -> None:
        """Read the bytes of a batch or a piece in several threads."""
        item = in_flight.item
        if isinstance(item, Piece):
            parts = item.parts(self._chunk_bytes)
            in_flight.num_reads_left = len(parts)
            for begin, part in parts:
                self._stages.start("read", part.num_bytes, self._read_part, in_flight, part, begin)
        elif self._source.reads_ahead:
            in_flight.raw = RawExperts(item.layout, in_flight.slot.raw)
            pieces = item.layout.pieces(self._chunk_bytes)
            in_flight.num_reads_left = len(pieces)
            for ranges in pieces:
                num_bytes = sum(ref.num_bytes for ref, _ in ranges)
                self._stages.start("read", num_bytes, self._read, in_flight, item, ranges)
        else:
            in_flight.phase = "encode queue"
            self._stages.start("encode", item.num_bytes, self._encode, in_flight, item)

    def _enter(self, in_flight: _InFlight, phase: str, after: str | None = None) -> None:
        """Begin the next phase of a batch. after: only if that is the phase now, where several threads may begin it."""
        now = time.monotonic()
        with self._lock:
            ended, since_s = in_flight.phase, in_flight.since_s
            if after is not None and ended != after:
                return
            in_flight.phase, in_flight.since_s = phase, now
        self._profile.add_slot_phase(in_flight.track, ended, in_flight, since_s, now)

    # --- stages

    def _create(self, job: _Job) -> None:
        job.writer = create_unit_files(self._folder.root, job.unit, self._scales)
        self._stages.notify()

    def _read_part(self, in_flight: _InFlight, part: Piece, begin: int) -> None:
        """Read a part of a piece, whose first byte is byte `begin` of the slot, and write the piece after the last."""
        self._enter(in_flight, "read", after="read queue")
        slot = in_flight.slot.raw[begin : begin + part.num_bytes]
        runs, reads, end = list[Run](), [], 0
        for copied in part.ranges():
            data = slot[end : end + copied.num_bytes]
            runs.append(copied.run(data))
            reads.append((copied.part, data.numpy().data))
            end += copied.num_bytes
        try:
            self._source.read_all_into(reads)
        except InputError:
            for ref, start, size in part.spans:  # one by one, to name the tensor
                self._source.read_into(ref, slot[:size].numpy().data, start)
            raise
        sums = sums_of_parts(slot.numpy(), [(start, size) for _, start, size in part.spans])
        names = (ref.name for ref, _, _ in part.spans)
        with self._lock:
            in_flight.job.measured.add_copied(dict(zip(names, sums, strict=True)))
            in_flight.runs += runs
        if self._is_last_read(in_flight):
            self._write_out(in_flight, in_flight.runs)

    def _read(self, in_flight: _InFlight, batch: Batch, ranges: list[tuple[TensorRef, int]]) -> None:
        assert in_flight.raw is not None
        self._enter(in_flight, "read", after="read queue")
        self._source.read_raw(in_flight.raw, ranges)
        if self._is_last_read(in_flight):
            self._enter(in_flight, "encode queue")
            self._stages.start("encode", batch.num_bytes, self._encode, in_flight, batch)

    def _is_last_read(self, in_flight: _InFlight) -> bool:
        """Count a read of a batch or a piece, and return whether it was the last one."""
        with self._lock:
            in_flight.num_reads_left -= 1
            return in_flight.num_reads_left == 0

    def _encode(self, in_flight: _InFlight, batch: Batch) -> None:
        if self._outputs is not None:
            in_flight.slot.out = self._outputs.take()
        self._enter(in_flight, "encode")
        lane = self._lane()
        with using_lane(lane), self._integrity.blame_files_first(in_flight.sources):
            encoded = self._encode_batch(self._source, batch, in_flight.raw, lane, in_flight.slot)
        if encoded.wait is None:
            self._collect(in_flight, batch, lane, encoded)
        else:
            self._enter(in_flight, "collect queue")
            self._stages.start("collect", batch.num_bytes, self._collect, in_flight, batch, lane, encoded)

    def _lane(self) -> Lane:
        """Return the thread's own lane on the CPU, or the next of the lanes of a GPU."""
        if not hasattr(self._lanes, "lanes"):
            count = self._staging.num_lanes if self._device.type == "cuda" else 1
            self._lanes.lanes = deque(self._make_lane(number) for number in range(count))
        lanes: deque[Lane] = self._lanes.lanes
        lanes.rotate()
        return lanes[0]

    def _make_lane(self, number: int) -> Lane:
        lane = make_lane(number, self._device, self._helpers, self._threads_per_lane, self._clock)
        if self._device.type == "cuda" and _USE_GRAPHS:
            lane.graphs = EncodingGraphs(partial(encode_on_device, self._source, device=self._device))
        return lane

    def _collect(self, in_flight: _InFlight, batch: Batch, lane: Lane, encoded: EncodedBatch) -> None:
        """Take the results once they are on the host; encode again where a deferred check fails."""
        self._enter(in_flight, "collect")
        with self._integrity.blame_files_first(in_flight.sources):
            try:
                error_sums = encoded.error_sums()
            except DeferredCheckError:
                lane.steps(in_flight.slot)  # of the first try
                with using_lane(lane):
                    slot = in_flight.slot
                    encoded = self._encode_batch(self._source, batch, in_flight.raw, lane, slot, is_careful=True)
                    error_sums = encoded.error_sums()
        for step, begin_s, end_s in lane.steps(in_flight.slot):
            self._profile.add_gpu_step(f"lane {lane.number}", step, in_flight, begin_s, end_s)
        with self._lock:
            in_flight.job.measured.add(batch.experts, error_sums, encoded.sums())
        self._write_out(in_flight, encoded.runs)

    def _give_slot(self, in_flight: _InFlight) -> None:
        """Return the slot of a batch whose results are in a buffer of their own."""
        assert in_flight.slot.out is not None
        in_flight.out, in_flight.raw = in_flight.slot.out, None
        in_flight.track = f"output {in_flight.out.number}"
        self._slots.give(in_flight.slot.buffer)

    def _writer(self, job: _Job) -> UnitWriter:
        """Return the writer of a unit's files, once they are created."""
        if job.writer is None:
            with self._profile.waiting("files to write into"):
                self._stages.wait(lambda: job.writer is not None)
        assert job.writer is not None
        return job.writer

    def _write_out(self, in_flight: _InFlight, runs: list[Run]) -> None:
        """Write runs in several threads."""
        self._enter(in_flight, "write queue")
        if in_flight.slot.out is not None:
            self._give_slot(in_flight)
        chunks = split_runs(runs, self._chunk_bytes)
        in_flight.num_writes_left = len(chunks)
        for chunk in chunks:
            self._stages.start("write", sum(run.num_bytes for run in chunk), self._write, in_flight, chunk)
        if not chunks:
            self._end(in_flight)

    def _write(self, in_flight: _InFlight, runs: list[Run]) -> None:
        self._enter(in_flight, "files", after="write queue")
        writer = self._writer(in_flight.job)
        self._enter(in_flight, "write", after="files")
        for run in runs:
            writer.write_at(run.file, run.offset_bytes, run.data.numpy())
        runs.clear()
        with self._lock:
            in_flight.num_writes_left -= 1
            if in_flight.num_writes_left:
                return
        self._end(in_flight)

    def _end(self, in_flight: _InFlight) -> None:
        """Return the memory of a batch or piece whose bytes are all written."""
        self._enter(in_flight, "free")
        if in_flight.out is None:
            self._slots.give(in_flight.slot.buffer)
        else:
            assert self._outputs is not None
            self._outputs.give(in_flight.out)
        with self._lock:
            self._num_bytes_through += in_flight.item.num_bytes
            num_bytes = self._num_bytes_through
        if isinstance(in_flight.item, Batch):
            self._profile.end_warm_up(num_bytes)
        self._meter.advance(in_flight.job.unit.name, in_flight.item.num_bytes)
        self._count_written(in_flight.job)

    def _count_written(self, job: _Job) -> None:
        """Count a written batch or piece; after the last one, finish the files."""
        with self._lock:
            job.num_left -= 1
            is_last = job.num_left == 0
        if not is_last:
            return
        for file in job.unit.files:
            self._stages.start("finish", file.size_bytes, self._finish_file, job, file)
        if not job.unit.files:
            self._stages.start("publish", 0, self._publish, job)

    def _finish_file(self, job: _Job, file: OutFile) -> None:
        record = self._writer(job).finish_file(file, self._stages.check_cancelled)
        _LOG.debug("Wrote %s: %d bytes.", self._folder.root / file.path, file.size_bytes)
        with self._lock:
            job.files[file.path] = record
            is_last = len(job.files) == len(job.unit.files)
        if is_last:
            self._stages.start("publish", 0, self._publish, job)

    def _publish(self, job: _Job) -> None:
        """Give a unit's files their final names and record the unit in the journal, one unit after the other."""
        self._integrity.wait_unchanged(job.sources)
        self._writer(job).publish()
        records = [job.files[file.path] for file in job.unit.files]
        measured, digests = job.measured, self._integrity.digests(job.sources)
        entry = JournalEntry(job.unit.name, records, measured.errors(job.unit), measured.sums(job.unit), digests)
        self._folder.record(entry)
        self._prefetch.release(job.unit.name)
        job.is_done = True
        count, seconds = len(records), time.monotonic() - job.started_s
        _LOG.info("Unit %s is done: %s in %.1f s.", job.unit.name, plural(count, "file"), seconds)
        self._meter.finish(job.unit.name)
        self._stages.notify()


def _choose(in_work: Sequence[_Job], turns: dict[_Job, int]) -> _Job:
    """Return the unit to feed: of those whose files are there, the one with the fewest bytes in `turns`.

    turns: bytes fed to each unit whose turn it may be; a unit that is new there begins with the fewest.
    """
    ready = [job for job in in_work if job.writer is not None][:_UNITS_IN_TURN] or in_work[:1]
    least = min((turns[job] for job in ready if job in turns), default=0)
    kept = {job: turns.get(job, least) for job in ready}
    turns.clear()
    turns.update(kept)
    # More pieces of one file would only wait in their slots for each other.
    are_few = [job for job in ready if isinstance(job.unit, MoeLayerPlan) or job.num_left <= _PIECES_IN_FLIGHT]
    return min(are_few or ready, key=turns.__getitem__)


def _has_importance(unit: OutputUnit) -> bool:
    """Return whether a unit needs a layer's part of an importance file: memory is counted for one layer."""
    return isinstance(unit, MoeLayerPlan) and unit.encoding.importance is not None
