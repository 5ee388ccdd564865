"""Target schemas: formats of the converted expert weights. Data and rules with Humming's names; no tensors.

A schema is named by a preset (`mxfp4`), by a shorthand (`int4-g64-zp`; with 8-bit scales `int4-g32-e4m3`), or by a
TOML file whose keys are the fields of Humming's `HummingWeightSchema`. `-h64` after a name rotates the weights in
blocks of 64 columns. Two names with a `+` between them are of a layer whose GEMMs differ: `int3-g64+int4-g32-e4m3`, w13
first.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hqconv.errors import RequestError, close_to
from hqconv.schemas.tensors import CodeType, code_bits, code_of, num_bits, parse_code_type
from hqconv.schemas.untrusted_files import SCHEMAS, or_shipped, read_toml, shipped, unicode_name

ParamDtype = Literal["bfloat16", "float16"]
PARAM_DTYPES: tuple[ParamDtype, ...] = get_args(ParamDtype)
# Of scales per group or channel; those of blocks and tensors are float32.
_SCALE_DTYPES = ("bfloat16", "float16", "float8e8m0", "float8e4m3", "float8e5m2", "float8e5m3")
# Group scales → second scales above them. A tensor's second scale of powers of two would only move their exponents.
_SCALE_2_TYPES = {
    "float8e4m3": ("tensor", "channel"),
    "float8e5m2": ("tensor", "channel"),
    "float8e8m0": ("channel",),
}
# Humming's kernel rotates blocks of 2 to 512 columns (process_input/context.cuh), but below 16 its tuner finds no way
# to quantize wide inputs per token (tune/process_input.py, _token_tuning_candidates).
ROTATIONS = (16, 32, 64, 128, 256, 512)
_CODE_TYPES = "uintN (N = 1..8), or a signed floatXeYmZ of at most 8 bits: Y is 0 or 2 to 4, or it is float8e5m2"
_SCALE_TYPES = "group|channel|block|tensor"
_NESTING = "a power of two, at least 16: Humming's tiles do not nest with others (docs/targets.md)"


@dataclass(frozen=True)
class WeightSchema:
    """One target format. Field names and meanings are Humming's; `name` is its common name."""

    name: str
    b_dtype: str
    bs_dtype: str | None = None
    weight_scale_type: str = "group"
    weight_scale_group_size: int = 0
    weight_scale_group_size_n: int = 0
    weight_scale_2_type: str = "none"
    has_zero_point: bool = False
    is_fp_zero_point: bool = False
    hadamard_block_size: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_bits(self) -> int:
        """Bits of one weight code."""
        return code_bits(self.b_dtype)

    @property
    def code_type(self) -> CodeType:
        """Type of the codes."""
        return parse_code_type(self.b_dtype, has_zero_point=self.has_zero_point)

    @property
    def is_integer(self) -> bool:
        return self.b_dtype.startswith("uint")

    @property
    def is_coupled(self) -> bool:
        """True if the gate and up projection of one expert share a tensor-level scale."""
        return "tensor" in (self.weight_scale_type, self.weight_scale_2_type)

    @property
    def has_row_scale(self) -> bool:
        """True if each row has a second scale, in the parameter dtype."""
        return self.weight_scale_2_type == "channel"

    @property
    def rotation(self) -> int:
        """Columns of a rotated block; 0 for weights without rotation. See `hqconv.quantization.quantized.rotate`."""
        return self.hadamard_block_size if self.hadamard_block_size > 1 else 0

    def humming_fields(self) -> dict[str, Any]:
        """Return the schema as keyword arguments of `HummingWeightSchema`, also the record in config.json."""
        document = asdict(self)
        del document["name"]
        return document

    to_dict = humming_fields  # as in a manifest

    def of(self, _part: str) -> WeightSchema:
        """Return the schema of a GEMM or projection of a layer: see `SchemaPair`."""
        return self

    @property
    def each(self) -> tuple[WeightSchema, ...]:
        """The distinct schemas of a layer's GEMMs: this one."""
        return (self,)

    def describe(self) -> str:
        """Format one line for people."""
        size = {
            "group": f"group {self.weight_scale_group_size}",
            "block": f"block {self.weight_scale_group_size_n}x{self.weight_scale_group_size}",
        }.get(self.weight_scale_type, self.weight_scale_type)
        facts = [self.b_dtype, f"{self.scale_dtype('parameter-dtype')} scale per {size}"]
        if self.weight_scale_2_type != "none":
            facts.append(f"second scale per {self.weight_scale_2_type}")
        if self.has_zero_point:
            facts.append("float zero point" if self.is_fp_zero_point else "integer zero point")
        if self.rotation:
            facts.append(f"columns rotated in blocks of {self.rotation}")
        return ", ".join(facts)

    def bits_per_weight(self) -> float:
        """Stored bits per weight, padding and tensor-level scales left out (channel scales count as none)."""
        if self.weight_scale_type not in ("group", "block"):
            return float(self.num_bits)
        scale_bits = num_bits(code_of(self.scale_dtype("float16")))
        zero_bits = 0
        if self.has_zero_point:
            zero_bits = 16 if self.is_fp_zero_point else self.num_bits
        rows, columns = self.scale_group()
        return self.num_bits + (scale_bits + zero_bits) / (rows * columns)

    def scale_group(self) -> tuple[int, int]:
        """Rows and columns that one scale serves; 0 means all of them."""
        return {
            "group": (1, self.weight_scale_group_size),
            "channel": (1, 0),
            "block": (self.weight_scale_group_size_n, self.weight_scale_group_size),
            "tensor": (0, 0),
        }[self.weight_scale_type]

    def scale_dtype(self, param_dtype: str) -> str:
        """Return Humming's name of the dtype that scales are stored in."""
        if self.weight_scale_type in ("block", "tensor"):
            return "float32"
        return self.bs_dtype or param_dtype


