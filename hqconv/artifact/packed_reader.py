"""Whole expert matrices from Humming's packed tensors: of the checkpoint layout, and of what the quantizer makes.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hqconv.artifact.expert_reader import Array, ExpertMatrix, Note, note_error
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.layout_decoder.numbers import to_float32
from hqconv.layout_decoder.packed import packed_shapes, unpack_codes
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.weight_schema import WeightSchema


def read_packed_expert(
    artifact: Artifact, block: MoeLayer, role: str, expert: int, shards: Mapping[str, str], note: Note
) -> ExpertMatrix | None:
    """One projection from the checkpoint layout; `shards` is tensor name → file. None where it cannot be read."""
    base = block.module(expert, role) + "."
    shape, schema = (block.hidden_size, block.intermediate_size), artifact.schema_of(block.name)
    try:
        dtypes, bits = artifact.read_module(base, shards)
    except (HqconvError, OSError) as error:
        note_error(f"tensors {base}*", error, note)
        return None
    expected = packed_shapes(shape if role == "w2" else shape[::-1], schema, artifact.param_dtype)
    found = {name: (dtypes[name], array.shape) for name, array in bits.items() if name != "bias"}
    if found != expected:
        where = f"{shards.get(base + 'weight', 'no file')}, tensors {base}*"
        note(where, "Packed tensors are not those of the manifest's schema.", expected, found)
        return None
    return unpack(bits, schema, dtypes["weight_scale"])


def unpack(bits: Mapping[str, Array], schema: WeightSchema, scale_dtype: str) -> ExpertMatrix:
    """A matrix from Humming's packed tensors as raw bits; shares no code with the packer."""
    zero, scale = bits.get("zero_point"), np.atleast_2d(bits["weight_scale"])
    if zero is not None and not schema.is_fp_zero_point:
        zero = np.ascontiguousarray(unpack_codes(np.ascontiguousarray(zero.T), schema.num_bits).T)
    return ExpertMatrix(
        codes=unpack_codes(bits["weight"], schema.num_bits),
        scale=scale,
        scale_dtype=scale_dtype,
        scale_value=to_float32(scale, scale_dtype),
        zero_point=zero,
        scale_2=bits.get("weight_scale_2"),
        bias=bits.get("bias"),
    )
