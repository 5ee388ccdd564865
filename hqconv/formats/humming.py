"""Humming's own checkpoint layout: what its config declares, and what it stores for one projection.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

from hqconv.errors import InputError, RequestError
from hqconv.formats.config_reader import (
    ConfigReader,
    Rule,
    Text,
    always,
    beginning_with,
    containing,
    regex,
    when,
)
from hqconv.formats.source_format import SourceFormat
from hqconv.formats.stored_tensors import (
    ONE,
    SCALE_CODES,
    StoredTensor,
    bias_need,
    grid_shapes,
    require_multiples,
)
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


def humming(words: ConfigReader, _text: Text) -> list[Rule]:
    """Humming's checkpoint layout. Exceptions as vLLM's HummingConfig reads them: "-" goes before "+".

    They speak of vLLM's modules, where all experts of a block are one: the module to ask for is the block.
    """
    keys = ("ignored_layers", "ignore", "modules_to_not_convert")
    key = next((key for key in keys if words.values.get(key)), keys[0])
    ignored = words.names(key)
    plain = [name for name in ignored if not name.startswith("re:")]
    patterns = [name for name in ignored if name.startswith("re:")]
    left_out, overriding = [], []
    for pattern, overrides in words.tables("dynamic"):
        # Without a sign vLLM passes over a pattern.
        search = beginning_with(regex(pattern[2:], words.where("dynamic")))
        if pattern.startswith("-"):
            left_out.append(when(search))
        elif pattern.startswith("+"):
            overriding.append(when(search, _format(words.overridden(overrides))))
    return [
        when(containing(plain)),
        *(when(beginning_with(regex(pattern[3:], words.where(key)))) for pattern in patterns),
        *left_out,
        *overriding,
        always(_format(words)),
    ]


def _format(words: ConfigReader) -> SourceFormat:
    if words.text("quant_method", default="humming") != "humming":
        raise words.unsupported("quant_method", "humming")
    if words.integer("hadamard_block_size", -1, default=0) not in (0, 1):
        raise words.unsupported("hadamard_block_size", "0: weights that are not rotated")
    schema = _schema(words)
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


def _schema(words: ConfigReader) -> WeightSchema:
    """The schema that the words describe. Raises InputError where Humming could not hold it."""
    keys = {field: words.first(*names) for field, names in _NAMES.items()}
    size = words.integer(keys["weight_scale_group_size"], 0, default=0)
    size_n = words.integer(keys["weight_scale_group_size_n"], 0, default=0)
    implied = "block" if size_n > 1 else "group" if size else "channel"
    kind = words.text(keys["weight_scale_type"], ("group", "channel", "block", "tensor"), implied)
    scale = words.text(keys["bs_dtype"], default="")
    try:
        return WeightSchema(
            name="humming",
            b_dtype=re.sub(r"^int", "uint", words.text(keys["b_dtype"])),
            bs_dtype=scale or None,
            weight_scale_type=kind,
            weight_scale_group_size=size,
            weight_scale_group_size_n=0 if size_n == 1 else size_n,
            weight_scale_2_type=words.text(keys["weight_scale_2_type"], default="none"),
            has_zero_point=words.flag("has_zero_point", False),
            is_fp_zero_point=words.flag("is_fp_zero_point", False),
        )
    except RequestError as error:
        key = keys.get(error.where, error.where)
        what = "The quantization config describes no format of Humming's."
        raise InputError(what, where=words.where(key), expected=error.expected, found=error.found) from error


def humming_needs(fmt: SourceFormat, parts: Mapping[str, TensorSpec], n: int, k: int) -> list[StoredTensor]:
    """The tensors of one matrix, as `HummingWeightSchema.get_tensors_attrs` gives them."""
    bits = code_bits(fmt.b_dtype)
    require_multiples(parts, [("columns", k, 32)])
    codes = SCALE_CODES.get(fmt.scale_dtype, FLOATS)
    needs = [
        StoredTensor("weight", ("weight",), ("I32",), ((n, k * bits // 32),)),
        StoredTensor("scale", ("weight_scale",), codes, grid_shapes(n, k, fmt.group_n, fmt.group_k)),
        bias_need(n),
    ]
    groups = k // fmt.group_k if fmt.group_k else 1
    if fmt.has_zero_point and fmt.option("is_fp_zero_point"):
        needs.append(StoredTensor("zero_point", ("zero_point",), FLOATS, ((n, groups),)))
    elif fmt.has_zero_point:
        require_multiples(parts, [("rows", n * bits, 32)])
        needs.append(StoredTensor("zero_point", ("zero_point",), ("I32",), ((n * bits // 32, groups),)))
    if fmt.scale_2 != "none":
        shapes = ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
        needs.append(StoredTensor("scale_2", ("weight_scale_2",), FLOATS, shapes))
    return needs
