"""A checkpoint of safetensors files as a source: each expert's byte ranges read, cut to projections and decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch

from hqconv.formats.decode_matrix import SourceMatrix, decode_matrix
from hqconv.models.expert_bytes import RawExperts, stored_shape
from hqconv.models.moe_layer import MoeLayer, View
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.safetensors_headers import SafetensorsHeaders


class SafetensorsSource(SafetensorsHeaders):
    """A checkpoint whose experts are tensors of its own. See `hqconv.models.protocols.Source`."""

    reads_ahead: ClassVar[bool] = True

    def read_raw(self, raw: RawExperts, places: Iterable[tuple[TensorRef, int]]) -> None:
        """Read ranges into the buffer. Raises InputError as `read_into`."""
        buffer = raw.buffer.numpy().data
        self.read_all_into((ref, buffer[start : start + ref.num_bytes]) for ref, start in places)

    def read_expert(
        self,
        block: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Projections of one expert; a tensor that several of them share is read once. On the CPU, views of `raw`."""
        read: dict[tuple[int, int], torch.Tensor] = {}
        found = {}
        for role in roles:
            refs, parts, names = block.sources[expert][role], {}, {}
            for part, ref in refs.items():
                source = block.parts[role][part]
                place = (ref.file, ref.offset_bytes)
                if place not in read:
                    read[place] = (
                        raw.tensor(ref).to(device, non_blocking=True) if raw else self._read(ref, device)
                    )
                whole = read[place]
                parts[part] = whole if source.is_run else _look(whole, source.view)
                names[part] = f"{ref.name}, expert {expert}" if source.is_stacked else ref.name
            found[role] = decode_matrix(block.format, parts, block.shape(role), names)
        return found

    def _read(self, ref: TensorRef, device: torch.device) -> torch.Tensor:
        """A tensor in its own dtype, on `device` (through pinned memory for CUDA)."""
        host = torch.empty(stored_shape(ref), dtype=torch_dtype(ref.dtype), pin_memory=device.type == "cuda")
        self.read_into(ref, host.flatten().view(torch.uint8).numpy().data)
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
