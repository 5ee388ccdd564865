"""Fills a plan's groups: worker threads read, encode, cut, lay out and write one expert at a time.

Memory: every worker holds one expert, so that the number of workers is the bound; it is chosen before anything is
allocated (see `resources`), and does not depend on the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hqconv.backends.assemble import gemm_tensors
from hqconv.backends.encoded import stacked
from hqconv.backends.layout import to_kernel
from hqconv.backends.quantize import Cost, Quantized
from hqconv.pipeline.costs import block_errors
from hqconv.pipeline.encode import COUPLED, encode
from hqconv.pipeline.progress import Meter
from hqconv.pipeline.resources import Resources
from hqconv.pipeline.writer import GroupWriter
from hqconv.planning.groups import Group, PlannedBlock, PlannedCopy
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.source import Source

COPY_CHUNK_BYTES = 8 << 20


class CancelledError(Exception):
    """Another worker failed, or the user interrupted; this one stops without a message of its own."""


class Workers:
    """Worker threads for one conversion, as many as memory allows."""

    def __init__(self, source: Source, resources: Resources, num_workers: int, meter: Meter) -> None:
        self.source, self.resources, self._meter = source, resources, meter
        self._is_cancelled = False
        self._num_at_work = 0
        self._idle = threading.Condition()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(num_workers, "hqconv", initializer=self._prepare_thread)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_cancelled = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare_thread(self) -> None:
        torch.set_num_threads(1)
        device = self.resources.device
        self._local.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self, group: Group, writer: GroupWriter) -> dict[str, Any]:
        """Fill the files of a group. Returns the quantization error per projection; of copied tensors nothing."""
        return self._block(group, writer) if isinstance(group, PlannedBlock) else self._copy(group, writer)

    def _block(self, planned: PlannedBlock, writer: GroupWriter) -> dict[str, Any]:
        """Convert every expert of a block."""
        block, device = planned.block, self.resources.device

        def one(expert: int) -> dict[str, Cost]:
            stream = self._local.stream
            with self._at_work(), torch.cuda.stream(stream) if stream else nullcontext():
                costs = convert_expert(self.source, planned, expert, writer, device)
            self._meter.advance(planned.name, sum(ref.num_bytes for ref in block.refs(expert)))
            return costs

        costs = self._all(self._pool.submit(one, e) for e in range(block.num_experts))
        return block_errors(costs, is_coded=planned.encoding.is_coded)

    def _copy(self, planned: PlannedCopy, writer: GroupWriter) -> dict[str, Any]:
        """Copy a shard's tensors, byte for byte."""
        places = planned.files[0].tensors

        def one(ref: TensorRef, start: int) -> None:
            buffer = bytearray(min(COPY_CHUNK_BYTES, ref.num_bytes - start))
            with self._at_work():
                self.source.read_into(ref, buffer, start)
                writer.write_at(0, places[ref.name].offset_bytes + start, buffer)
            self._meter.advance(planned.name, len(buffer))

        self._all(
            self._pool.submit(one, ref, start)
            for ref in planned.refs
            for start in range(0, ref.num_bytes, COPY_CHUNK_BYTES)
        )
        return {}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Counts who may still write. Raises CancelledError where nobody may begin any more."""
        with self._idle:
            if self._is_cancelled:
                raise CancelledError
            self._num_at_work += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_at_work -= 1
                self._idle.notify_all()

    def _all(self, submitted: Iterable[Future[Any]]) -> list[Any]:
        """Results in order; on the first failure the rest is cancelled and that failure is raised."""
        futures: list[Future[Any]] = []
        try:
            futures.extend(submitted)
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # interrupted: nobody may still write when the caller closes the files
            self._stop(futures)
            raise
        failures = [f.exception() for f in futures if f.done() and not f.cancelled() and f.exception()]
        if failures:
            self._stop(futures)
            raise next((e for e in failures if e and not isinstance(e, CancelledError)), CancelledError())
        return [future.result() for future in futures]

    def _stop(self, futures: list[Future[Any]]) -> None:
        """Let nobody begin, and wait until nobody is at work, whatever else is interrupted meanwhile.

        A future may be missing here, where the interrupt came while it was handed in: those at work are counted.
        """
        is_idle = False
        while not is_idle:
            try:
                with self._idle:
                    self._is_cancelled = True
                    for future in futures:
                        future.cancel()
                    is_idle = self._idle.wait_for(lambda: self._num_at_work == 0)
            except KeyboardInterrupt:
                continue


def convert_expert(
    source: Source, planned: PlannedBlock, expert: int, writer: GroupWriter, device: torch.device
) -> dict[str, Cost]:
    """Read, encode, lay out and write one expert. Returns what each projection lost."""
    encoded: dict[str, Quantized] = {}
    for coupled in COUPLED:
        roles = [role for role in coupled if role in planned.block.roles]
        encoded |= encode(source.read_expert(planned.block, expert, roles, device), planned.encoding)
    if planned.forms:
        _write_kernel(planned, expert, encoded, writer)
    else:
        for role, result in encoded.items():
            for tensor, value in result.tensors.items():
                writer.write(planned.packed_place(expert, role, tensor), _bytes(value))
    return {role: result.cost for role, result in encoded.items()}


def _write_kernel(
    planned: PlannedBlock, expert: int, encoded: dict[str, Quantized], writer: GroupWriter
) -> None:
    projections = {role: stacked([result]).tensors for role, result in encoded.items()}
    for part in planned.slices:
        packed = gemm_tensors(projections, planned.encoding.schema, part)
        places = planned.kernel_places(part.rank, expert)
        for gemm, form in planned.forms.items():
            for name, value in to_kernel(form, packed[gemm]).items():
                data = _bytes(value)
                for place in places.pop(f"{gemm}_{name}"):
                    writer.write(place, data)
        assert not places, f"{planned.name}: planned but not produced: {sorted(places)}"


def _bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes as a flat uint8 array on the host."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
