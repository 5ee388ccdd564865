"""Decoders of integer formats: compressed-tensors, GPTQ, AWQ (also as auto-round writes them), BitNet.

Legend: N output rows, K input columns, G groups along K, b bits of a code. Parts are one matrix's tensors by
canonical name. Codes become offset binary, packed along K.
"""

from __future__ import annotations

import numpy as np
import torch

from hqconv.cpu_loops import decode
from hqconv.formats.decode_floats import Names, Parts, Shape, grid
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, checked, refuse
from hqconv.quantization.deferred_checks import is_any
from hqconv.quantization.int4_packing import AWQ_ORDER, reordered_nibbles, transpose_4bit


def _bits(fmt: SourceFormat) -> int:
    return int(fmt.b_dtype.removeprefix("uint"))


def decode_packed_int(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """compressed-tensors pack-quantized: int32 words along K, codes offset by 2**(b - 1), as Humming's.

    Option packing: "dense" (codes straddle words, as in compressed-tensors 0.20) or "padded" (32 // b codes to a
    word; the same where b divides 32). Zero points are packed the same way along N. Source: compressed_tensors,
    pack_quantized/helpers.py.
    """
    bits = _bits(fmt)
    packed = parts["weight"].contiguous()
    if fmt.option("packing") == "padded":
        packed = bit_codec.pack(_unpack_padded(packed, bits, shape[1]), bits)
    zero_point = None
    if fmt.has_zero_point:
        stored = parts["zero_point"]
        if fmt.option("packing") == "padded":
            zero_point = _unpack_padded(stored.t().contiguous(), bits, shape[0]).t().contiguous()
        else:
            zero_point = bit_codec.unpack_along_rows(stored, bits, shape[0])
    columns = _group_index(parts["g_idx"], parts["scale"].size(-1), names) if "g_idx" in parts else None
    scale = grid(parts["scale"], fmt, shape)
    coded = CodedMatrix(
        fmt.b_dtype, packed, scale, fmt.group_n, fmt.group_k, zero_point=zero_point, column_groups=columns
    )
    return checked(coded, names)


def _unpack_padded(packed: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """uint8 codes [R, size] of int32 words with 32 // bits codes each and the upper bits unused."""
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=packed.device)
    codes: torch.Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)[:, :size].contiguous()


