"""Bytes of some experts, read ahead of their decoding into one buffer.

Legend: E experts of a batch. The buffer holds each part of each projection as one run, expert after expert, so that
what is stored as plain numbers is a stack [E, …] without being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hqconv.experts.block import ExpertBlock
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class RawLayout:
    """Where the bytes of some experts go in a buffer: each range of the source once."""

    block: ExpertBlock
    experts: Sequence[int]
    starts: dict[tuple[int, int], int] = field(init=False, repr=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        starts: dict[tuple[int, int], int] = {}
        at = 0
        for role in self.block.roles:
            for part in self.block.sources[self.experts[0]][role]:
                at = -(-at // _ALIGNMENT) * _ALIGNMENT
                for ref in self._refs(role, part):
                    if starts.setdefault((ref.file, ref.offset_bytes), at) == at:
                        at += ref.num_bytes
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "num_bytes", at)

    def _refs(self, role: str, part: str) -> list[TensorRef]:
        return [self.block.sources[expert][role][part] for expert in self.experts]

    def places(self) -> Iterator[tuple[TensorRef, int]]:
        """Every range with its start in the buffer."""
        seen = set()
        for expert in self.experts:
            for ref in self.block.refs(expert):
                start = self.starts[ref.file, ref.offset_bytes]
                if start not in seen:
                    seen.add(start)
                    yield ref, start

    def pieces(self, num_bytes: int) -> list[list[tuple[TensorRef, int]]]:
        """The places in parts of about `num_bytes`, in the order of the files, to be read side by side."""
        parts: list[list[tuple[TensorRef, int]]] = []
        filled = num_bytes
        for ref, start in sorted(self.places(), key=lambda place: (place[0].file, place[0].offset_bytes)):
            if filled >= num_bytes:
                parts.append([])
                filled = 0
            parts[-1].append((ref, start))
            filled += ref.num_bytes
        return parts

    def start_of_stack(self, role: str, part: str) -> int | None:
        """Where a part of all experts lies as one run; None where it does not, or is stored in another form."""
        if self.block.parts[role][part].is_stacked and not self.block.parts[role][part].is_run:
            return None
        refs = self._refs(role, part)
        first = self.starts[refs[0].file, refs[0].offset_bytes]
        size = refs[0].num_bytes
        is_run = all(
            self.starts[ref.file, ref.offset_bytes] == first + i * size and ref.num_bytes == size
            for i, ref in enumerate(refs)
        )
        return first if is_run else None


@dataclass(frozen=True, eq=False)
class RawExperts:
    """A filled buffer (uint8, on the host) and what lies where in it."""

    layout: RawLayout
    buffer: torch.Tensor

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A range as a tensor in its own dtype and shape, without a copy."""
        start = self.layout.starts[ref.file, ref.offset_bytes]
        return _typed(self.buffer[start : start + ref.num_bytes], ref, ())

    def stack(self, role: str, part: str) -> torch.Tensor | None:
        """A part of a projection of all experts as [E, …], without a copy; None where it is not stored like that."""
        start = self.layout.start_of_stack(role, part)
        if start is None:
            return None
        num_experts = len(self.layout.experts)
        ref = self.layout.block.sources[self.layout.experts[0]][role][part]
        return _typed(self.buffer[start : start + num_experts * ref.num_bytes], ref, (num_experts,))


def stored_shape(ref: TensorRef) -> tuple[int, ...]:
    """A tensor's shape as torch holds it: two 4-bit codes are one element."""
    return (*ref.shape[:-1], ref.shape[-1] // 2) if ref.dtype == "F4" else ref.shape


def _typed(raw: torch.Tensor, ref: TensorRef, front: tuple[int, ...]) -> torch.Tensor:
    return raw.view(torch_dtype(ref.dtype)).view((*front, *stored_shape(ref)))
