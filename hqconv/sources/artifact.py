"""An artifact in the kernel layout as a source: for another TP, EP or schema, without the original model.

Experts come back through the independent decoder of the kernel layout, ranks put together; the other tensors are the
artifact's ordinary shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hqconv.artifact.expert_reader import ExpertMatrix, ExpertReader
from hqconv.errors import InputError
from hqconv.formats.decode_matrix import SourceMatrix
from hqconv.models.expert_bytes import RawExperts
from hqconv.models.moe_layer import MoeLayer
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, dequantize
from hqconv.quantization.hadamard import rotate
from hqconv.schemas.dtypes import code_of, torch_dtype
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.sources.artifact_headers import ArtifactHeaders, as_source
from hqconv.sources.safetensors import SafetensorsSource


class ArtifactSource(ArtifactHeaders, SafetensorsSource):
    """An artifact opened as a checkpoint whose experts are read back."""

    def __init__(self, root: Path, **words: Any) -> None:
        """Read manifest and headers, as `ArtifactHeaders`, whose `words` they are."""
        super().__init__(root, **words)
        self._readers: dict[str, ExpertReader] = {}

    reads_ahead = False

    @as_source()
    def read_expert(
        self,
        block: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        """Projections of one expert, put together from all TP ranks. Raises InputError for what cannot be decoded."""
        if block.name not in self._readers:
            self._readers[block.name] = ExpertReader(self.artifact, block, self._refuse)
        reader = self._readers[block.name]
        found: dict[str, ExpertMatrix] = {}
        for gemm, of_gemm in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            if set(of_gemm).intersection(roles):
                found |= reader.read(gemm, expert, self._refuse)
        return {
            role: self._coded(block, f"{block.name}, {role} of expert {expert}", found[role], device)
            for role in roles
        }

    def _refuse(self, where: str, what: str, expected: object, found: object) -> None:
        """What the `weights` check of `verify` would list."""
        remedy = "Verify the artifact; where it is damaged, convert the original model again."
        where = str(self.root / where)
        raise InputError(what, where=where, expected=expected, found=found, remedy=remedy)

    def _coded(self, block: MoeLayer, where: str, matrix: ExpertMatrix, device: torch.device) -> SourceMatrix:
        if matrix.flushed is not None and bool(matrix.flushed.any()):
            raise InputError(
                "The artifact lost scales when it was made for float16: its source's values cannot be told.",
                where=where,
                remedy="Convert the original model.",
            )
        schema, format_ = self.artifact.schema_of(block.name), block.format
        coded = CodedMatrix(
            b_dtype=schema.b_dtype,
            packed=bit_codec.pack(torch.from_numpy(matrix.codes), schema.num_bits).to(device),
            scale=_tensor(matrix.scale, matrix.scale_dtype, device),
            group_n=format_.group_n,
            group_k=format_.group_k,
            zero_point=self._zero_point(matrix, schema, device),
            scale_2=self._scale_2(matrix, schema, device),
        )
        bias = None if matrix.bias is None else _tensor(matrix.bias, self._param_code, device)
        named = {"weight": where, "bias": where}
        if schema.rotation:  # turned back; no target keeps these codes
            return SourceMatrix(named, floats=rotate(dequantize(coded), schema.rotation), bias=bias)
        return SourceMatrix(named, coded=coded, bias=bias)

    @property
    def _param_code(self) -> str:
        return code_of(self.artifact.param_dtype)

    def _zero_point(
        self, matrix: ExpertMatrix, schema: WeightSchema, device: torch.device
    ) -> torch.Tensor | None:
        if matrix.zero_point is None:
            return None
        code = self._param_code if schema.is_fp_zero_point else "U8"
        return _tensor(matrix.zero_point, code, device)

    def _scale_2(
        self, matrix: ExpertMatrix, schema: WeightSchema, device: torch.device
    ) -> torch.Tensor | None:
        if matrix.scale_2 is None:
            return None
        is_tensor = schema.weight_scale_2_type == "tensor"
        return _tensor(matrix.scale_2, "F32" if is_tensor else self._param_code, device)


def _tensor(bits: np.ndarray[Any, Any], code: str, device: torch.device) -> torch.Tensor:
    """Raw bit patterns as a tensor of the safetensors dtype `code`."""
    signed = np.ascontiguousarray(bits).view(f"i{bits.itemsize}" if bits.itemsize > 1 else np.uint8)
    return torch.from_numpy(signed).view(torch_dtype(code)).to(device)
