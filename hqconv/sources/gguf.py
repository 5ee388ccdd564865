"""GGUF files as the source of a model's experts; all other tensors come from safetensors in the same folder.

Each stack of experts has a type of its own, which the gguf library decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hqconv.formats.decode_matrix import SourceMatrix
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.gguf_headers import GgufHeaders, dequantize, open_with_gguf_as
from hqconv.sources.safetensors import SafetensorsSource

_CHUNK_NUMBERS = 1 << 18  # decoded at a time: the library's temporaries are several times as large


def open_with_gguf(root: Path) -> SafetensorsSource:
    """A folder with GGUF files as a source; errors as `open_with_gguf_as`."""
    return open_with_gguf_as(root, SafetensorsSource, GgufSource)


class GgufSource(GgufHeaders, SafetensorsSource):
    """A checkpoint whose experts lie in GGUF files, to be read."""

    reads_ahead = False

    def read_expert(
        self,
        block: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Projections of one expert in float32; only their own bytes are read. Raises InputError as `read_into`."""
        found = {}
        for role in roles:
            refs = block.sources[expert][role]
            names = {part: f"{ref.name}, expert {expert}" for part, ref in refs.items()}
            floats = self._weights(refs["weight"], block.shape(role))
            if "scale_2" in refs:
                floats *= self._numbers(refs["scale_2"])
            bias = torch.from_numpy(self._numbers(refs["bias"])).to(device) if "bias" in refs else None
            found[role] = SourceMatrix(names, floats=torch.from_numpy(floats).to(device), bias=bias)
        return found

    def _bytes(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        raw = np.empty(ref.num_bytes, np.uint8)
        self.read_into(ref, raw.data)
        return raw

    def _numbers(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        return dequantize(self._bytes(ref), ref.dtype).reshape(ref.shape)

    def _weights(self, ref: TensorRef, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """The weights [out, in] as the gguf library decodes them, float32."""
        rows, columns = shape
        stored = self._bytes(ref).reshape(rows, -1)
        weights = np.empty(shape, np.float32)
        step = max(1, _CHUNK_NUMBERS // columns)
        for start in range(0, rows, step):
            weights[start : start + step] = dequantize(stored[start : start + step], ref.dtype)
        return weights
