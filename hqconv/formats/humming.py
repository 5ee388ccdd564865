"""Humming's own checkpoint layout: the method `humming` and its encoding.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict

from hqconv.errors import InputError, RequestError
from hqconv.formats.config_reader import ConfigReader, Keys, Text
from hqconv.formats.encoding import (
    ONE,
    SCALE_DTYPES,
    Decoded,
    Encoding,
    Headers,
    MatrixHeaders,
    Shape,
    StoredMatrix,
    StoredTensor,
    register_encoding,
    shape_of_words,
)
from hqconv.formats.linear_regex import LinearRegex
from hqconv.formats.module_rules import Rule, always, containing, when
from hqconv.formats.quant_config import quant_method
from hqconv.formats.source_format import SourceFormat, per_projection
from hqconv.schemas.dtypes import FLOATS, code_bits
from hqconv.schemas.tensors import TensorSpec
from hqconv.schemas.weight_schema import WeightSchema

# Names of a field, the first that is present counts. Source: HummingWeightSchema.KWARGS_ALIAS.
_NAMES = {
    "b_dtype": ("b_dtype", "weight_dtype", "dtype"),
    "bs_dtype": ("bs_dtype", "weight_scale_dtype", "scale_dtype"),
    "weight_scale_type": ("weight_scale_type", "scale_type"),
    "weight_scale_2_type": ("weight_scale_2_type", "scale_2_type"),
    "weight_scale_group_size": ("weight_scale_group_size", "group_size"),
    "weight_scale_group_size_n": ("weight_scale_group_size_n", "group_size_n"),
}


_FORMAT = Keys(
    " ".join([*(alias for names in _NAMES.values() for alias in names)])
    + " has_zero_point is_fp_zero_point hadamard_block_size",
    "a_dtype input_scale_group_size input_scale_dtype input_quant_mode input_dtype",  # quantized activations
)
KEYS = _FORMAT | Keys(
    "ignored_layers ignore modules_to_not_convert",
    "name format_version",  # hqconv's own
    inside={"w13": _FORMAT, "w2": _FORMAT},  # hqconv's own: of a layer whose GEMMs differ
    entries={"dynamic": _FORMAT},
)


@quant_method("humming", keys=KEYS)
def parse_humming(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse Humming's config, with exceptions as vLLM's HummingConfig reads them: "-" goes before "+".

    The exceptions name vLLM's modules, where all experts of a layer are one module.
    """
    keys = ("ignored_layers", "ignore", "modules_to_not_convert")
    key = next((key for key in keys if config.values.get(key)), keys[0])
    ignored = config.names(key)
    plain = [name for name in ignored if not name.startswith("re:")]
    patterns = [name for name in ignored if name.startswith("re:")]
    left_out, overriding = [], []
    for pattern, overrides in config.tables("dynamic"):
        # vLLM skips a pattern without a sign.
        matches = LinearRegex(pattern[2:], config.where("dynamic")).matches
        if pattern.startswith("-"):
            left_out.append(when(matches))
        elif pattern.startswith("+"):
            overriding.append(when(matches, _layer_format(config.overridden(overrides))))
    return [
        when(containing(plain)),
        *(when(LinearRegex(pattern[3:], config.where(key)).matches) for pattern in patterns),
        *left_out,
        *overriding,
        always(_layer_format(config)),
    ]


def _layer_format(config: ConfigReader) -> SourceFormat:
    if not config.has("w13"):
        return _format(config)
    w13, w2 = (_format(config.overridden(config.table(gemm))) for gemm in ("w13", "w2"))
    return per_projection({"w1": w13, "w3": w13, "w2": w2})


def _format(config: ConfigReader) -> SourceFormat:
    if config.text("quant_method", default="humming") != "humming":
        raise config.unsupported("quant_method", "humming")
    if config.integer("hadamard_block_size", -1, default=0) not in (0, 1):
        raise config.unsupported("hadamard_block_size", "0: weights that are not rotated")
    schema = _schema(config)
    rows, columns = schema.scale_group()
    is_shared = schema.weight_scale_type in ("block", "tensor")
    return SourceFormat(
        f"humming {schema.b_dtype}",
        "humming",
        schema.b_dtype,
        schema.scale_dtype("") if is_shared else schema.bs_dtype or "",
        rows,
        columns,
        schema.has_zero_point,
        schema.weight_scale_2_type,
        options=tuple((name, value) for name, value in asdict(schema).items() if name != "name"),
    )


