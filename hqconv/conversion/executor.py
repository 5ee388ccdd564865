"""Run a plan's output units through stages: read → encode → collect → write → finish → publish.

A batch holds its slot from its read until it is written: that is the only back-pressure, and the bound on memory (see
`resources`). No stage waits for a layer's end; the files of a unit are flushed and hashed beside the work on others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hqconv.conversion.collect_input_scales import InputScales, create_unit_files
from hqconv.conversion.devices import SLOT_STAGE as SLOTS
from hqconv.conversion.devices import Lane, Slot, Slots, make_lane, using_lane
from hqconv.conversion.encode import DeferredCheckError
from hqconv.conversion.encode_batch import Batch, Piece, Run, encode_to_runs, split_runs, split_unit
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
from hqconv.planning.output_units import OutFile, OutputUnit
from hqconv.quantization.content_sums import sum_of_bytes
from hqconv.schemas.tensors import TensorRef

_LOG = logging.getLogger(__name__)

# Units whose files are open: one created ahead, one in work, the rest being finished. More than the first number only
# while their files are few.
_OPEN_UNITS, _MAX_OPEN_UNITS = 4, 24
_MAX_THREADS = 16  # of a stage that reads, writes or hashes
_CHUNK_BYTES = 16 << 20  # of a batch that one thread reads or writes, while others take the rest


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
    writer: UnitWriter | None = None
    num_left: int = 0  # batches and pieces to write; plus one until all are fed
    files: dict[str, Any] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)  # names of the source files
    is_done: bool = False
    started_s: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _InFlight:
    """A batch or a piece in work, with the slot that it holds. The executor's lock guards the counts."""

    job: _Job
    item: Batch | Piece
    slot: Slot
    sources: set[str]
    raw: RawExperts | None = None
    num_reads_left: int = 0
    num_writes_left: int = 0


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
        encode: Encode | None = None,
        measurements: Callable[[], Measurements] = Measurements,
    ) -> None:
        """known: name → SHA-256 of the source's files that earlier runs hashed.

        encode, measurements: of a run that only measures: its units have no files, and its batches no bytes to write.
        """
        self._encode_batch, self._measurements = encode or encode_to_runs, measurements
        self._scales, self._prefetch = scales, prefetch
        self._source, self._folder, self._device = source, folder, resources.device
        self._staging, self._meter, self._profile = staging, meter, profile
        num_threads = min(_MAX_THREADS, max(4, resources.num_threads))
        self._stages = Stages(
            {
                "open": 1,
                SLOTS: 1,
                "read": num_threads,
                # A GPU's lanes are streams: one thread feeds them all, and waits for no other thread's Python.
                "encode": 1 if resources.is_cuda else staging.num_lanes,
                "collect": 1,
                "write": num_threads,
                "finish": num_threads,
                "publish": 1,
            },
            profile,
        )
        self._threads_per_lane = 1 if resources.is_cuda else resources.threads_per_lane
        self._helpers = Helpers(resources.num_threads) if self._threads_per_lane > 1 else None
        self._slots = Slots(staging, self._device, self._stages, profile)
        self._integrity = SourceIntegrity(source, self._stages, profile, "finish", known)
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._jobs: list[_Job] = []

    def run(self, units: Iterable[OutputUnit]) -> None:
        """Write and finish the units. Raises the first error of any stage; no unfinished file keeps its final name."""
        try:
            self._prefetch.start(self._stages)
            jobs = (_Job(unit, self._measurements()) for unit in units)
            job = next(jobs, None)
            while job is not None:
                self._prefetch.wait_for(job.unit.name)
                if job not in self._jobs:
                    self._stages.wait(self._may_open)
                    self._open(job)
                ahead = next(jobs, None) if self._may_open() else None
                if ahead is not None and self._prefetch.has_shards(ahead.unit.name):
                    self._open(ahead)
                self._feed(job)
                job = ahead or next(jobs, None)
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

    def _may_open(self) -> bool:
        counts = [len(job.unit.files) for job in self._jobs if not job.is_done]
        are_few = sum(counts) < (_OPEN_UNITS - 1) * open_limit()
        return len(counts) < (_MAX_OPEN_UNITS if are_few else _OPEN_UNITS)

    def _open(self, job: _Job) -> None:
        """Start to create a unit's files, ahead of their first bytes."""
        self._jobs.append(job)
        self._stages.start("open", 0, self._create, job)

    def _feed(self, job: _Job) -> None:
        job.num_left = 1
        piece_bytes = min(self._staging.slot_bytes, _CHUNK_BYTES)
        for item in split_unit(job.unit, self._staging.num_experts, piece_bytes):
            in_flight = _InFlight(job, item, self._slots.take(), self._integrity.begin(item))
            job.sources |= in_flight.sources
            with self._lock:
                job.num_left += 1
            self._read_ahead(in_flight)
        self._count_written(job)

    def _read_ahead(self, in_flight: _InFlight) -> None:
        """Read a batch's bytes in several threads, or a piece in one."""
        item = in_flight.item
        if isinstance(item, Piece):
            self._stages.start("read", item.num_bytes, self._read_piece, in_flight, item)
        elif self._source.reads_ahead:
            in_flight.raw = RawExperts(item.layout, in_flight.slot.raw)
            pieces = item.layout.pieces(_CHUNK_BYTES)
            in_flight.num_reads_left = len(pieces)
            for ranges in pieces:
                num_bytes = sum(ref.num_bytes for ref, _ in ranges)
                self._stages.start("read", num_bytes, self._read, in_flight, item, ranges)
        else:
            self._stages.start("encode", item.num_bytes, self._encode, in_flight, item)

    # --- stages

    def _create(self, job: _Job) -> None:
        job.writer = create_unit_files(self._folder.root, job.unit, self._scales)
        self._stages.notify()

    def _read_piece(self, in_flight: _InFlight, piece: Piece) -> None:
        runs, reads, end = list[Run](), [], 0
        for copied in piece.ranges():
            data = in_flight.slot.raw[end : end + copied.num_bytes]
            runs.append(copied.run(data))
            reads.append((copied.part, data.numpy().data))
            end += copied.num_bytes
        try:
            self._source.read_all_into(reads)
        except InputError:
            for ref, start, size in piece.spans:  # one by one, to name the tensor
                self._source.read_into(ref, in_flight.slot.raw[:size].numpy().data, start)
            raise
        sums, end = dict[str, int](), 0
        for ref, start, size in piece.spans:
            part = in_flight.slot.raw[end : end + size].numpy()
            sums[ref.name] = sum_of_bytes(part, start)
            end += size
        with self._lock:
            in_flight.job.measured.add_copied(sums)
        self._write_out(in_flight, runs)

    def _read(self, in_flight: _InFlight, batch: Batch, ranges: list[tuple[TensorRef, int]]) -> None:
        assert in_flight.raw is not None
        self._source.read_raw(in_flight.raw, ranges)
        with self._lock:
            in_flight.num_reads_left -= 1
            is_last = in_flight.num_reads_left == 0
        if is_last:
            self._stages.start("encode", batch.num_bytes, self._encode, in_flight, batch)

    def _encode(self, in_flight: _InFlight, batch: Batch) -> None:
        lane = self._lane()
        with using_lane(lane), self._integrity.blame_files_first(in_flight.sources):
            encoded = self._encode_batch(self._source, batch, in_flight.raw, lane, in_flight.slot)
        if encoded.wait is None:
            self._collect(in_flight, batch, lane, encoded)
        else:
            self._stages.start("collect", batch.num_bytes, self._collect, in_flight, batch, lane, encoded)

    def _lane(self) -> Lane:
        """Return the thread's own lane on the CPU, or the next of the lanes of a GPU."""
        if not hasattr(self._lanes, "lanes"):
            count = self._staging.num_lanes if self._device.type == "cuda" else 1
            self._lanes.lanes = deque(
                make_lane(self._device, self._helpers, self._threads_per_lane) for _ in range(count)
            )
        lanes: deque[Lane] = self._lanes.lanes
        lanes.rotate()
        return lanes[0]

    def _collect(self, in_flight: _InFlight, batch: Batch, lane: Lane, encoded: EncodedBatch) -> None:
        """Take the results once they are on the host; encode again where a deferred check fails."""
        with self._integrity.blame_files_first(in_flight.sources):
            try:
                error_sums = encoded.error_sums()
            except DeferredCheckError:
                with using_lane(lane):
                    slot = in_flight.slot
                    encoded = self._encode_batch(self._source, batch, in_flight.raw, lane, slot, is_careful=True)
                    error_sums = encoded.error_sums()
        with self._lock:
            in_flight.job.measured.add(batch.experts, error_sums, encoded.sums())
        self._write_out(in_flight, encoded.runs)

    def _writer(self, job: _Job) -> UnitWriter:
        """Return the writer of a unit's files, once they are created."""
        if job.writer is None:
            with self._profile.waiting("files to write into"):
                self._stages.wait(lambda: job.writer is not None)
        assert job.writer is not None
        return job.writer

    def _write_out(self, in_flight: _InFlight, runs: list[Run]) -> None:
        """Write runs in several threads."""
        chunks = split_runs(runs, _CHUNK_BYTES)
        in_flight.num_writes_left = len(chunks)
        for chunk in chunks:
            self._stages.start("write", sum(run.num_bytes for run in chunk), self._write, in_flight, chunk)
        if not chunks:
            self._end(in_flight)

    def _write(self, in_flight: _InFlight, runs: list[Run]) -> None:
        writer = self._writer(in_flight.job)
        for run in runs:
            writer.write_at(run.file, run.offset_bytes, run.data.numpy())
        runs.clear()
        with self._lock:
            in_flight.num_writes_left -= 1
            if in_flight.num_writes_left:
                return
        self._end(in_flight)

    def _end(self, in_flight: _InFlight) -> None:
        """Return the slot of a batch or piece whose bytes are all written."""
        self._slots.give(in_flight.slot)
        self._profile.end_warm_up()
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