@dataclass(frozen=True)
class SchemaPair:
    """Schemas of a layer whose two GEMMs differ: of w13 (gate and up), and of w2 (down). Made by `pair`."""

    w13: WeightSchema
    w2: WeightSchema

    @property
    def name(self) -> str:
        """Both names: the value of `--schema`."""
        return f"{self.w13.name}{_BETWEEN}{self.w2.name}"

    @property
    def each(self) -> tuple[WeightSchema, ...]:
        """The two schemas."""
        return (self.w13, self.w2)

    def of(self, part: str) -> WeightSchema:
        """Return the schema of a GEMM (w13, w2) or of a projection (w1, w3, w2)."""
        return self.w2 if part == "w2" else self.w13

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as in a manifest: GEMM → fields."""
        return {"w13": self.w13.humming_fields(), "w2": self.w2.humming_fields()}

    def describe(self) -> str:
        """Format one line for people."""
        return f"w13: {self.w13.describe()}; w2: {self.w2.describe()}"

    def bits_per_weight(self) -> float:
        """Stored bits per weight of a layer with a gate, as `WeightSchema.bits_per_weight`: w13 is two thirds of it."""
        return (2 * self.w13.bits_per_weight() + self.w2.bits_per_weight()) / 3


LayerSchema = WeightSchema | SchemaPair  # the pair only where the GEMMs differ
_BETWEEN = "+"


def pair(w13: WeightSchema, w2: WeightSchema) -> LayerSchema:
    """Return the schema of a layer by those of its GEMMs: one schema where both are equal."""
    return w13 if w13.humming_fields() == w2.humming_fields() else SchemaPair(w13, w2)


def layer_schema_of_record(name: str, document: dict[str, Any]) -> LayerSchema:
    """Return the schema that a manifest records: the inverse of `to_dict`.

    Raises RequestError or TypeError for fields that are none of a schema's, and for a pair of equal schemas.
    """
    if document.keys() != {"w13", "w2"}:
        return WeightSchema(name=name, **document)
    first, _, second = name.partition(_BETWEEN)
    found = pair(
        WeightSchema(name=first, **document["w13"]), WeightSchema(name=second, **document["w2"])
    )
    if not isinstance(found, SchemaPair):
        raise RequestError(
            "A pair has two equal schemas.", where="w2", expected="another schema than that of w13"
        )
    return found


_TYPES: dict[str, type] = {
    "weight_scale_group_size": int,
    "weight_scale_group_size_n": int,
    "has_zero_point": bool,
    "is_fp_zero_point": bool,
    "hadamard_block_size": int,
}  # the others are text


def _check(schema: WeightSchema) -> None:
    """Refuse fields that Humming or its quantizer cannot represent, before they fail on bare asserts."""

    def need(condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise RequestError(
                f"The schema '{schema.name}' cannot be built.",
                where=field,
                expected=expected,
                found=repr(getattr(schema, field)),
                remedy="See `hqconv schemas` for presets and shorthands.",
            )

    for field in fields(schema):
        value = getattr(schema, field.name)
        expected_type = _TYPES.get(field.name, str)
        is_none = field.name == "bs_dtype" and value is None
        need(type(value) is expected_type or is_none, field.name, expected_type.__name__)
    need(_is_code_type(schema.b_dtype), "b_dtype", _CODE_TYPES)
    kind = schema.weight_scale_type
    second = schema.weight_scale_2_type
    size = schema.weight_scale_group_size
    size_n = schema.weight_scale_group_size_n
    need(kind in ("group", "channel", "block", "tensor"), "weight_scale_type", _SCALE_TYPES)
    is_size = _is_power_of_two(size, 16) if kind in ("group", "block") else size == 0
    need(is_size, "weight_scale_group_size", f"0 for channel and tensor scales, else {_NESTING}")
    is_size_n = _is_power_of_two(size_n, 64) if kind == "block" else size_n == 0
    expected = "a power of two, at least 64, for block scales, else 0"
    need(is_size_n, "weight_scale_group_size_n", expected)
    expected = "a float type for block scales: that integers run is not proven"
    need(kind != "block" or not schema.is_integer, "b_dtype", expected)
    need(second in ("none", "tensor", "channel"), "weight_scale_2_type", "none|tensor|channel")
    need(second == "none" or kind == "group", "weight_scale_type", "group, under a second scale")
    if schema.has_zero_point:
        need(schema.is_integer, "has_zero_point", "false for a float type")
        is_usual = kind in ("group", "channel")
        need(is_usual, "weight_scale_type", "group or channel, with zero points")
    needs_zero = schema.is_fp_zero_point and not schema.has_zero_point
    need(not needs_zero, "is_fp_zero_point", "has_zero_point = true as well")
    allowed = _scale_dtypes(schema)
    is_allowed = schema.bs_dtype in allowed or (schema.bs_dtype is None and second == "none")
    need(is_allowed, "bs_dtype", f"one of {', '.join(allowed)}, for these scales")
    is_known = schema.hadamard_block_size in (0, 1, *ROTATIONS)
    need(is_known, "hadamard_block_size", f"0, or one of {', '.join(map(str, ROTATIONS))}")


def _is_power_of_two(size: int, least: int) -> bool:
    return size >= least and size & (size - 1) == 0


def _is_code_type(name: str) -> bool:
    """Return whether Humming has a type of codes: uintN, or a signed small float."""
    if re.fullmatch(r"uint[1-8]", name):
        return True
    small_float = re.fullmatch(r"float([2-8])e(\d)m(\d)", name)
    if small_float is None:
        return False
    bits, exponent, mantissa = map(int, small_float.groups())
    # Wider exponents would reach float16's infinity, which the kernel's shift-only conversion passes through.
    is_known = exponent in (0, 2, 3, 4) or name == "float8e5m2"
    return is_known and mantissa > 0 and bits == 1 + exponent + mantissa


def _scale_dtypes(schema: WeightSchema) -> tuple[str, ...]:
    """Return the dtypes that a schema's scales may be stored in."""
    second = schema.weight_scale_2_type
    allowed: tuple[str, ...] = _SCALE_DTYPES
    if second != "none":
        allowed = tuple(dtype for dtype, kinds in _SCALE_2_TYPES.items() if second in kinds)
    elif schema.weight_scale_type in ("block", "tensor"):
        allowed = ("float32",)
    if schema.has_zero_point:
        allowed = tuple(dtype for dtype in allowed if dtype in PARAM_DTYPES)
    return allowed