def _schema(config: ConfigReader) -> WeightSchema:
    """Return the schema that the config describes. Raises InputError if Humming cannot represent it."""
    keys = {field: config.first(*names) for field, names in _NAMES.items()}
    size = config.integer(keys["weight_scale_group_size"], 0, default=0)
    size_n = config.integer(keys["weight_scale_group_size_n"], 0, default=0)
    implied = "block" if size_n > 1 else "group" if size else "channel"
    kind = config.text(keys["weight_scale_type"], ("group", "channel", "block", "tensor"), implied)
    scale = config.text(keys["bs_dtype"], default="")
    try:
        return WeightSchema(
            name="humming",
            b_dtype=re.sub(r"^int", "uint", config.text(keys["b_dtype"])),
            bs_dtype=scale or None,
            weight_scale_type=kind,
            weight_scale_group_size=size,
            weight_scale_group_size_n=0 if size_n == 1 else size_n,
            weight_scale_2_type=config.text(keys["weight_scale_2_type"], default="none"),
            has_zero_point=config.flag("has_zero_point", False),
            is_fp_zero_point=config.flag("is_fp_zero_point", False),
        )
    except RequestError as error:
        key = keys.get(error.where, error.where)
        what = "The quantization config describes no format of Humming's."
        raise InputError(what, where=config.where(key), expected=error.expected, found=error.found) from error


@register_encoding
class Humming(Encoding):
    """Tensors as `HummingWeightSchema.get_tensors_attrs` gives them (humming, schema/humming.py)."""

    name = "humming"
    bias_before = ("zero_point", "scale_2")
    part_names = ("weight_scale", "weight_scale_2", "zero_point")
    byte_scale_dtype = ""

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt, n, k = matrix.fmt, matrix.n, matrix.k
        bits = code_bits(fmt.b_dtype)
        matrix.require_multiples(32)
        dtypes = SCALE_DTYPES.get(fmt.scale_dtype, FLOATS)
        stored = [
            StoredTensor("weight", ("weight",), ("I32",), ((n, k * bits // 32),)),
            StoredTensor("scale", ("weight_scale",), dtypes, matrix.scale_shapes),
        ]
        groups = k // fmt.group_k if fmt.group_k else 1
        if fmt.has_zero_point and fmt.option("is_fp_zero_point"):
            stored.append(StoredTensor("zero_point", ("zero_point",), FLOATS, ((n, groups),)))
        elif fmt.has_zero_point:
            matrix.require_multiples(32, 32 // math.gcd(bits, 32))
            stored.append(StoredTensor("zero_point", ("zero_point",), ("I32",), ((n * bits // 32, groups),)))
        if fmt.scale_2 != "none":
            shapes = ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
            stored.append(StoredTensor("scale_2", ("weight_scale_2",), FLOATS, shapes))
        return stored

    def logical_shape(self, fmt: SourceFormat, headers: Headers, weight: TensorSpec) -> Shape | None:
        """Return (N, K) of words along K."""
        return shape_of_words(fmt, *weight.shape)

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the words; unpack integer zero points."""
        from hqconv.quantization import bit_codec
        from hqconv.quantization.value_checks import is_any

        zero_point = None
        if matrix.fmt.has_zero_point:
            zero_point = matrix["zero_point"].contiguous()
            if not matrix.fmt.option("is_fp_zero_point"):
                zero_point = bit_codec.unpack_along_rows(zero_point, code_bits(matrix.fmt.b_dtype), matrix.shape[0])
            elif is_any(~zero_point.isfinite()):
                matrix.refuse("zero_point", "A zero point is NaN or infinite.", "finite zero points", "NaN or Inf")
        scale_2 = matrix["scale_2"].reshape(-1) if "scale_2" in matrix else None
        return matrix.coded(matrix["weight"].contiguous(), matrix.scale(), zero_point=zero_point, scale_2=scale_2)
