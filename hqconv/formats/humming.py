"""Humming's own checkpoint layout: the method `humming` and its encoding.

Legend: N output rows, K input columns, G groups along K.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict

from hqconv.errors import InputError, RequestError
from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    ONE,
    SCALE_DTYPES,
    Decoded,
    Encoding,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import (
    ModuleRule,
    always,
    containing,
    quant_method,
    regex_matcher,
    when,
)
from hqconv.formats.source_format import SourceFormat, per_projection
from hqconv.schemas.tensors import FLOATS, code_bits
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
    " ".join(alias for names in _NAMES.values() for alias in names)
    + " has_zero_point is_fp_zero_point hadamard_block_size"
    " a_dtype input_scale_group_size input_scale_dtype input_quant_mode input_dtype"  # quantized activations
)
_GROUP = Keys(
    "targets input_activations output_activations format",
    inside={"weights": _FORMAT | Keys("num_bits strategy symmetric type")},
)
KEYS = _FORMAT | Keys(
    "ignored_layers ignore modules_to_not_convert "
    "name format_version "  # hqconv's own
    "format quantization_status",  # GSQ's: of the checkpoint that was repacked
    inside={"w13": _FORMAT, "w2": _FORMAT},  # hqconv's own: of a layer whose GEMMs differ
    entries={"dynamic": _FORMAT | Keys("quant_method"), "config_groups": _GROUP},
)


@quant_method("humming", keys=KEYS)
def parse_humming(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse Humming's config, with exceptions as vLLM's HummingConfig reads them: "-" goes before "+".

    The exceptions name vLLM's modules, where all experts of a layer are one module, or single ones, as GSQ's converter
    writes them. GSQ's own dialect is read as it is meant: a key with "-" and a format gives that format, and the format
    of all modules may be in its group for Linear. Source: convert_to_humming.py of IST-DASLab/GSQ.
    """
    key = next(
        (key for key in ("ignored_layers", "ignore") if config.get(key)), "modules_to_not_convert"
    )
    ignored = config.names(key)
    substrings = [entry for entry in ignored if not entry.startswith("re:")]
    patterns = [entry[3:] for entry in ignored if entry.startswith("re:")]
    default = _default(config)
    usual = always(_layer_format(default))
    return [
        when(containing(substrings)),
        when(regex_matcher(patterns, config.where(key))),
        *_exceptions(config, default),
        usual,
    ]


def _default(config: ConfigReader) -> ConfigReader:
    """Return the config with the fields of the modules without an exception; GSQ's are in its group for Linear."""
    if not config.has("w13", *_NAMES["b_dtype"]):
        for _, group in config.tables("config_groups"):
            if "Linear" in group.names("targets") and group.has("weights"):
                return config.overridden(group.table("weights"))
    return config


def _exceptions(config: ConfigReader, default: ConfigReader) -> Iterator[ModuleRule]:
    """Yield the rules of `dynamic`: first what is left out, then formats, in order.

    GSQ has a key for each matrix of a model: keys of single modules are looked up by name.
    """
    single: dict[str, SourceFormat] = {}
    formats: dict[str, SourceFormat] = {}  # of the same overrides
    overriding: list[ModuleRule] = []
    for pattern, overrides in config.tables("dynamic"):
        regex = pattern[2:]
        where = config.where("dynamic")
        if pattern.startswith("-") and not overrides.has(*_NAMES["b_dtype"]):
            yield when(regex_matcher([regex], where))
        elif pattern.startswith(("+", "-")):  # vLLM skips a pattern without a sign
            key = repr(overrides.values)
            fmt = formats.get(key) or formats.setdefault(key, _overridden(default, overrides))
            name = re.sub(r"\\(.)", r"\1", regex[:-1])
            if regex == f"{re.escape(name)}$":
                single.setdefault(name, fmt)
            else:
                overriding += [single.get, when(regex_matcher([regex], where), fmt)]
                single = {}
    yield from overriding
    yield single.get


def _overridden(default: ConfigReader, overrides: ConfigReader) -> SourceFormat:
    """Return the format of an exception: a field under one of its names replaces the field under all of them."""
    for names in _NAMES.values():
        if overrides.has(*names):
            default = default.replaced(**dict.fromkeys(names))
    return _layer_format(default.overridden(overrides))


def _layer_format(config: ConfigReader) -> SourceFormat:
    if not config.has("w13"):
        return _format(config)
    w13, w2 = (_format(config.overridden(config.table(gemm))) for gemm in ("w13", "w2"))
    return per_projection({"w1": w13, "w3": w13, "w2": w2})


def _format(config: ConfigReader) -> SourceFormat:
    config.text("quant_method", ("humming",), "humming")
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
        raise InputError(
            "The quantization config describes no format of Humming's.",
            where=config.where(key),
            expected=error.expected,
            found=error.found,
        ) from error


@register_encoding
class Humming(Encoding):
    """Tensors as `HummingWeightSchema.get_tensors_attrs` gives them (humming, schema/humming.py)."""

    name = "humming"
    part_names = ("weight_scale", "weight_scale_2", "zero_point")
    byte_scale_dtype = ""

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        fmt = matrix.fmt
        n = matrix.n
        k = matrix.k
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
            packed = ((n * bits // 32, groups),)
            stored.append(StoredTensor("zero_point", ("zero_point",), ("I32",), packed))
        if fmt.scale_2 != "none":
            shapes = ONE if fmt.scale_2 == "tensor" else ((n,), (n, 1))
            stored.append(StoredTensor("scale_2", ("weight_scale_2",), FLOATS, shapes))
        return stored

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Keep the words; unpack integer zero points."""
        from hqconv.quantization import bit_codec

        zero_point = None
        if matrix.fmt.has_zero_point:
            zero_point = matrix["zero_point"].contiguous()
            if matrix.fmt.option("is_fp_zero_point"):
                what = "A zero point is NaN or infinite."
                expected = "finite zero points"
                matrix.refuse_where(~zero_point.isfinite(), "zero_point", what, expected)
            else:
                bits = code_bits(matrix.fmt.b_dtype)
                zero_point = bit_codec.unpack_along_rows(zero_point, bits, matrix.shape[0])
        scale_2 = matrix["scale_2"].reshape(-1) if "scale_2" in matrix else None
        return matrix.coded(
            matrix["weight"].contiguous(), matrix.scale(), zero_point=zero_point, scale_2=scale_2
        )
