"""Humming's own checkpoint layout: the method `humming` and its encoding.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from hqconv.errors import InputError, RequestError, first_few
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
from hqconv.schemas.engine import ENGINE
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
_OVERRIDES = _FORMAT | Keys("quant_method")
_GROUP = Keys(
    "targets",
    "input_activations output_activations format",
    inside={"weights": _FORMAT | Keys(unused="num_bits strategy symmetric type")},
)
KEYS = _FORMAT | Keys(
    "ignored_layers ignore modules_to_not_convert",
    "name format_version "  # hqconv's own
    "format quantization_status",  # GSQ's: of the checkpoint that was repacked
    inside={"w13": _FORMAT, "w2": _FORMAT},  # hqconv's own: of a layer whose GEMMs differ
    entries={"dynamic": _OVERRIDES, "config_groups": _GROUP},
)
_IGNORE = ("ignored_layers", "ignore", "modules_to_not_convert")


def _doubts(config: ConfigReader) -> Iterator[str]:
    """Yield what the engine as it is reads otherwise than hqconv, which goes by what the converter of GSQ means.

    Source: convert_to_humming.py of IST-DASLab/GSQ. Up to its newest commit it gives formats under "-:", and writes
    b_dtype into config_groups alone; forks write "+:" and a flat b_dtype, and take "re:" away from `ignore`.
    """
    stock, dynamic = f"stock {ENGINE.release}", config.where("dynamic")
    remedy = "hqconv reads it as it is meant: serve what it converts."
    if not config.has("w13", *_NAMES["b_dtype"]):
        yield f"{config.path} has no flat b_dtype: {stock} does not start. {remedy}"
    exceptions = list(_exceptions(config))
    if left_out := [
        one.pattern for one in exceptions if one.fmt is not None and one.pattern.startswith("-")
    ]:
        yield f"{dynamic} has formats under '-', which {stock} leaves out: {first_few(left_out)}. {remedy}"
    default = _layer_format(_default(config))
    if single := [one.pattern for one in exceptions if one.name and one.fmt not in (None, default)]:
        yield (
            f"{dynamic} has formats of single modules, where {stock} gives all experts of a layer one: "
            f"{first_few(single)}. {remedy}"
        )
    if patterns := [name for name in _ignored(config)[0] if ".*" in name]:
        yield (
            f"{config.where(config.first(*_IGNORE))} has patterns without 're:', which {stock} takes for parts "
            f"of names: {first_few(patterns)}. {remedy}"
        )


@quant_method("humming", keys=KEYS, doubts=_doubts)
def parse_humming(config: ConfigReader, _text: Text) -> list[Rule]:
    """Parse Humming's config, with exceptions as vLLM's HummingConfig reads them: "-" goes before "+".

    The exceptions name vLLM's modules, where all experts of a layer are one module, or single ones, as GSQ's converter
    writes them. A key with "-" and a format gives that format: see `_doubts`.
    """
    plain, patterns = _ignored(config)
    left_out: list[Rule] = []
    overriding: list[Rule | dict[str, SourceFormat]] = []
    for one in _exceptions(config):
        # vLLM skips a pattern without a sign.
        if one.fmt is not None and one.name:
            if not overriding or not isinstance(overriding[-1], dict):
                overriding.append({})
            overriding[-1].setdefault(one.name, one.fmt)  # type: ignore[union-attr]
            continue
        matches = LinearRegex(one.pattern[2:], config.where("dynamic")).matches
        if one.fmt is not None:
            overriding.append(when(matches, one.fmt))
        elif one.pattern.startswith("-"):
            left_out.append(when(matches))
    return [
        when(containing(plain)),
        *(
            when(LinearRegex(pattern, config.where(config.first(*_IGNORE))).matches)
            for pattern in patterns
        ),
        *left_out,
        *(one.get if isinstance(one, dict) else one for one in overriding),
        always(_layer_format(_default(config))),
    ]


def _ignored(config: ConfigReader) -> tuple[list[str], list[str]]:
    """Return the parts of names, and the patterns, of the first list that is not empty."""
    names = config.names(next((key for key in _IGNORE if config.values.get(key)), _IGNORE[0]))
    return [name for name in names if not name.startswith("re:")], [
        name[3:] for name in names if name.startswith("re:")
    ]


def _default(config: ConfigReader) -> ConfigReader:
    """Return the config with the fields of the modules without an exception; GSQ's are in its group for Linear."""
    if not config.has("w13", *_NAMES["b_dtype"]):
        for _, group in config.tables("config_groups"):
            if "Linear" in group.names("targets") and group.has("weights"):
                return config.overridden(group.table("weights"))
    return config


@dataclass(frozen=True)
class _Exception:
    """A key of `dynamic`. name: the only module that it matches, "" for any other pattern. fmt: None without one."""

    pattern: str
    name: str
    fmt: SourceFormat | None


def _exceptions(config: ConfigReader) -> Iterator[_Exception]:
    """Yield the keys of `dynamic`, in order; GSQ has one for each matrix of a model."""
    known: dict[str, SourceFormat] = {}
    default = _default(config)
    for pattern, overrides in config.tables("dynamic"):
        name = re.sub(r"\\(.)", r"\1", pattern[2:-1])
        is_single = pattern.endswith("$") and re.escape(name) == pattern[2:-1]
        fmt = None
        if pattern.startswith("+") or (
            pattern.startswith("-") and overrides.has(*_NAMES["b_dtype"])
        ):
            key = repr(overrides.values)
            if key not in known:
                # A field under one of its names replaces the field under all of them.
                replaced = {
                    alias for names in _NAMES.values() if overrides.has(*names) for alias in names
                }
                known[key] = _layer_format(
                    default.replaced(**dict.fromkeys(replaced)).overridden(overrides)
                )
            fmt = known[key]
        yield _Exception(pattern, name if is_single else "", fmt)


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
        raise InputError(
            what, where=config.where(key), expected=error.expected, found=error.found
        ) from error


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
            stored.append(
                StoredTensor("zero_point", ("zero_point",), ("I32",), ((n * bits // 32, groups),))
            )
        if fmt.scale_2 != "none":
            shapes = ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
            stored.append(StoredTensor("scale_2", ("weight_scale_2",), FLOATS, shapes))
        return stored

    def logical_shape(
        self, fmt: SourceFormat, headers: Headers, weight: TensorSpec
    ) -> Shape | None:
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
                zero_point = bit_codec.unpack_along_rows(
                    zero_point, code_bits(matrix.fmt.b_dtype), matrix.shape[0]
                )
            elif is_any(~zero_point.isfinite()):
                matrix.refuse(
                    "zero_point",
                    "A zero point is NaN or infinite.",
                    "finite zero points",
                    "NaN or Inf",
                )
        scale_2 = matrix["scale_2"].reshape(-1) if "scale_2" in matrix else None
        return matrix.coded(
            matrix["weight"].contiguous(), matrix.scale(), zero_point=zero_point, scale_2=scale_2
        )