def _preset(
    name: str, b_dtype: str, kind: str = "group", size: int = 0, **more: Any
) -> WeightSchema:
    return WeightSchema(
        name=name, b_dtype=b_dtype, weight_scale_type=kind, weight_scale_group_size=size, **more
    )


SOURCE = "source"  # `--schema source`: see `hqconv.planning.layer_encoding`

PRESETS = {
    schema.name: schema
    for schema in (
        _preset("mxfp4", "float4e2m1", size=32, bs_dtype="float8e8m0"),
        _preset(
            "nvfp4", "float4e2m1", size=16, bs_dtype="float8e4m3", weight_scale_2_type="tensor"
        ),
        _preset("mxfp8", "float8e4m3", size=32, bs_dtype="float8e8m0"),
        _preset("fp8", "float8e4m3", "channel"),
        _preset("fp8-e5m2", "float8e5m2", "channel"),
        _preset(
            "fp8-block",
            "float8e4m3",
            "block",
            128,
            weight_scale_group_size_n=128,
            bs_dtype="float32",
        ),
        _preset("fp8-tensor", "float8e4m3", "tensor", bs_dtype="float32"),
        _preset("fp6-e3m2", "float6e3m2", size=128),
        _preset("fp6-e2m3", "float6e2m3", size=128),
        _preset("int8", "uint8", "channel"),
        _preset("int4", "uint4", size=128),
    )
}
SHORTHAND = "intN[-gG|-c][-zp|-fpzp]"
SCALED_SHORTHAND = "CODE-gG-e4m3|e5m2|e8m0[-row]"
PAIR = "SCHEMA+SCHEMA (w13+w2)"
_SHORTHAND = re.compile(r"int([1-8])(?:-g([1-9]\d*)|-(c))?(?:-(zp|fpzp))?")
_CODES = {
    "fp4": "float4e2m1",
    "fp6-e3m2": "float6e3m2",
    "fp6-e2m3": "float6e2m3",
    "fp8": "float8e4m3",
    "fp8-e5m2": "float8e5m2",
    **{f"int{bits}": f"uint{bits}" for bits in range(1, 9)},
}
ROTATED = "-hB"  # after any name: weights that are rotated in blocks of B columns
CODES = ("intN", *(code for code in _CODES if code.startswith("fp")))
RECOMMENDED = (
    "int4-g32-e4m3",
    "int4-g32-e4m3-row",
    "int4-g16-e4m3",
    "fp4-g32-e4m3",
    "int3-g32-e4m3",
)
_EXAMPLES = tuple(
    f"{code}-g32-{scale}" for code in ("int4", "fp4", "fp8") for scale in ("e4m3", "e4m3-row")
)
_IN_FOUR_BITS = re.compile(r"4-?bit|\b[qw]4|gptq|awq|nf4")  # names of other tools
_ROTATED = re.compile(r"(.+)-h([1-9]\d*)")
_SCALED = re.compile(
    rf"({'|'.join(sorted(_CODES, reverse=True))})-g([1-9]\d*)-(e4m3|e5m2|e8m0)(-row)?"
)


