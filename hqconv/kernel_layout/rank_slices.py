"""Experts' quantized projections, cut for a tensor-parallel rank and joined for the two GEMMs.

Legend: E experts, N output rows, K input columns, I intermediate size. w1 and w3 are cut along N, w2 along K; `w13` is
`[w1; w3]`, gate first, never interleaved (w3 alone where the family has no gate).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hqconv.quantization.bit_codec import bits_of, join
from hqconv.schemas.grid import TpSlice
from hqconv.schemas.weight_schema import LayerSchema, WeightSchema

Tensors = dict[str, torch.Tensor]


def gemm_tensors(
    projections: Mapping[str, Tensors], schema: LayerSchema, part: TpSlice
) -> dict[str, Tensors]:
    """Cut packed tensors [E, …] of w13 and w2 for one TP rank.

    `projections` maps w1 (optional), w3 and w2 to full-size packed tensors as `QuantizedStack.tensors`, plus `bias`
    where the family has one; `part` is the rank's part of I. The w2 bias is on TP rank 0 and zero elsewhere, since
    ranks are summed.
    """
    tp_rank, begin, end, share = part
    roles = [role for role in ("w1", "w3") if role in projections]
    upper = [_cut_rows(projections[role], begin, end) for role in roles]
    down = _cut_columns(projections["w2"], schema.of("w2"), begin, end)
    if end - begin < share:
        upper = [_pad(tensors, schema.of("w13"), 1, end - begin, share) for tensors in upper]
        down = _pad(down, schema.of("w2"), 2, end - begin, share)
    if "bias" in down and tp_rank > 0:
        down["bias"] = torch.zeros_like(down["bias"])
    return {
        "w13": _join_rows(upper),
        "w2": {name: tensor.contiguous() for name, tensor in down.items()},
    }


def _cut_rows(tensors: Tensors, begin: int, end: int) -> Tensors:
    num_rows = tensors["weight"].size(1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:  # a tensor-level scale
            return tensor
        # Rows of packed zero points and of scale blocks stand for several rows of the matrix each.
        length = tensor.size(1)
        return tensor[:, begin * length // num_rows : end * length // num_rows]

    return {name: cut(tensor) for name, tensor in tensors.items()}


def _cut_columns(tensors: Tensors, schema: WeightSchema, begin: int, end: int) -> Tensors:
    num_columns = tensors["weight"].size(2) * 32 // schema.num_bits

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_per_row = name != "weight" and schema.weight_scale_group_size == 0
        # A bias, a tensor-level or a channel-level scale or zero point.
        if tensor.ndim < 3 or is_per_row:
            return tensor
        length = tensor.size(2)
        return tensor[:, :, begin * length // num_columns : end * length // num_columns]

    return {name: cut(name, tensor) for name, tensor in tensors.items()}


def _pad(tensors: Tensors, schema: WeightSchema, axis: int, size: int, share: int) -> Tensors:
    """Fill the last rank's slice up to its share: with rows that give 0, and columns that only meet such rows.

    Zero bits do, but for e8m0 scales: their zero bits are a power of two so small that float16's range would have
    to be split for it, so those are repeated. The zero codes below them are 0 whatever the scale.
    """

    def pad(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_per_row = axis == 2 and name != "weight" and schema.weight_scale_group_size == 0
        if is_per_row or tensor.ndim <= axis:
            return tensor
        num_filled = tensor.size(axis)
        length = num_filled * share // size
        bits = bits_of(tensor)
        padded = bits.new_zeros((*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))
        padded.narrow(axis, 0, num_filled).copy_(bits)
        if tensor.dtype == torch.float8_e8m0fnu:
            rest = padded.narrow(axis, num_filled, length - num_filled)
            rest.copy_(bits.narrow(axis, num_filled - 1, 1).expand_as(rest))
        return padded.view(tensor.dtype)

    return {name: pad(name, tensor) for name, tensor in tensors.items()}


def _join_rows(upper: list[Tensors]) -> Tensors:
    """Join gate's rows and then up's. Tensor-level scales are gate's: the quantizer gave both the same."""
    return {
        name: tensor if tensor.ndim == 1 else join([tensors[name] for tensors in upper], 1)
        for name, tensor in upper[0].items()
    }
