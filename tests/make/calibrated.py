"""Calibrations in small: a text, options, inputs whose columns depend on each other, and schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hqconv.calibration.gptq import InputProducts
from hqconv.quantization import quantized
from hqconv.quantization.group_scales import scales_of
from hqconv.quantization.quantized import QuantizedStack
from hqconv.schemas.weight_schema import WeightSchema

OPTIONS: dict[str, Any] = {"calibrate_tokens": 48, "calibrate_context": 16}
SCHEMAS = (
    *(
        "mxfp4",
        "nvfp4",
        "int4-g32",
        "int4-g32-e4m3",
        "int3-g64",
        "int2-g32-zp",
        "int4-g64-zp",
        "int4-g128-fpzp",
    ),
    *(
        "int4-g32-e4m3-row",
        "fp4-g32-e8m0-row",
        "fp8",
        "fp8-tensor",
        "fp8-block",
        "int8",
        "int4-c",
        "int1-g64",
    ),
)


def correlated(count: int, columns: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Inputs [T, K] whose columns depend on each other, some of them large: by the exponential of `spread`."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    sizes = torch.exp(spread * torch.randn(columns, generator=generator))
    return (mixed + 0.5 * torch.randn(count, columns, generator=generator)) * sizes


def products_of(inputs: list[torch.Tensor]) -> InputProducts:
    each = [x.double().t() @ x.double() for x in inputs]
    held = [x[: len(x) // 4].double().t() @ x[: len(x) // 4].double() for x in inputs]
    return InputProducts(torch.stack(each), torch.stack(held))


def decoded(
    stack: QuantizedStack, schema: WeightSchema, shape: tuple[int, int, int]
) -> torch.Tensor:
    scales = scales_of(stack.tensors, schema)
    repeats = shape[1] // scales.scale.size(1)
    scales = type(scales)(
        scales.stored, scales.scale.repeat_interleave(repeats, 1), scales.zero, scales.second
    )
    numbers = quantized.stored_numbers(stack.tensors["weight"].flatten(0, 1), schema)
    return quantized.decode(numbers.view(*shape[:2], scales.scale.size(2), -1), scales).view(shape)


def write_text(path: Path, count: int = 80) -> Path:
    """Write words that `write_tokenizer` knows."""
    path.write_text(" ".join(str(3 + i * 7 % 60) for i in range(count)))
    return path
