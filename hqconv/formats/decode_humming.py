"""Decoder of Humming's own checkpoint layout: see `hqconv.formats.humming`.

Legend: N output rows, K input columns, G groups along K. Parts are one matrix's tensors by canonical name.
"""

from __future__ import annotations

from hqconv.formats.decode_floats import Names, Parts, Shape, as_e8m0, grid
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization import bit_codec
from hqconv.quantization.coded_matrix import CodedMatrix, checked, refuse
from hqconv.quantization.deferred_checks import is_any


def decode_humming(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> CodedMatrix:
    """Humming's own tensors of one matrix. Source: humming, schema/humming.py, get_tensors_attrs."""
    scale = parts["scale"]
    if fmt.scale_dtype == "float8e8m0":
        scale = as_e8m0(scale, names.get("scale", ""))
    scale = grid(scale, fmt, shape)
    coded = CodedMatrix(fmt.b_dtype, parts["weight"].contiguous(), scale, fmt.group_n, fmt.group_k)
    zero_point = None
    if fmt.has_zero_point:
        stored = parts["zero_point"].contiguous()
        is_float = bool(fmt.option("is_fp_zero_point"))
        zero_point = stored if is_float else bit_codec.unpack_along_rows(stored, coded.num_bits, shape[0])
        if is_float and is_any(~stored.isfinite()):
            refuse(
                "A zero point is NaN or infinite.",
                names.get("zero_point", ""),
                "finite zero points",
                "NaN or Inf",
            )
    scale_2 = parts["scale_2"].reshape(-1) if "scale_2" in parts else None
    return checked(
        CodedMatrix(
            fmt.b_dtype,
            coded.packed,
            scale,
            fmt.group_n,
            fmt.group_k,
            zero_point=zero_point,
            scale_2=scale_2,
        ),
        names,
    )
