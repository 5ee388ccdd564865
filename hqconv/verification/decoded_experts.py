"""Experts of the kernel check, prefetched by threads: decoded from the artifact, and read from the source.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.load import expert_floats, refuse, stack_floats
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.formats.source_matrix import SourceMatrix
from hqconv.io.host_buffers import host_buffer
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.verification.reference import Expert
from hqconv.verification.scheduling import ahead

_BATCH_WEIGHTS = 1 << 26  # decoded at once: 256 MiB of float32, and a few times as much during decoding
_NUM_AHEAD = 2
T = TypeVar("T")


class InOrder(Generic[T]):
    """Values by expert for reads in ascending order: batches are prefetched, and freed once passed.

    A read of an earlier expert starts again from its batch.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, load: Callable[[range], Mapping[int, T]], num_experts: int, batch: int
    ) -> None:
        self._pool, self._load = pool, load
        self._batches = [range(b, min(b + batch, num_experts)) for b in range(0, num_experts, batch)]
        self._coming: Iterator[tuple[range, Mapping[int, T]]] = iter(())
        self._here: tuple[range, Mapping[int, T]] = range(0), {}

    def __call__(self, expert: int) -> T:
        """Return the value of an expert. Raises the errors of loading."""
        if expert < self._here[0].start or not self._here[0]:
            begin = next(i for i, batch in enumerate(self._batches) if expert in batch)
            self._coming = ahead(self._pool, self._load, self._batches[begin:], _NUM_AHEAD)
            self._here = next(self._coming)
        while expert not in self._here[0]:
            self._here = next(self._coming)
        return self._here[1][expert]


def decoded_experts(
    artifact: Artifact, layer: MoeLayer, device: torch.device, pool: ThreadPoolExecutor
) -> InOrder[Expert]:
    """Experts of the artifact on the device: `w1` (if gated), `w3` [I, H], `w2` [H, I], and biases; float32.

    Rotated weights are turned back.

    Raises VerificationError, here or when an expert is read, for values that no conversion writes.
    """
    reader = ExpertReader(artifact, layer, refuse)

    def load_one(expert: int) -> Expert:
        return {name: values.to(device) for name, values in expert_floats(reader, expert).items()}

    def load(experts: range) -> dict[int, Expert]:
        try:
            found, wrong = _load_batch(reader, experts, device)
        except HqconvError:  # `load_one` reports the fault
            found, wrong = {}, experts
        return found | {expert: load_one(expert) for expert in wrong}

    weights = len(layer.roles) * layer.hidden_size * layer.intermediate_size
    return InOrder(pool, load, layer.num_experts, max(1, _BATCH_WEIGHTS // weights))


def _load_batch(reader: ExpertReader, experts: range, device: torch.device) -> tuple[dict[int, Expert], Sequence[int]]:
    """Experts by number, and the numbers of experts that must be read alone."""
    stored = reader.plan(experts)
    host = host_buffer(stored.num_bytes, device)
    reader.fill(stored, host.numpy().data)
    stacks = reader.decode(stored, host.to(device, non_blocking=True))
    values = stack_floats(stacks, reader)
    wrong = torch.stack([stack.wrong for stack in stacks.values()]).any(0).tolist()
    found: dict[int, Expert] = {
        expert: {name: of_all[i] for name, of_all in values.items()} for i, expert in enumerate(experts) if not wrong[i]
    }
    return found, [expert for i, expert in enumerate(experts) if wrong[i]]


def source_experts(
    source: Source, layer: MoeLayer, device: torch.device, pool: ThreadPoolExecutor
) -> InOrder[dict[str, SourceMatrix]]:
    """Experts of the source, as `Source.read_expert` returns them."""

    def load(experts: range) -> dict[int, dict[str, SourceMatrix]]:
        return {expert: source.read_expert(layer, expert, layer.roles, device) for expert in experts}

    return InOrder(pool, load, layer.num_experts, 1)
