"""Reads one expert's matrices out of a checkpoint, as the source stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from hqconv.decode import Coded, decode, decode_floats
from hqconv.experts.block import ExpertBlock, View
from hqconv.formats.format import SourceFormat

if TYPE_CHECKING:
    from hqconv.checkpoint.folder import Checkpoint, TensorRef

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """One projection of one expert: its parts as tensors [out, …], and the names they have in the source."""

    format: SourceFormat
    shape: tuple[int, int]
    parts: Mapping[str, torch.Tensor]
    names: Mapping[str, str]

    @property
    def name(self) -> str:
        """The weight's name in the source."""
        return self.names["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out], if there is one."""
        return self.parts.get("bias")

    def coded(self) -> Coded:
        """Codes and scales. Raises InputError for values that no good checkpoint has."""
        return decode(self.format, self.parts, self.shape, self.names)

    def matrix(self) -> torch.Tensor:
        """The weights [out, in]: in the source's own dtype, or decoded to float32. Raises as `coded`."""
        if self.format.is_float:
            return self.parts["weight"]
        return decode_floats(self.format, self.parts, self.shape, self.names)

    def floats(self) -> torch.Tensor:
        """The weights [out, in] in float32."""
        return self.matrix().float()


@runtime_checkable
class ReadsExperts(Protocol):
    """A source whose experts do not lie in its tensors as they are."""

    def read_stored(
        self, block: ExpertBlock, expert: int, roles: Sequence[str], device: torch.device
    ) -> dict[str, StoredMatrix]:
        """One expert's projections."""


def read_source(
    checkpoint: Checkpoint, block: ExpertBlock, expert: int, roles: Sequence[str], device: torch.device
) -> dict[str, StoredMatrix]:
    """One expert's projections, on `device`; a tensor that several of them share is read once."""
    if isinstance(checkpoint, ReadsExperts):
        return checkpoint.read_stored(block, expert, roles, device)
    read: dict[tuple[int, int], torch.Tensor] = {}
    stored = {}
    for role in roles:
        parts: dict[str, torch.Tensor] = {}
        refs = block.sources[expert][role]
        for part, ref in refs.items():
            place = (ref.file, ref.offset_bytes)
            if place not in read:
                read[place] = _read(checkpoint, ref, device)
            source = block.parts[role][part]
            whole = read[place]
            parts[part] = whole if not source.is_stacked or source.is_run else _look(whole, source.view)
        names = {
            part: f"{ref.name}, expert {expert}" if block.parts[role][part].is_stacked else ref.name
            for part, ref in refs.items()
        }
        stored[role] = StoredMatrix(block.format, block.shape(role), parts, names)
    return stored


def _read(checkpoint: Checkpoint, ref: TensorRef, device: torch.device) -> torch.Tensor:
    """A tensor of the source, in its own dtype, on `device` (through pinned memory for CUDA)."""
    shape = (*ref.shape[:-1], ref.shape[-1] // 2) if ref.dtype == "F4" else ref.shape
    host = torch.empty(shape, dtype=_TORCH_DTYPES[ref.dtype], pin_memory=device.type == "cuda")
    checkpoint.read_into(ref, host.flatten().view(torch.uint8).numpy().data)
    return host if device.type == "cpu" else host.to(device, non_blocking=True)


def _look(whole: torch.Tensor, view: View) -> torch.Tensor:
    """One projection out of an expert's share of a fused tensor."""
    bits = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    if view.transposed and bits.ndim > 1:
        bits = bits.transpose(0, 1)
    if view.count > 1 and bits.ndim and bits.size(0) > 1:
        rows = bits.size(0) // view.count
        bits = bits[view.index :: view.count] if view.interleaved else bits[view.index * rows :][:rows]
    return bits.contiguous().view(whole.dtype)
