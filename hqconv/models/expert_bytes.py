"""Bytes of some experts, read into one buffer before they are decoded.

Legend: E experts of a batch. The buffer holds each part of each projection as one run, expert after expert, so that
parts stored as plain numbers form a stack [E, …] without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class RawLayout:
    """Buffer positions for the bytes of some experts: each byte range of the source once.

    ranges: each with its start in the buffer. starts: the same by (file, offset). stacks: starts of the parts that
    every expert has for itself, by role and part.
    """

    def __init__(self, layer: MoeLayer, experts: Sequence[int]) -> None:
        self.layer, self.experts = layer, experts
        self.ranges: list[tuple[TensorRef, int]] = []
        self.starts: dict[tuple[int, int], int] = {}
        self.stacks: dict[tuple[str, str], int] = {}
        self.num_bytes = 0
        expert_refs = [layer.sources[expert] for expert in experts]
        for role in layer.roles:
            for part in expert_refs[0][role]:
                self._add(role, part, [refs[role][part] for refs in expert_refs])

    def _add(self, role: str, part: str, refs: list[TensorRef]) -> None:
        """Append one part of every expert."""
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        end = start
        for ref in refs:
            if (ref.file, ref.offset_bytes) not in self.starts:
                self.starts[ref.file, ref.offset_bytes] = end
                self.ranges.append((ref, end))
                end += ref.num_bytes
        if end == start + len(refs) * refs[0].num_bytes:
            self.stacks[role, part] = start
        self.num_bytes = end

    def pieces(self, num_bytes: int) -> list[list[tuple[TensorRef, int]]]:
        """Split the ranges into pieces of about `num_bytes`, in the order of the files, for parallel reads."""
        pieces: list[list[tuple[TensorRef, int]]] = []
        filled = num_bytes
        for ref, start in sorted(
            self.ranges, key=lambda item: (item[0].file, item[0].offset_bytes)
        ):
            if filled >= num_bytes:
                pieces.append([])
                filled = 0
            pieces[-1].append((ref, start))
            filled += ref.num_bytes
        return pieces


@dataclass(frozen=True, eq=False)
class RawExperts:
    """A filled buffer (uint8) and the layout of the ranges in it."""

    layout: RawLayout
    buffer: torch.Tensor

    def on(self, device: torch.device) -> RawExperts:
        """Copy the buffer to a device, in one asynchronous copy."""
        if device.type == "cpu":
            return self
        return RawExperts(
            self.layout, self.buffer[: self.layout.num_bytes].to(device, non_blocking=True)
        )

    def views(
        self, ranges: Iterable[tuple[TensorRef, int]]
    ) -> Iterator[tuple[TensorRef, memoryview]]:
        """Yield ranges of the layout with the parts of the buffer that they fill."""
        buffer = self.buffer.numpy().data
        for ref, start in ranges:
            yield ref, buffer[start : start + ref.num_bytes]

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """View a range as a tensor in its own dtype and shape, without a copy."""
        start = self.layout.starts[ref.file, ref.offset_bytes]
        return _typed(self.buffer[start : start + ref.num_bytes], ref, ())

    def stack(self, role: str) -> torch.Tensor | None:
        """View a projection's weights of all experts as [E, …], without a copy; None if they are not one run."""
        layer, experts = self.layout.layer, self.layout.experts
        start = self.layout.stacks.get((role, "weight"))
        if start is None or not layer.slices[role]["weight"].is_run:
            return None
        num_experts, ref = len(experts), layer.sources[experts[0]][role]["weight"]
        return _typed(self.buffer[start : start + num_experts * ref.num_bytes], ref, (num_experts,))


def stored_shape(ref: TensorRef) -> tuple[int, ...]:
    """Return a tensor's shape as torch holds it: two 4-bit codes are one element."""
    return (*ref.shape[:-1], ref.shape[-1] // 2) if ref.dtype == "F4" else ref.shape


def _typed(raw: torch.Tensor, ref: TensorRef, front: tuple[int, ...]) -> torch.Tensor:
    return raw.view(torch_dtype(ref.dtype)).view((*front, *stored_shape(ref)))
