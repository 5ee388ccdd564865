"""A batch of experts as the runs of bytes that its group's files get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from hqconv.conversion.batches import Batch, Run
from hqconv.conversion.devices import Lane, Slot
from hqconv.conversion.encode import EncodedBatch, encode_batch
from hqconv.humming_layout.rank_slices import gemm_tensors
from hqconv.humming_layout.transform import to_kernel
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.protocols import Source
from hqconv.quantization.content_sums import expert_sums, sum_names
from hqconv.quantization.quantize import ErrorSums


@dataclass(frozen=True, eq=False)
class EncodedRuns:
    """What a batch became. `runs` are to be written once `wait` has returned, where there is one."""

    runs: list[Run]
    wait: Callable[[], None] | None
    _encoded: EncodedBatch
    _measured: list[torch.Tensor]
    _sums: torch.Tensor

    def costs(self) -> dict[str, list[ErrorSums]]:
        """What each matrix lost by role, once `wait` has returned; see `EncodedBatch`."""
        if self.wait is not None:
            self.wait()
        return self._encoded.costs(self._measured)

    def sums(self) -> dict[tuple[str, str], list[int]]:
        """Content sums of each expert, by role and tensor, once `costs` has returned; see `schemas/content`."""
        names = sum_names(self._encoded.tensors)
        return dict(zip(names, self._sums.tolist(), strict=True))


def encode_to_runs(
    source: Source, batch: Batch, raw: RawExperts | None, lane: Lane, slot: Slot, *, is_careful: bool = False
) -> EncodedRuns:
    """Encode a batch and lay it out; on a GPU, have that done.

    The runs may be views of `slot`, which is free only when they are written.
    """
    planned, block = batch.planned, batch.planned.block
    done = encode_batch(
        source, block, batch.experts, raw, planned.encoding, lane.device, is_careful=is_careful
    )
    runs = list(_kernel_runs(batch, done) if planned.forms else _packed_runs(batch, done))
    sums = expert_sums(done.tensors, planned.encoding.schema)
    host = lane.to_host([sums, *done.measured, *(run.data for run in runs)], slot)
    sums_bits, measured, data = host[0], host[1 : len(done.measured) + 1], host[len(done.measured) + 1 :]
    for run, one in zip(runs, data, strict=True):
        assert one.numel() == run.num_bytes, (planned.name, run.file, run.offset_bytes, run.num_bytes)
    return EncodedRuns(
        [replace(run, data=one) for run, one in zip(runs, data, strict=True)],
        lane.arrive(),
        done,
        [bits.view(torch.float64).view(one.shape) for bits, one in zip(measured, done.measured, strict=True)],
        sums_bits.view(torch.int64).view(sums.shape),
    )


def _kernel_runs(batch: Batch, done: EncodedBatch) -> Iterator[Run]:
    """The kernel layout: one run for each tensor and rank file, and more only where its experts are scattered."""
    planned = batch.planned
    neighbours = planned.neighbours(batch.experts)
    for part in planned.slices:
        packed = gemm_tensors(done.tensors, planned.encoding.schema, part)
        tensors = {
            f"{gemm}_{name}": value
            for gemm, form in planned.forms.items()
            for name, value in to_kernel(form, packed[gemm]).items()
        }
        for ep_rank, runs in neighbours.items():
            places = planned.rank_tensors(part.rank, ep_rank)
            assert places.keys() == tensors.keys(), (planned.name, sorted(places), sorted(tensors))
            for indices, local in runs:
                for name, value in tensors.items():
                    first = places[name].entry(local)
                    num_bytes = first.num_bytes * len(indices)
                    yield Run(first.file, first.offset_bytes, num_bytes, _chosen(value, indices))


def _chosen(stack: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Some experts of a stack, without a copy where they are neighbours there too."""
    if indices == list(range(indices[0], indices[-1] + 1)):
        return stack[indices[0] : indices[-1] + 1]
    bits = stack.view(torch.uint8) if stack.element_size() == 1 else stack
    return bits[indices].view(stack.dtype)


def _packed_runs(batch: Batch, done: EncodedBatch) -> Iterator[Run]:
    """The checkpoint layout: every expert's tensors have names of their own."""
    for index, expert in enumerate(batch.experts):
        for role, tensors in done.tensors.items():
            for name, value in tensors.items():
                place = batch.planned.packed_place(expert, role, name)
                yield Run(place.file, place.offset_bytes, place.num_bytes, value[index : index + 1])
