"""Run a plan's output units through stages: read → encode → write → finish.

A batch holds its slot from its read until it is written; on a GPU until it is encoded, and then a smaller buffer with
its results until these are written. That is the only back-pressure, and the bound on memory (see `resources`). No stage
waits for a layer's end; the files of a unit are flushed and hashed beside the work on others.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hqconv.conversion.collect_input_scales import InputScales
from hqconv.conversion.encode import DeferredCheckError
from hqconv.conversion.encode_batch import (
    Batch,
    EncodedRuns,
    Lane,
    Measurements,
    Piece,
    Run,
    split_runs,
    split_unit,
)
from hqconv.conversion.hub_prefetch import HubPrefetch, shards_of
from hqconv.conversion.journal import JournalEntry
from hqconv.conversion.output_folder import UnitWriter
from hqconv.conversion.resources import Resources, Staging
from hqconv.conversion.stages import Meter, Stage, StageProfile, Stages
from hqconv.errors import InputError, plural
from hqconv.io.durable_files import FileRecord
from hqconv.io.file_access import open_limit
from hqconv.io.pipeline import HostBuffers, one_torch_thread
from hqconv.jit import Helpers
from hqconv.models.moe_layer import RawExperts
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutFile, OutputUnit
from hqconv.schemas.tensors import TensorRef

_LOG = logging.getLogger(__name__)

# Units whose files are open: those in work, the rest being finished. More than the first number only while their files
# are few.
_OPEN_UNITS = 4
_MAX_OPEN_UNITS = 24
# Units in work take turns: Linux lets one thread write to a file at a time, and creating one on a RAM disk takes as
# long as writing.
_UNITS_IN_WORK = 3
# of a copied shard beside a layer: its one file is written by one thread at a time
_PIECES_IN_FLIGHT = 2
# of a stage that reads or writes
_MIN_THREADS = 4
_MAX_THREADS = 16
_MAX_FINISH_THREADS = 8  # each hashes more than a gigabyte a second
# Of a batch or a piece, that one thread reads or writes while others take the rest. Every such task waits for Python's
# lock a few times: beside a GPU, whose batches come faster, tasks are larger.
_CHUNK_BYTES = 16 << 20
_GPU_CHUNK_BYTES = 32 << 20
# of a file, hashed in one call; each hashing thread keeps so many
_DIGEST_BYTES = 1 << 20
_GPU_DIGEST_BYTES = 4 << 20


@dataclass(eq=False)
class _UnitInWork:
    """An output unit in work. The executor's lock guards `num_left`, `files` and `measured`."""

    unit: OutputUnit
    sources: tuple[str, ...]  # names of the source files
    items: deque[Batch | Piece]  # to feed
    num_left: int  # batches and pieces to write
    measured: Measurements = field(default_factory=Measurements)
    writer: UnitWriter | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    is_done: bool = False
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_saturated(self) -> bool:
        """True if more pieces of its one file would only wait in their slots for each other."""
        in_flight = self.num_left - len(self.items)
        return isinstance(self.unit, CopiedShardPlan) and in_flight >= _PIECES_IN_FLIGHT


@dataclass(eq=False)
class _InFlight:
    """A batch or a piece in work, with the memory that it holds. The executor's lock guards the counts and `runs`.

    slot: of the source bytes, until they are written, or encoded on a GPU. out: of a GPU's results. runs: of a piece,
    as its parts are read.
    """

    unit: _UnitInWork
    item: Batch | Piece
    slot: torch.Tensor | None
    out: torch.Tensor | None = None
    raw: RawExperts | None = None
    runs: list[Run] = field(default_factory=list)
    num_reads_left: int = 0
    num_writes_left: int = 0


