"""Small matrices in every source format, with random codes: raw tensors as a checkpoint names them.

Values are drawn, not quantized from anything, so every code and sign occurs. Legend: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hqconv.formats.encoding import ResolvedFormat, SourceMatrix, decode_matrix, resolve_format
from hqconv.formats.quant_config import declared_formats
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization.coded_matrix import CodedMatrix
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.formats import FORMATS
from tests.make.packing import Draw, ascend_int8
from tests.make.quantized import quantize

N, K = 128, 256
EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Case:
    """One matrix: what the config declares, and its raw tensors."""

    name: str
    declared: SourceFormat
    tensors: dict[str, torch.Tensor]
    shape: tuple[int, int] = (N, K)

    def headers(self) -> dict[str, TensorSpec]:
        """The raw tensors' headers."""
        return {
            raw: TensorSpec(f"e.{raw}", CODES[t.dtype], tuple(t.shape))
            for raw, t in self.tensors.items()
        }

    def completed(self) -> ResolvedFormat:
        """The declared format, completed."""
        return resolve_format(self.declared, self.headers(), *self.shape)

    def stored(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors by canonical name."""
        return {part: self.tensors[raw].to(device) for part, raw in self.completed().used.items()}

    def names(self) -> dict[str, str]:
        """Canonical part to tensor name."""
        return {part: f"e.{raw}" for part, raw in self.completed().used.items()}

    def matrix(self, device: str = "cpu") -> SourceMatrix:
        """The matrix, decoded."""
        return decode_matrix(self.completed().format, self.stored(device), self.shape, self.names())

    def coded(self, device: str = "cpu") -> CodedMatrix:
        """The matrix as codes and scales."""
        coded = self.matrix(device).coded
        assert coded is not None
        return coded

    def with_tensor(self, name: str, tensor: torch.Tensor) -> Case:
        """The same case with one tensor replaced."""
        return replace(self, tensors={**self.tensors, name: tensor})


def int32(draw: Draw, *shape: int) -> torch.Tensor:
    """int32 numbers of random bits."""
    return draw.integers(-(2**31), 2**31, *shape).to(torch.int32)


def cases() -> Iterator[Case]:
    """One matrix of every format that stores experts one by one, and one of each schema in Humming's layout."""
    for name, spec in FORMATS.items():
        is_special = spec.layers or spec.needs or spec.differs or name.startswith("humming")
        if is_special or "quantization_config" not in spec.config:
            continue
        config = spec.layout.config(spec.sizes) | spec.config
        declared = declared_formats(config["quantization_config"], config).of(EXPERT)
        shape = spec.sizes.shape("w1")
        stored = spec.encode(Draw(1), *shape, torch.tensor(2e-4))
        yield Case(name, declared, stored.parts, shape)
    draw = Draw(1)
    padded = {
        "weight_packed": int32(draw, N, -(-K // 10)),
        "weight_zero_point": int32(draw, -(-N // 10), 4),
        "weight_scale": draw.scales(N, 4),
    }
    declared = SourceFormat("pack", "packed_int", "uint3", "", 1, 64, True)
    yield Case("ct-int3-padded", declared, padded)
    ascend = ascend_int8(Draw(1), N, K, torch.tensor(2e-4))
    offset = (("has_offset", True),)
    declared = SourceFormat("ascend", "int8", "uint8", "", 1, 0, options=offset)
    yield Case("ascend", declared, ascend.parts)
    for name in HUMMING:
        schema = resolve_schema(name)
        weights = torch.randn(N, K, generator=draw.generator).bfloat16()
        yield Case(
            f"humming-{name}",
            humming_format(schema),
            quantize([weights], schema, "bfloat16")[0].tensors,
        )


HUMMING = (
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "fp8",
    "fp8-e5m2",
    "fp8-block",
    "fp8-tensor",
    "fp6-e3m2",
    "int8",
    "int4",
    "int4-g64-zp",
    "int3-g64",
    "int4-g128-fpzp",
    "int7-g64-zp",
    "int2-g32-zp",
    "int5-c-fpzp",
)


def humming_format(schema: WeightSchema) -> SourceFormat:
    """Humming's checkpoint layout of a schema, as its config declares it."""
    return declared_formats({"quant_method": "humming", **schema.humming_fields()}, {}).of("any")