def resolve_layer_schema(text: str) -> LayerSchema:
    """Return the schema of `--schema TEXT`: of both GEMMs, or two with a + between them, of w13 and of w2.

    Raises RequestError as `resolve_schema`.
    """
    names = split_names(text)
    if SOURCE in names and len(names) > 1:
        raise RequestError(
            "The source's own schema cannot be half of a pair.",
            where=f"--schema {text}",
            expected="schemas by their names",
        )
    return pair(resolve_schema(names[0]), resolve_schema(names[-1]))


def split_names(text: str) -> list[str]:
    """Split the name of a layer's schema into those of w13 and w2; a file's path may have a + of its own."""
    is_file = text.endswith(".toml") and os.path.lexists(text)
    return [text] if is_file or text.count(_BETWEEN) != 1 else text.split(_BETWEEN)


def resolve_schema(text: str) -> WeightSchema:
    """Return the schema of a name: a preset, a shorthand, or a path ending in .toml, or a `shipped` file.

    Raises RequestError for an unknown name, an unreadable file or an impossible combination.
    """
    if text.endswith(".toml"):
        return load_schema(or_shipped(Path(text), SCHEMAS))
    if (found := _named(text)) is not None:
        return found
    names = (*PRESETS, SHORTHAND, SCALED_SHORTHAND, f"NAME{ROTATED}", PAIR, SOURCE)
    expected = f"{', '.join(names)}, or a .toml file"
    plain = re.sub(r"[_\s]+", "-", text.strip().lower())
    close = close_to(plain, [*PRESETS, *_EXAMPLES, SOURCE])
    if _IN_FOUR_BITS.search(plain):
        close = f"Did you mean {RECOMMENDED[0]}, the recommended one of 4 bits?"
    raise RequestError(
        f"There is no schema named '{text}'.",
        where="--schema",
        expected=expected,
        remedy=f"{close} `hqconv schemas` explains each.".strip(),
    )


