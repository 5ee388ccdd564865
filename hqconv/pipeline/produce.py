"""A batch of experts as the runs of bytes that its group's files get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hqconv.backends.assemble import gemm_tensors
from hqconv.backends.layout import to_kernel
from hqconv.backends.quantize import Cost
from hqconv.pipeline.batches import Batch, Run
from hqconv.pipeline.devices import Lane
from hqconv.pipeline.encode import EncodedBatch, encode_batch
from hqconv.sources.raw import RawExperts
from hqconv.sources.source import Source


def produce(
    source: Source, batch: Batch, raw: RawExperts | None, lane: Lane
) -> tuple[list[Run], dict[str, list[Cost]]]:
    """Encode a batch and lay it out. Returns the runs, and what each matrix lost by role.

    The runs may be views of `raw`, so that its buffer is free only when they are written.
    """
    planned, block = batch.planned, batch.planned.block
    done = encode_batch(source, block, batch.experts, raw, planned.encoding, lane.device)
    runs = list(_kernel_runs(batch, done) if planned.forms else _packed_runs(batch, done))
    data = lane.to_host([run.data for run in runs])
    for run, one in zip(runs, data, strict=True):
        assert one.numel() == run.num_bytes, (planned.name, run.file, run.offset_bytes, run.num_bytes)
    return [replace(run, data=one) for run, one in zip(runs, data, strict=True)], done.costs()


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