def decode_int8(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """Plain int8 weights [N, K] and zero points, as compressed-tensors' int-quantized writes them.

    Ascend writes an offset per row beside its scales, float32 zeros: its W8A8_DYNAMIC kernels take none.
    """
    if "offset" in parts and is_any(parts["offset"] != 0):
        found = parts["offset"][parts["offset"] != 0].flatten()[0].item()
        refuse(
            "A symmetric matrix has an offset that is not zero.",
            names.get("offset", ""),
            "zeros, because W8A8_DYNAMIC has no offsets for weights, and other schemes' add or subtract",
            found,
            "Get a good copy of the checkpoint, or convert the original one.",
        )
    packed = bit_codec.as_words(parts["weight"].contiguous().view(torch.uint8) ^ 0x80)
    zero_point = None
    if fmt.has_zero_point:
        stored = parts["zero_point"].contiguous().view(torch.uint8) ^ 0x80
        zero_point = grid(stored, fmt, shape).expand(shape[0], -1).contiguous()
    scale = grid(parts["scale"], fmt, shape)
    return checked(
        CodedMatrix(fmt.b_dtype, packed, scale, fmt.group_n, fmt.group_k, zero_point=zero_point), names
    )


def decode_gptq(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """GPTQ: qweight int32 [K * b / 32, N] packed along K, qzeros [G, N * b / 32] along N, scales [G, N].

    Option zero_offset: 1 where zero - 1 modulo 2**b is stored ("gptq"), 0 for the zero itself ("gptq_v2").
    Option desc_act: whether g_idx may order the columns otherwise than the group size does.
    Source: gptqmodel, nn_modules/qlinear/__init__.py and utils/model.py, convert_gptq_v1_to_v2_format_module.
    """
    bits = _bits(fmt)
    packed = parts["weight"].t().contiguous()
    scale = parts["scale"].t().contiguous()
    zero = _gptq_zero(parts["zero_point"].contiguous(), bits, int(fmt.option("zero_offset", 1)))
    zero_point = _zero_or_midpoint(fmt, zero.t().contiguous(), bits, names)
    columns = None
    if "g_idx" in parts:
        columns = _columns_of(fmt, parts["g_idx"], scale.size(1), shape[1], names)
    coded = CodedMatrix(
        fmt.b_dtype, packed, scale, 1, fmt.group_k, zero_point=zero_point, column_groups=columns
    )
    return checked(coded, names)


def _gptq_zero(stored: torch.Tensor, bits: int, offset: int) -> torch.Tensor:
    """uint8 zero points [G, N]; GPTQModel took `offset` off whole int32 words, where a zero of 0 borrows."""
    if offset and 32 % bits == 0:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        return bit_codec.unpack(stored + ones, bits)  # wraps
    zero: torch.Tensor = (bit_codec.unpack(stored, bits) + offset) & (2**bits - 1)
    return zero


def _zero_or_midpoint(fmt: SourceFormat, zero: torch.Tensor, bits: int, names: Names) -> torch.Tensor | None:
    """The zero point of an asymmetric matrix; None for a symmetric one, whose zeros must be the midpoint."""
    if fmt.has_zero_point:
        return zero
    midpoint = 2 ** (bits - 1)
    is_other = zero != midpoint
    if is_any(is_other):
        refuse(
            "A symmetric matrix has zero points other than the midpoint.",
            names.get("zero_point", ""),
            f"{midpoint} everywhere, because the config says it is symmetric",
            int(zero[is_other][0]),
            "Check `sym` (`zero_point` for AWQ) and `checkpoint_format` in quantization_config.",
        )
    return None


def _columns_of(
    fmt: SourceFormat, index: torch.Tensor, num_groups: int, num_columns: int, names: Names
) -> torch.Tensor | None:
    """g_idx as int64, or None where it says what the group size says already."""
    columns = _group_index(index, num_groups, names)
    size = fmt.group_k or num_columns
    if torch.equal(columns, torch.arange(num_columns, device=columns.device) // size):
        return None
    if not fmt.option("desc_act", False):
        refuse(
            "The columns are in another order than the config says.",
            names.get("g_idx", ""),
            f"column // {size}, because desc_act is false",
            "other groups",
        )
    return columns


def _group_index(index: torch.Tensor, num_groups: int, names: Names) -> torch.Tensor:
    columns = index.long().contiguous()
    is_outside = (columns < 0) | (columns >= num_groups)
    if bool(is_outside.any()):
        refuse(
            "A column's group does not exist.",
            names.get("g_idx", ""),
            f"groups from 0 to {num_groups - 1}",
            int(columns[is_outside][0]),
        )
    return columns


def decode_awq(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """AWQ (gemm): qweight int32 [K, N / 8], qzeros [G, N / 8] with nibbles 0 2 4 6 1 3 5 7, scales [G, N].

    Source: autoawq, utils/packing_utils.py.
    """
    packed = transpose_4bit(parts["weight"], AWQ_ORDER)
    zero_point = None
    if "zero_point" in parts:
        zero = reordered_nibbles(parts["zero_point"]).t().contiguous()
        zero_point = _zero_or_midpoint(fmt, zero, 4, names)
    scale = parts["scale"].t().contiguous()
    return checked(CodedMatrix(fmt.b_dtype, packed, scale, 1, fmt.group_k, zero_point=zero_point), names)


def decode_bitnet(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """BitNet: uint8 [N / 4, K], whose bits 2i, 2i + 1 are rows i * N / 4 …, as 0, 1, 2 for -1, 0, 1.

    Option scale_inverted: BitLinear divides by weight_scale, so the scale is its float32 reciprocal;
    AutoBitLinear multiplies. Source: transformers, integrations/bitnet.py.
    """
    stored = parts["weight"].contiguous()
    num_rows, num_columns = shape
    scale = parts["scale"].float().reshape(1, 1)
    if is_any(~(scale.isfinite() & (scale > 0))):
        refuse("A scale is not usable.", names.get("scale", ""), "a positive number", scale.item())
    if fmt.option("scale_inverted", True):
        scale = scale.reciprocal()
    if stored.is_cuda:
        codes = torch.cat([(stored >> shift) & 3 for shift in (0, 2, 4, 6)])
        is_ternary = not is_any(codes == 3)
        packed = bit_codec.pack((codes >> 1) | ((codes == 0).to(torch.uint8) * 3), 2)
    else:
        out = np.empty((num_rows, num_columns // 4), np.uint8)
        is_ternary = decode.ternary_rows(stored.numpy(), out)
        packed = torch.from_numpy(out.view(np.int32))
    if not is_ternary:
        refuse("A weight is not ternary.", names.get("weight", ""), "2-bit codes 0, 1 and 2", "3")
    return checked(CodedMatrix(fmt.b_dtype, packed, scale, 0, 0), names)