def _named(text: str) -> WeightSchema | None:
    """Return the schema of a preset or shorthand, None for others. Raises RequestError for what cannot be."""
    if text in PRESETS:
        return PRESETS[text]
    if match := _ROTATED.fullmatch(text):
        plain = _named(match[1])
        if plain is None or plain.rotation:
            return None
        return replace(plain, name=text, hadamard_block_size=int(match[2]))
    match = _SHORTHAND.fullmatch(text)
    if match:
        bits, size, channel, zero = match.groups()
        default = PRESETS.get(f"int{bits}")
        usual = default.weight_scale_group_size if default else 128
        size = int(size) if size else (0 if channel else usual)
        return WeightSchema(
            name=text,
            b_dtype=f"uint{bits}",
            weight_scale_type="group" if size else "channel",
            weight_scale_group_size=size,
            has_zero_point=zero is not None,
            is_fp_zero_point=zero == "fpzp",
        )
    return _scaled(text)


def _scaled(text: str) -> WeightSchema | None:
    """Return the schema with 8-bit group scales of a shorthand such as `int4-g32-e4m3-row`, None for other names.

    Scales in e4m3 and e5m2 have a second scale: per tensor, or per row with `-row`; e8m0 has one with `-row` only.
    """
    match = _SCALED.fullmatch(text)
    if match is None:
        return None
    code, size, scale, row = match.groups()
    second = "channel" if row else "none" if scale == "e8m0" else "tensor"
    return _preset(
        text, _CODES[code], size=int(size), bs_dtype=f"float8{scale}", weight_scale_2_type=second
    )


def shorthand_of(schema: WeightSchema) -> str:
    """Return the shorthand that comes closest to a schema; "" where none has its codes and scales."""
    size = schema.weight_scale_group_size
    scale = schema.bs_dtype or ""
    if size and scale in _SCALE_2_TYPES:
        code = next((name for name, code in _CODES.items() if code == schema.b_dtype), None)
        row = "-row" if schema.has_row_scale else ""
        return "" if code is None else f"{code}-g{size}-{scale.removeprefix('float8')}{row}"
    if not schema.is_integer:
        return ""
    zero = ""
    if schema.has_zero_point:
        zero = "-fpzp" if schema.is_fp_zero_point else "-zp"
    return f"int{schema.num_bits}{f'-g{size}' if size else '-c'}{zero}"


def load_schema(path: Path) -> WeightSchema:
    """Read a schema from a TOML file with Humming's field names; unknown keys are refused."""
    document = read_toml(path, "schema file", shipped(SCHEMAS))
    known = [field.name for field in fields(WeightSchema) if field.name != "name"]
    if not isinstance(document.get("b_dtype"), str):
        raise RequestError(
            "The schema file names no weight type.", where=path, expected='b_dtype = "…"'
        )
    for key in document:
        if key not in known:
            raise RequestError(
                "The schema file has a key that is unknown.",
                where=f"{path}: {key}",
                expected=", ".join(known),
            )
    if re.fullmatch(r"int[1-8]", document["b_dtype"]):
        document["b_dtype"] = "u" + document["b_dtype"]
    # Humming's own default where a file names no scale type.
    size = document.get("weight_scale_group_size")
    size_n = document.get("weight_scale_group_size_n")
    implied = "block" if size_n else "group" if size else "channel"
    document.setdefault("weight_scale_type", implied)
    schema = WeightSchema(name=unicode_name(path.stem), **document)
    if is_misnamed(schema):
        raise RequestError(
            "The schema file has the name of a preset or shorthand, and another schema.",
            where=path,
            expected=f"another file name, or the fields of {schema.name}",
            found=schema.describe(),
            remedy="Rename the file: an artifact records its schema by this name.",
        )
    return schema


def is_misnamed(schema: WeightSchema) -> bool:
    """Return whether the preset or shorthand of a schema's name is another schema."""
    try:
        named = _named(schema.name)
    except RequestError:  # no schema at all
        return True
    return named is not None and named != schema
