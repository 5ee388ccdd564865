"""Scales on two levels: fp8 group scales under a second scale, float32 per matrix or in 16 bits per row.

Legend: E experts, N output rows, K input columns, G groups along K. The same bits on the CPU and on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hqconv.cpu_loops import arithmetic
from hqconv.humming_layout import cpu_ops
from hqconv.schemas.dtypes import torch_dtype_of
from hqconv.schemas.weight_schema import WeightSchema

_FP8_MAX = {"float8e4m3": 448.0, "float8e5m2": 57344.0}


@dataclass(frozen=True, eq=False)
class GivenScales:
    """Group scales to take: stored fp8 [E, N, G], and the second scale float32 [E, 1, 1]."""

    group: torch.Tensor
    second: torch.Tensor


def split_powers(
    stacks: Sequence[torch.Tensor], powers: Sequence[torch.Tensor], schema: WeightSchema
) -> list[GivenScales]:
    """Split powers of two into fp8 scales and one power of two above them, the same for all matrices of an expert.

    The largest scale of a group that is not zero becomes fp8's largest power of two; so scales down to 2**-17 of it
    are exact, and smaller ones become that.
    """
    fp8 = torch_dtype_of(schema.bs_dtype or "")
    top = 2.0 ** math.floor(math.log2(_FP8_MAX[schema.bs_dtype or ""]))
    lowest = torch.finfo(fp8).smallest_normal * torch.finfo(fp8).eps
    largest = torch.stack(
        [
            torch.where(s.view(*p.shape, -1).abs().amax(-1) > 0, p, torch.zeros_like(p)).amax((1, 2))
            for s, p in zip(stacks, powers, strict=True)
        ]
    ).amax(0)
    second = (largest / top).clamp_min(2.0**-100).reshape(-1, 1, 1)  # its inverse stays finite
    return [GivenScales((p / second).clamp(lowest, top).to(fp8), second) for p in powers]


def two_level(
    scale: torch.Tensor, schema: WeightSchema, param_dtype: str, amax: torch.Tensor | None, given: GivenScales | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Round group scales to fp8 under a second scale.

    Returns the stored scale, the stored scale_2 ([E] or [E, N]), the float scale_2 ([E, 1 or N, 1]) and the code limit.

    `scale` is the unrounded group scale amax_g / code_max, float32 [E, N, G] on any device; `amax` the shared
    maximum [E, 1, 1], or None for a second scale per row. All divisions are tensor by tensor, because torch on
    CUDA divides by a Python number with a reciprocal.
    """
    kind, bits, exponent, mantissa = cpu_ops.parse_dtype(schema.b_dtype)
    limit = arithmetic.largest_value(kind, bits, exponent, mantissa)
    if given is not None:
        return given.group, given.second.flatten(), given.second, limit
    scale_max = _FP8_MAX[schema.bs_dtype or ""]
    if amax is None:
        scale_2 = scale.amax(-1, keepdim=True) / scale.new_tensor(scale_max)
        kept = scale_2.to(torch_dtype_of(param_dtype))
        tiny = torch.finfo(kept.dtype).tiny
        kept = torch.where(kept < tiny, torch.full_like(kept, tiny), kept)
        scale_2, stored_2 = kept.float(), kept.squeeze(-1)
    else:
        scale_2 = amax / scale.new_tensor(limit * scale_max)
        stored_2 = scale_2.flatten()
    stored = (scale / scale_2).clamp(max=scale_max).to(torch_dtype_of(schema.bs_dtype or ""))
    return stored, stored_2, scale_2, limit