class Executor:
    """The stages of one conversion, and the units, slots and lanes in them."""

    def __init__(
        self,
        source: Source,
        root: Path,
        record: Callable[[JournalEntry], None],
        resources: Resources,
        staging: Staging,
        meter: Meter,
        profile: StageProfile,
        scales: Mapping[str, InputScales],
        prefetch: HubPrefetch,
        *,
        encode: Callable[..., EncodedRuns],
    ) -> None:
        """root: folder of the output files. record: called with each finished unit.

        encode: encodes a batch, with the arguments of `encode_to_runs`.
        """
        self._encode_batch = encode
        self._scales = scales
        self._prefetch = prefetch
        self._source = source
        self._device = resources.device
        self._root = root
        self._record = record
        self._staging = staging
        self._meter = meter
        self._profile = profile
        num_threads = min(_MAX_THREADS, max(_MIN_THREADS, resources.num_threads))
        self._stages = Stages(
            {
                Stage.READ: num_threads,
                # A GPU's lanes are streams: one thread feeds them all, and waits for no other thread's Python.
                Stage.ENCODE: 1 if resources.is_cuda else staging.num_lanes,
                Stage.WRITE: num_threads,
                Stage.FINISH: min(num_threads, _MAX_FINISH_THREADS),
            },
            profile,
        )
        self._threads_per_lane = 1 if resources.is_cuda else resources.threads_per_lane
        self._helpers = Helpers(resources.num_threads) if self._threads_per_lane > 1 else None
        notify = self._stages.notify
        self._slots = HostBuffers(staging.slot_bytes, self._device, staging.num_slots, notify)
        self._outputs: HostBuffers | None = None
        if staging.out_bytes:
            self._outputs = HostBuffers(
                staging.out_bytes, self._device, staging.num_outputs, notify
            )
        self._chunk_bytes = _GPU_CHUNK_BYTES if resources.is_cuda else _CHUNK_BYTES
        self._digest_bytes = _GPU_DIGEST_BYTES if resources.is_cuda else _DIGEST_BYTES
        self._lock = threading.Lock()
        self._publish_lock = threading.Lock()
        self._own = threading.local()  # the lanes of a thread
        self._units: list[_UnitInWork] = []

    def run(self, units: Iterable[OutputUnit]) -> None:
        """Write and finish the units. Raises the first error of any stage; no unfinished file keeps its final name."""
        with one_torch_thread(), self._profile.running():
            self._run(iter(units))

    def _run(self, units: Iterator[OutputUnit]) -> None:
        try:
            self._prefetch.start(self._stages.notify)
            if self._outputs is not None:
                self._outputs.grow(1)  # before slots: the first batch waits for it
            self._feed(units)
            self._stages.wait(lambda: all(unit.is_done for unit in self._units))
        finally:
            self._stages.stop()
            self._prefetch.stop()
            if self._helpers is not None:
                self._helpers.stop()
            for unit in self._units:
                if unit.writer is not None and not unit.is_done:
                    unit.writer.abandon()
            for buffers in (self._slots, self._outputs):
                if buffers is not None:
                    buffers.release()

    # --- the thread that owns the stages

    def _feed(self, units: Iterator[OutputUnit]) -> None:
        """Open the units one after the other, and start to read their batches and pieces in turns."""
        in_work: deque[_UnitInWork] = deque()
        coming = next(units, None)
        while coming is not None or in_work:
            while coming is not None and len(in_work) < _UNITS_IN_WORK:
                if not self._may_open(coming, has_other_work=bool(in_work)):
                    break
                unit = self._open(coming)
                if unit.items:
                    in_work.append(unit)
                coming = next(units, None)
            if in_work:
                slot = self._take(self._slots, "a free slot")  # meanwhile files are created
                unit = next((unit for unit in in_work if not unit.is_saturated), in_work[0])
                self._feed_one(unit, slot)
                in_work.remove(unit)
                if unit.items:
                    in_work.append(unit)

    def _may_open(self, unit: OutputUnit, *, has_other_work: bool) -> bool:
        """Return whether a unit may be opened. Without other work it is waited for."""
        if has_other_work and not (self._has_room() and self._prefetch.is_ready(unit.name)):
            return False
        self._stages.wait(lambda: self._prefetch.is_ready(unit.name))
        self._stages.wait(self._has_room)
        return True

    def _has_room(self) -> bool:
        counts = [len(unit.unit.files) for unit in self._units if not unit.is_done]
        are_few = sum(counts) < (_OPEN_UNITS - 1) * open_limit()
        return len(counts) < (_MAX_OPEN_UNITS if are_few else _OPEN_UNITS)

    def _open(self, planned: OutputUnit) -> _UnitInWork:
        """Start to create a unit's files, ahead of their first bytes."""
        items = deque(split_unit(planned, self._staging.num_experts, self._staging.slot_bytes))
        sources = shards_of(self._source, planned, whole=True)
        unit = _UnitInWork(planned, sources, items, len(items))
        self._units.append(unit)
        self._stages.start(Stage.READ, 0, self._create, unit)
        if not items:  # a file without tensors
            self._finish(unit)
        return unit

    def _take(self, buffers: HostBuffers, cause: str) -> torch.Tensor:
        """Wait for a free buffer. Pinning takes longer than encoding a batch: meanwhile another one may come back."""
        while (buffer := buffers.take(waits=False)) is None:
            with self._profile.waiting(cause):
                self._stages.wait(lambda: buffers.has_free)
        return buffer

    def _feed_one(self, unit: _UnitInWork, slot: torch.Tensor) -> None:
        """Start to read the next batch or piece of a unit into a slot, in several threads."""
        item = unit.items.popleft()
        in_flight = _InFlight(unit, item, slot)
        if isinstance(item, Piece):
            parts = item.parts(self._chunk_bytes)
            in_flight.num_reads_left = len(parts)
            for begin, part in parts:
                data = slot[begin : begin + part.num_bytes]
                self._stages.start(
                    Stage.READ, part.num_bytes, self._read_part, in_flight, part, data
                )
        elif self._source.reads_ahead:
            raw = in_flight.raw = RawExperts(item.layout, slot)
            pieces = item.layout.pieces(self._chunk_bytes)
            in_flight.num_reads_left = len(pieces)
            for ranges in pieces:
                num_bytes = sum(ref.num_bytes for ref, _ in ranges)
                self._stages.start(Stage.READ, num_bytes, self._read, in_flight, item, raw, ranges)
        else:
            self._stages.start(Stage.ENCODE, item.num_bytes, self._encode, in_flight, item)

    # --- stages

    def _create(self, unit: _UnitInWork) -> None:
        """Create a unit's files at their full size, and write the layer's activation scales."""
        planned = unit.unit
        writer = UnitWriter(self._root, unit.unit.files)
        try:
            if isinstance(planned, MoeLayerPlan):
                for gemm, ref in planned.input_scale_places():
                    scale = torch.tensor([self._scales[planned.name][gemm]], dtype=torch.float32)
                    writer.write_at(ref.file, ref.offset_bytes, scale.numpy())
        except BaseException:
            writer.abandon()
            raise
        unit.writer = writer
        self._stages.notify()

    def _read_part(self, in_flight: _InFlight, part: Piece, data: torch.Tensor) -> None:
        """Read a part of a piece, and write the piece after the last one."""
        runs = list[Run]()
        reads = []
        end = 0
        for ref, start, size in part.spans:
            place = data[end : end + size]
            end = end + size
            stored = ref._replace(offset_bytes=ref.offset_bytes + start, num_bytes=size)
            reads.append((stored, place.numpy().data))
            out = part.planned.files[0].tensors[ref.name]
            runs.append(Run(out.file, out.offset_bytes + start, size, place))
        try:
            self._source.read_all_into(reads)
        except InputError:
            for ref, start, size in part.spans:  # one by one, to name the tensor
                self._source.read_into(ref, data[:size].numpy().data, start)
            raise
        with self._lock:
            in_flight.runs += runs
        if self._is_last_read(in_flight):
            self._write_out(in_flight, in_flight.runs)

    def _read(
        self,
        in_flight: _InFlight,
        batch: Batch,
        raw: RawExperts,
        ranges: Sequence[tuple[TensorRef, int]],
    ) -> None:
        self._source.read_all_into(raw.views(ranges))
        if self._is_last_read(in_flight):
            self._stages.start(Stage.ENCODE, batch.num_bytes, self._encode, in_flight, batch)

    def _is_last_read(self, in_flight: _InFlight) -> bool:
        """Count a read of a batch or a piece, and return whether it was the last one."""
        with self._lock:
            in_flight.num_reads_left -= 1
            return in_flight.num_reads_left == 0

    def _encode(self, in_flight: _InFlight, batch: Batch) -> None:
        """Encode a batch; on a GPU its results arrive later, and a thread that writes waits for them."""
        if self._outputs is not None:
            in_flight.out = self._take(self._outputs, "a free output buffer")
        lane = self._next_lane()
        with lane.used(), self._source.guard.blame_files_first(in_flight.unit.sources):
            encoded = self._encode_batch(self._source, batch, in_flight.raw, lane, in_flight.out)
        if encoded.wait is None:
            self._collect(in_flight, batch, lane, encoded)
        else:
            self._stages.start(Stage.WRITE, 0, self._collect, in_flight, batch, lane, encoded)

    def _next_lane(self) -> Lane:
        """Return this thread's lanes in turn: one on the CPU, several streams on a GPU."""
        if not hasattr(self._own, "lanes"):
            if self._helpers is not None:
                self._helpers.use(self._threads_per_lane)
            torch.get_num_threads()  # else the first product takes the number that another thread sets meanwhile
            torch.set_num_threads(1)
            num_lanes = self._staging.num_lanes if self._device.type == "cuda" else 1
            self._own.lanes = itertools.cycle([Lane(self._device) for _ in range(num_lanes)])
        lane: Lane = next(self._own.lanes)
        return lane

    def _collect(
        self, in_flight: _InFlight, batch: Batch, lane: Lane, encoded: EncodedRuns
    ) -> None:
        """Take the results once they are on the host; encode again where a deferred check fails."""
        with self._source.guard.blame_files_first(in_flight.unit.sources):
            try:
                error_sums = encoded.error_sums()
            except DeferredCheckError:
                with lane.used():
                    encoded = self._encode_batch(
                        self._source, batch, in_flight.raw, lane, in_flight.out, is_careful=True
                    )
                    error_sums = encoded.error_sums()
        with self._lock:
            in_flight.unit.measured.add(batch, error_sums)
        if in_flight.out is not None:
            self._give_slot(in_flight)
        self._write_out(in_flight, encoded.runs)

    def _give_slot(self, in_flight: _InFlight) -> None:
        assert in_flight.slot is not None
        self._slots.give(in_flight.slot)
        in_flight.slot = in_flight.raw = None

    def _write_out(self, in_flight: _InFlight, runs: list[Run]) -> None:
        """Write runs in several threads."""
        chunks = split_runs(runs, self._chunk_bytes)
        in_flight.num_writes_left = len(chunks)
        for chunk in chunks:
            num_bytes = sum(run.num_bytes for run in chunk)
            self._stages.start(Stage.WRITE, num_bytes, self._write, in_flight, chunk)
        if not chunks:
            self._end(in_flight)

    def _write(self, in_flight: _InFlight, runs: list[Run]) -> None:
        writer = self._writer(in_flight.unit)
        for run in runs:
            writer.write_at(run.file, run.offset_bytes, run.data.numpy())
        runs.clear()  # the buffers are free before the last write is counted
        with self._lock:
            in_flight.num_writes_left -= 1
            is_last = in_flight.num_writes_left == 0
        if is_last:
            self._end(in_flight)

    def _writer(self, unit: _UnitInWork) -> UnitWriter:
        """Return the writer of a unit's files, once they are created."""
        if unit.writer is None:
            with self._profile.waiting("files to write into"):
                self._stages.wait(lambda: unit.writer is not None)
        assert unit.writer is not None
        return unit.writer

    def _end(self, in_flight: _InFlight) -> None:
        """Return the memory of a written batch or piece, and count it; after the last one, finish the files."""
        unit = in_flight.unit
        item = in_flight.item
        if in_flight.slot is not None:
            self._give_slot(in_flight)
        if in_flight.out is not None and self._outputs is not None:
            self._outputs.give(in_flight.out)
        with self._lock:
            unit.num_left -= 1
            is_last = unit.num_left == 0
        self._meter.advance(unit.unit.name, item.num_bytes)
        if is_last:
            self._finish(unit)

    def _finish(self, unit: _UnitInWork) -> None:
        for file in unit.unit.files:
            self._stages.start(Stage.FINISH, file.size_bytes, self._finish_file, unit, file)

    def _finish_file(self, unit: _UnitInWork, file: OutFile) -> None:
        """Flush and hash a file; after the last one, publish the unit, one unit after the other."""
        writer = self._writer(unit)
        record = writer.finish_file(file, self._stages.check_cancelled, self._digest_bytes)
        _LOG.debug("Wrote %s: %d bytes.", self._root / file.path, file.size_bytes)
        with self._lock:
            unit.files[file.path] = record
            is_last = len(unit.files) == len(unit.unit.files)
        if is_last:
            with self._publish_lock:
                self._publish(unit)

    def _publish(self, unit: _UnitInWork) -> None:
        """Give a unit's files their final names and record the unit in the journal."""
        planned = unit.unit
        guard = self._source.guard
        guard.check_unchanged(unit.sources)
        self._stages.check_cancelled()
        self._writer(unit).publish()
        records = [unit.files[file.path] for file in planned.files]
        # A commit of the Hub cannot change.
        states = {} if self._source.revision is not None else guard.states(unit.sources)
        self._record(JournalEntry(planned.name, records, unit.measured.errors(planned), states))
        self._prefetch.release(planned.name)
        unit.is_done = True
        seconds = time.monotonic() - unit.started_s
        _LOG.info(
            "Unit %s is done: %s in %.1f s.", planned.name, plural(len(records), "file"), seconds
        )
        self._meter.finish(planned.name)
        self._stages.notify()
