"""Small matrices in every source format, with random codes: raw tensors as a checkpoint names them.

Values are drawn, not quantized from anything, so every code and sign occurs. Legend: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.formats.encoding import ResolvedFormat, SourceMatrix, decode_matrix, resolve_format
from hqconv.formats.quant_config import declared_formats
from hqconv.formats.source_format import ANY, SourceFormat
from hqconv.quantization.coded_matrix import CodedMatrix
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from tests.make.quantized import quantize

N, K = 128, 256
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


class Draw:
    """Random tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def int32(self, *shape: int) -> torch.Tensor:
        """int32 words of random bits."""
        return self.integers(-(2**31), 2**31, *shape, dtype=torch.int32)

    def scales(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Positive scales over a few powers of two, with random mantissas."""
        exponents = torch.randint(-6, 3, shape, generator=self.generator)
        values = (1 + torch.rand(shape, generator=self.generator)) * 2.0**exponents
        return values.clamp(2.0**-6, 8).to(dtype)

    def signed_scales(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sign = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
        return (self.scales(*shape) * sign).to(dtype)

    def exponents(self, *shape: int) -> torch.Tensor:
        """e8m0 bytes, among them the smallest."""
        values = self.integers(100, 140, *shape)
        values.view(-1)[0] = 0
        return values

    def fp8(self, *shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        """All codes that are finite numbers."""
        values = self.integers(0, 256, *shape)
        limit = 0x7F if dtype == torch.float8_e4m3fn else 0x7C
        return torch.where((values & 0x7F) >= limit, values & 0x3F, values).view(dtype)


def cases() -> Iterator[Case]:
    """One case a format and variant."""
    for maker in (_fp8, _mx, _nvfp4, _compressed, _gptq, _awq, _bitnet, _quark, _humming):
        yield from maker(Draw(len(maker.__name__)))


def case(name: str) -> Case:
    """The case of a name."""
    return next(found for found in cases() if found.name == name)


def _fp8(draw: Draw) -> Iterator[Case]:
    declared = SourceFormat("fp8", "fp8", group_n=ANY, group_k=ANY)
    block = replace(declared, group_n=128, group_k=128)
    weight = draw.fp8(N, K)
    yield Case("fp8-tensor", declared, {"weight": weight, "weight_scale": draw.scales()})
    yield Case(
        "fp8-channel",
        declared,
        {"weight": weight, "weight_scale": draw.scales(N, dtype=torch.bfloat16)},
    )
    yield Case("fp8-block", block, {"weight": weight, "weight_scale_inv": draw.scales(1, 2)})
    yield Case(
        "fp8-block-ragged",
        block,
        {"weight": draw.fp8(192, 320), "scale": draw.scales(2, 3)},
        (192, 320),
    )
    e8m0 = draw.exponents(1, 2).view(torch.float8_e8m0fnu)
    yield Case("fp8-block-e8m0", block, {"weight": weight, "scale": e8m0})
    e5m2 = draw.fp8(N, K, dtype=torch.float8_e5m2)
    yield Case("fp8-e5m2", declared, {"weight": e5m2, "weight_scale": draw.scales(N, 1)})


def _mx(draw: Draw) -> Iterator[Case]:
    fp4 = SourceFormat("mxfp4", "mxfp4", "float4e2m1", "float8e8m0", 1, 32)
    weight, scale = draw.integers(0, 256, N, K // 2), draw.exponents(N, K // 32)
    yield Case(
        "mxfp4", fp4, {"weight": weight.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    )
    blocks = {
        "blocks": weight.view(N, K // 32, 16),
        "scales": scale,
        "bias": draw.scales(N, dtype=torch.bfloat16),
    }
    yield Case("gpt-oss", fp4, blocks)
    yield Case("ct-mxfp4", fp4, {"weight_packed": weight, "weight_scale": scale})
    yield Case(
        "mxfp8",
        SourceFormat("mxfp8", "mxfp8", "float8e4m3", "float8e8m0", 1, 32),
        {"weight": draw.fp8(N, K), "weight_scale": scale},
    )


def _nvfp4(draw: Draw) -> Iterator[Case]:
    declared = SourceFormat("nvfp4", "nvfp4", "float4e2m1", "float8e4m3", 1, 16, scale_2="tensor")
    weight, scale = (
        draw.integers(0, 256, N, K // 2),
        draw.scales(N, K // 16, dtype=torch.float8_e4m3fn),
    )
    yield Case(
        "nvfp4",
        declared,
        {
            "weight": weight,
            "weight_scale": scale,
            "weight_scale_2": draw.scales(),
            "input_scale": draw.scales(),
        },
    )
    yield Case(
        "ct-nvfp4",
        declared,
        {
            "weight_packed": weight,
            "weight_scale": scale,
            "weight_global_scale": draw.scales(1) * 100,
        },
    )


def _compressed(draw: Draw) -> Iterator[Case]:
    shape = torch.tensor([N, K])
    for bits in (2, 3, 4, 6, 8):
        for size in (0, 64):
            for zero in (False, True):
                groups = K // size if size else 1
                tensors = {
                    "weight_packed": draw.int32(N, K * bits // 32),
                    "weight_scale": draw.signed_scales(N, groups, dtype=torch.bfloat16),
                    "weight_shape": shape,
                }
                if zero:
                    tensors["weight_zero_point"] = draw.int32(N * bits // 32, groups)
                yield Case(
                    f"ct-int{bits}-{size or 'c'}{'-zp' if zero else ''}",
                    SourceFormat("pack", "packed_int", f"uint{bits}", "", 1, size, zero),
                    tensors,
                )
    padded = SourceFormat("pack", "packed_int", "uint3", "", 1, 64, True)
    codes = {
        "weight_packed": draw.int32(N, -(-K // 10)),
        "weight_zero_point": draw.int32(-(-N // 10), 4),
    }
    yield Case("ct-int3-padded", padded, {**codes, "weight_scale": draw.scales(N, 4)})
    permuted = SourceFormat("pack", "packed_int", "uint4", "", 1, 64, is_permuted=True)
    tensors = {
        "weight_packed": draw.int32(N, K // 8),
        "weight_scale": draw.scales(N, 4, dtype=torch.float16),
        "weight_g_idx": draw.integers(0, 4, K, dtype=torch.int32),
    }
    yield Case("ct-actorder", permuted, tensors)
    weight = draw.integers(-128, 128, N, K, dtype=torch.int8)
    for name, rows, scale in (("channel", 1, draw.scales(N, 1)), ("tensor", 0, draw.scales(1))):
        yield Case(
            f"ct-w8-{name}",
            SourceFormat("int", "int8", "uint8", "", rows, 0),
            {"weight": weight, "weight_scale": scale},
        )
    ascend = SourceFormat("ascend", "int8", "uint8", "", 1, 0, options=(("has_offset", True),))
    scale = draw.scales(N, 1)
    yield Case(
        "ascend",
        ascend,
        {"weight": weight, "weight_scale": scale, "weight_offset": torch.zeros(N, 1)},
    )
    zeros = draw.integers(-128, 128, N, 1, dtype=torch.int8)
    asymmetric = SourceFormat("int", "int8", "uint8", "", 1, 0, True)
    tensors = {"weight": weight, "weight_scale": draw.scales(N, 1), "weight_zero_point": zeros}
    yield Case("ct-w8-zp", asymmetric, tensors)


def _gptq(draw: Draw) -> Iterator[Case]:
    trivial = torch.arange(K, dtype=torch.int32) // 64
    for bits in (2, 3, 4, 8):
        for version in (1, 2):
            declared = SourceFormat(
                "gptq",
                "gptq",
                f"uint{bits}",
                group_k=64,
                has_zero_point=True,
                options=(("zero_offset", 2 - version),),
            )
            tensors = {
                "qweight": draw.int32(K * bits // 32, N),
                "qzeros": draw.int32(K // 64, N * bits // 32),
                "scales": draw.scales(K // 64, N, dtype=torch.float16),
                "g_idx": trivial,
            }
            yield Case(f"gptq{bits}-v{version}-zp", declared, tensors)
        midpoint = int("".join(f"{2 ** (bits - 1) - 1:0{bits}b}" for _ in range(32)), 2)
        packed = torch.frombuffer(
            bytearray(midpoint.to_bytes(4 * bits, "little")), dtype=torch.int32
        )
        zeros = packed.repeat(K // 64, N // 32)
        yield Case(
            f"gptq{bits}-sym",
            SourceFormat("gptq", "gptq", f"uint{bits}", group_k=64),
            {**tensors, "qzeros": zeros},
        )
    declared = replace(case_format := declared, b_dtype="uint4", is_permuted=True)
    declared = replace(declared, options=(*case_format.options, ("desc_act", True)))
    tensors = {
        "qweight": draw.int32(K // 8, N),
        "qzeros": draw.int32(K // 64, N // 8),
        "scales": draw.scales(K // 64, N, dtype=torch.float16),
        "g_idx": trivial[torch.randperm(K, generator=draw.generator)],
    }
    yield Case("gptq4-desc-act", declared, tensors)


def _awq(draw: Draw) -> Iterator[Case]:
    tensors = {
        "qweight": draw.int32(K, N // 8),
        "qzeros": draw.int32(K // 64, N // 8),
        "scales": draw.scales(K // 64, N, dtype=torch.float16),
    }
    yield Case("awq", SourceFormat("awq", "awq", "uint4", group_k=64, has_zero_point=True), tensors)


def _bitnet(draw: Draw) -> Iterator[Case]:
    ternary = draw.integers(0, 3, 4, N // 4, K)
    packed = ternary[0] | ternary[1] << 2 | ternary[2] << 4 | ternary[3] << 6
    for inverted in (True, False):
        declared = SourceFormat(
            "bitnet", "bitnet", "float2e0m1", group_n=0, options=(("scale_inverted", inverted),)
        )
        yield Case(
            "bitnet" if inverted else "bitnet-auto",
            declared,
            {"weight": packed, "weight_scale": draw.scales(1, dtype=torch.bfloat16)},
        )


def _quark_spec(dtype: str, qscheme: str, group_size: int | None = None, **more: Any) -> Any:
    sizes = {} if group_size is None else {"group_size": group_size}
    return {"dtype": dtype, "qscheme": f"per_{qscheme}", **sizes, **more}


SECOND = {"scale_dtype": "fp8_e4m3", "scale_qscheme": "per_tensor"}
QUARK: dict[str, dict[str, Any]] = {
    "int4-group": _quark_spec("int4", "group", 32, symmetric=True),
    "uint4-group": _quark_spec("uint4", "group", 32, symmetric=False),
    "int4-group-order": _quark_spec("int4", "group", 32, pack_method="order"),
    "int4-group-zp": _quark_spec("int4", "group", 32, symmetric=False),
    "int4-channel": _quark_spec("int4", "channel", symmetric=True),
    "uint4-channel": _quark_spec("uint4", "channel"),
    "int4-tensor": _quark_spec("int4", "tensor", symmetric=False),
    "int8-group": _quark_spec("int8", "group", 64, symmetric=True),
    "uint8-group": _quark_spec("uint8", "group", 64),
    "int8-channel": _quark_spec("int8", "channel", symmetric=True),
    "int2-group": _quark_spec("int2", "group", 32, symmetric=True),
    "int3-group": _quark_spec("int3", "group", 32, symmetric=True),
    "fp4-e8m0": _quark_spec("fp4", "group", 32, scale_format="e8m0"),
    "fp4-nv": _quark_spec("fp4", "group", 16, **SECOND),
    "fp4-e5m3": _quark_spec("fp4", "group", 32, scale_format="e5m3"),
    "fp6-e3m2": _quark_spec("fp6_e3m2", "group", 32, scale_format="e8m0"),
    "fp6-e2m3": _quark_spec("fp6_e2m3", "group", 32, scale_format="e8m0"),
    "fp8-channel": _quark_spec("fp8_e4m3", "channel"),
    "fp8-tensor": _quark_spec("fp8_e4m3", "tensor"),
    "fp8-block": _quark_spec("fp8_e4m3", "block", block_size=(64, 128)),
    "int4-fp8": _quark_spec("int4", "channel", symmetric=True, **SECOND, scale_stage=0),
    "mx-fp4": {"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32},
    "mx-fp6": {"dtype": "mx", "mx_element_dtype": "fp6_e2m3", "group_size": 32},
}


AXES = {"per_channel": 0, "per_group": 1, "": 1}


def quark_config(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec of `QUARK`, which has Humming's words for one layer, as a checkpoint's config says it."""
    ours = ("pack_method", "scale_dtype", "scale_qscheme", "scale_stage")
    weight = {key: value for key, value in spec.items() if key not in ours}
    weight["ch_axis"] = AXES.get(spec.get("qscheme", ""))
    stages = [weight]
    if "scale_dtype" in spec:
        second = {
            "dtype": spec["scale_dtype"],
            "qscheme": spec["scale_qscheme"],
            "is_scale_quant": True,
        }
        stages = [second, weight] if spec.get("scale_stage") == 0 else [weight, second]
    return {
        "quant_method": "quark",
        "export": {"pack_method": spec.get("pack_method", "reorder")},
        "global_quant_config": {"weight": stages if len(stages) > 1 else weight},
    }


def _quark(draw: Draw) -> Iterator[Case]:
    schema: Callable[..., Any] = _humming_schema_class("quark")
    for name, spec in QUARK.items():
        config = {"quant_method": "quark", "ch_axis": AXES.get(spec.get("qscheme", "")), **spec}
        attributes = schema(**config).get_tensors_attrs(N, K, torch.bfloat16)
        tensors = {key: _quark_tensor(draw, key, spec, value) for key, value in attributes.items()}
        declared = declared_formats(quark_config(spec), {}).of("any")
        yield Case(f"quark-{name}", declared, tensors)


def _humming_schema_class(method: str) -> Callable[..., Any]:
    from hqconv.humming_ops.runtime import humming

    found: Callable[..., Any] = humming().schema.WEIGHT_SCHEMA_MAP[method]
    return found


def _quark_tensor(
    draw: Draw, key: str, spec: dict[str, Any], attributes: dict[str, Any]
) -> torch.Tensor:
    shape, dtype = attributes["shape"], attributes["dtype"]
    if "scale" in key:
        if dtype == torch.uint8 and spec.get("scale_format") == "e8m0":
            return draw.exponents(*shape)
        return (
            draw.integers(60, 200, *shape)
            if dtype == torch.uint8
            else draw.scales(*shape, dtype=dtype)
        )
    if dtype == torch.float8_e4m3fn:
        return draw.fp8(*shape)
    if spec["dtype"] == "int2":
        return draw.integers(-2, 2, *shape, dtype=dtype)
    if dtype == torch.int32:
        return draw.int32(*shape)
    values = draw.integers(0, 256, *shape)
    if spec["dtype"] == "mx":  # the exponent bytes of embedded blocks: signed, in a sensible range
        step = 17 if "fp4" in spec["mx_element_dtype"] else 25
        values[:, ::step] = draw.integers(
            -20, 20, shape[0], shape[1] // step, dtype=torch.int8
        ).view(torch.uint8)
    return values.view(dtype)


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


def _humming(draw: Draw) -> Iterator[Case]:
    for name in HUMMING:
        schema = resolve_schema(name)
        weights = torch.randn(N, K, generator=draw.generator).bfloat16()
        quantized = quantize([weights], schema, "bfloat16")[0]
        yield Case(f"humming-{name}", humming_format(schema), quantized.tensors)
