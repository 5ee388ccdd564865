"""Whole expert matrices from Humming's packed tensors: of the checkpoint layout, and of what the quantizer makes.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hqconv.artifact.matrix import Array, Matrix, Note
from hqconv.artifact.opened import Artifact
from hqconv.artifact.ranks import note_error
from hqconv.artifact.unlayout.form import to_float32
from hqconv.errors import HqconvError
from hqconv.experts.block import ExpertBlock
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.target import TargetSchema


def read_packed_expert(
    artifact: Artifact, block: ExpertBlock, role: str, expert: int, shards: Mapping[str, str], note: Note
) -> Matrix | None:
    """One projection from the checkpoint layout; `shards` is tensor name → file. None where it cannot be read."""
    base = block.module(expert, role) + "."
    shape = (block.hidden_size, block.intermediate_size)
    try:
        dtypes, bits = artifact.read_module(base, shards)
    except (HqconvError, OSError) as error:
        note_error(f"tensors {base}*", error, note)
        return None
    expected = packed_shapes(shape if role == "w2" else shape[::-1], artifact.schema, artifact.param_dtype)
    found = {name: (dtypes[name], array.shape) for name, array in bits.items() if name != "bias"}
    if found != expected:
        where = f"{shards.get(base + 'weight', 'no file')}, tensors {base}*"
        note(where, "Packed tensors are not those of the manifest's schema.", expected, found)
        return None
    return unpack(bits, artifact.schema, dtypes["weight_scale"])


def packed_shapes(
    shape: tuple[int, int], schema: TargetSchema, param_dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of one matrix's packed tensors, worked out from the schema alone."""
    (n, k), param = shape, code_of(param_dtype)
    group = schema.weight_scale_group_size or k
    rows = n // (schema.weight_scale_group_size_n or 1)
    dtype = code_of(schema.scale_dtype(param_dtype))
    scale: tuple[int, ...] = (1,) if schema.weight_scale_type == "tensor" else (rows, k // group)
    shapes = {"weight": ("I32", (n, k * schema.num_bits // 32)), "weight_scale": (dtype, scale)}
    if schema.has_zero_point:
        is_float = schema.is_fp_zero_point
        packed_rows = n if is_float else n * schema.num_bits // 32
        shapes["zero_point"] = (param if is_float else "I32", (packed_rows, k // group))
    if schema.weight_scale_2_type == "tensor":
        shapes["weight_scale_2"] = ("F32", (1,))
    elif schema.weight_scale_2_type == "channel":
        shapes["weight_scale_2"] = (param, (n,))
    return shapes


def unpack(bits: Mapping[str, Array], schema: TargetSchema, scale_dtype: str) -> Matrix:
    """A matrix from Humming's packed tensors as raw bits; shares no code with the packer."""
    zero, scale = bits.get("zero_point"), np.atleast_2d(bits["weight_scale"])
    if zero is not None and not schema.is_fp_zero_point:
        zero = np.ascontiguousarray(unpack_codes(np.ascontiguousarray(zero.T), schema.num_bits).T)
    return Matrix(
        codes=unpack_codes(bits["weight"], schema.num_bits),
        scale=scale,
        scale_dtype=scale_dtype,
        scale_value=to_float32(scale, scale_dtype),
        zero_point=zero,
        scale_2=bits.get("weight_scale_2"),
        bias=bits.get("bias"),
    )


def unpack_codes(words: Array, num_bits: int) -> Array:
    """Little-endian bit fields of each row of uint32 words [N, W] as uint8 [N, 32 W / num_bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    num_rows = data.shape[0]
    if num_bits in (1, 2, 4, 8):
        codes = np.empty((num_rows, data.shape[1], 8 // num_bits), np.uint8)
        for i in range(8 // num_bits):
            codes[:, :, i] = (data >> np.uint8(i * num_bits)) & np.uint8((1 << num_bits) - 1)
        return codes.reshape(num_rows, -1)
    # Eight codes fill num_bits whole bytes.
    runs = data.reshape(num_rows, -1, num_bits)
    codes = np.empty((num_rows, runs.shape[1], 8), np.uint8)
    for row in range(num_rows):  # by rows: the 64-bit words stay in the cache
        word = np.zeros(runs.shape[1], np.uint64)
        for i in range(num_bits):
            word |= runs[row, :, i].astype(np.uint64) << np.uint64(8 * i)
        for i in range(8):
            codes[row, :, i] = (word >> np.uint64(i * num_bits)) & np.uint64((1 << num_bits) - 1)
    return codes.reshape(num_rows, -1)
