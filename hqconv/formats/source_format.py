"""Storage format of a source's expert matrices: plain floats, or codes with scales in one of the known formats.

Legend: N output rows, K input columns. One scale law: w = (code - zero) * scale * scale_2; the decoders of formats
with another law convert to this one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema

FLOAT = "float"  # encoding of experts that are not quantized
LAID_OUT = "kernel"  # of an artifact in the kernel layout, which `hqconv.sources.artifact` reads
# of a layer whose projections have formats of their own: options, by role
PER_PROJECTION = "per_projection"
GGUF = "gguf"  # of experts in GGUF files, which `hqconv.gguf.source` reads
KNOWN_BY_SOURCE = frozenset((LAID_OUT, GGUF))  # tensor names alone do not identify experts
# how a layer is converted
QUANTIZED = "quantized"
DIRECT = "direct"
REQUANTIZED = "requantized"
DIRECT_ROUNDED = "direct, scales rounded"  # codes kept, scales rounded to the parameter dtype
ANY = -1  # a group size that the config leaves to the tensors' shapes

# Dtypes that store each scale dtype's values without a change. e8m0 is a power of two, 2**-127 … 2**127.
_HOLDS = {
    "float32": {"float32", "bfloat16", "float16", "float8e4m3", "float8e5m2", "float8e8m0"},
    "bfloat16": {"bfloat16", "float8e4m3", "float8e5m2", "float8e8m0"},
    "float16": {"float16", "float8e4m3", "float8e5m2"},
    "float8e4m3": {"float8e4m3"},
    "float8e5m2": {"float8e5m2"},
    "float8e5m3": {"float8e5m3"},
    "float8e8m0": {"float8e8m0"},
}
# Scales rounded to the parameter dtype, as a server does at load: always float32 ones; ones of another
# parameter dtype on request (`--round-scales`), since --dtype may keep them.
ROUNDED_ALWAYS = ("float32",)
ROUNDED_IF_ASKED = (*ROUNDED_ALWAYS, *PARAM_DTYPES)


@dataclass(frozen=True)
class SourceFormat:
    """Source format of one MoE layer. Fields that the config leaves open (""; ANY) are filled in from tensor headers.

    encoding: the name of a `hqconv.formats.encoding.Encoding` (manifest key: decoder). b_dtype, scale_dtype: Humming's
    names of the code type (uintN for integers, offset binary once decoded) and of the stored scale. A scale serves
    group_n rows × group_k columns (0: all of them); at ragged edges fewer. scale_2: "none", "tensor" or "channel".
    is_permuted: an index (g_idx, "act order") says the group of each column; its values decide whether a matrix's
    codes can be kept (`hqconv.conversion.encode`). options: facts that only the encoding reads. static_inputs:
    Humming's dtype of activations that the config quantizes with one static scale per tensor, from calibration (of
    float4e2m1 above dynamic scales of groups); not part of the weights, so neither compared nor in a manifest.
    """

    name: str
    encoding: str
    b_dtype: str = ""
    scale_dtype: str = ""
    group_n: int = 1
    group_k: int = 0
    has_zero_point: bool = False
    scale_2: str = "none"
    is_permuted: bool = False
    options: tuple[tuple[str, Any], ...] = field(default=())
    static_inputs: str = field(default="", compare=False)

    @property
    def is_float(self) -> bool:
        """True if the experts are not quantized."""
        return self.encoding == FLOAT

    def divides(self, part: str) -> bool:
        """Return True if the stored numbers of a part are the inverses of scales."""
        return (
            bool(self.option("scale_inverted"))
            if part == "scale"
            else self.option("scale_2") == "divides"
        )

    def option(self, name: str, default: Any = None) -> Any:
        """Return one of the options."""
        return dict(self.options).get(name, default)

    def of(self, role: str) -> SourceFormat:
        """Return the format of one projection: w1, w3 or w2."""
        if self.encoding != PER_PROJECTION:
            return self
        fmt = self.option(role)
        assert isinstance(fmt, SourceFormat)
        return fmt

    def of_gemm(self, gemm: str) -> SourceFormat:
        """Return the format of the projections of the GEMM w13 or w2."""
        if self.encoding != PER_PROJECTION:
            return self
        return per_projection(
            {role: self.of(role) for role, _ in self.options if (role == "w2") == (gemm == "w2")}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the format for JSON."""
        options = {
            name: value.to_dict() if isinstance(value, SourceFormat) else value
            for name, value in self.options
        }
        document = {"name": self.name, "decoder": self.encoding, **asdict(self), "options": options}
        del document["encoding"], document["static_inputs"]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SourceFormat:
        """Read a manifest's `source_format`.

        Raises KeyError, TypeError, AttributeError or ValueError for any other document.
        """
        values = {"encoding" if key == "decoder" else key: value for key, value in document.items()}
        options = document["options"]
        if document["decoder"] == PER_PROJECTION:
            options = {role: cls.from_dict(inner) for role, inner in options.items()}
        return cls(**{**values, "options": tuple(options.items())})

    def describe(self) -> str:
        """Return a one-line description."""
        if self.is_float or self.encoding in (GGUF, PER_PROJECTION):
            return self.name
        sizes = {0: "all", ANY: "?"}
        rows, columns = (sizes.get(size, str(size)) for size in (self.group_n, self.group_k))
        facts = [
            f"{self.name}: {self.b_dtype or '?'}",
            f"{self.scale_dtype or '?'} scale per {rows}x{columns}",
        ]
        if self.scale_2 != "none":
            facts.append(f"second scale per {self.scale_2}")
        if self.has_zero_point:
            facts.append("zero point")
        if self.is_permuted:
            facts.append("columns in g_idx order")
        return ", ".join(facts)


PLAIN = SourceFormat("not quantized", FLOAT)


def per_projection(formats: Mapping[str, SourceFormat]) -> SourceFormat:
    """Return the format of a layer by its projections' formats: the common one, or one that names each."""
    if len(set(formats.values())) == 1:
        return next(iter(formats.values()))
    roles_of: dict[str, list[str]] = {}  # of a description
    for role, fmt in formats.items():
        roles_of.setdefault(fmt.describe(), []).append(role)
    name = "; ".join(f"{' and '.join(roles)}: {text}" for text, roles in roles_of.items())
    return SourceFormat(name, PER_PROJECTION, options=tuple(formats.items()))


def why_not_direct(
    source: SourceFormat, schema: WeightSchema, param_dtype: str, *, rounded: Collection[str] = ()
) -> str:
    """Return "" if `schema` can hold the source's codes and scales unchanged, else the part that it cannot hold.

    A scale may be repeated into smaller groups, and widened into a dtype that holds it exactly. Scales of a dtype in
    `rounded` may also be rounded to the parameter dtype.
    """
    if source.is_float:
        return "the source is not quantized"
    if source.encoding == PER_PROJECTION:
        return "its projections have formats of their own"
    if schema.rotation:
        return "the schema's weights are rotated, its are not"
    if source.b_dtype != schema.b_dtype:
        return f"its codes are {source.b_dtype or source.name}, not {schema.b_dtype}"
    kinds = (source.has_zero_point, source.option("is_fp_zero_point", False))
    if kinds != (schema.has_zero_point, schema.is_fp_zero_point):
        return "zero points differ"
    if source.scale_2 != schema.weight_scale_2_type:
        return "second scales differ"
    rows, columns = schema.scale_group()
    for what, have, want in (("rows", source.group_n, rows), ("columns", source.group_k, columns)):
        if have != 0 and (want == 0 or have % want):
            return f"a scale of the schema would span several of the source's along {what}"
    return _why_not_scales(source, schema.scale_dtype(param_dtype), rounded)


def _why_not_scales(source: SourceFormat, stored: str, rounded: Collection[str]) -> str:
    """Return "" if scales of dtype `stored` can hold the source's, maybe rounded; float zero points never are."""
    if source.scale_dtype in _HOLDS[stored]:
        return ""
    is_fp_zero_point = bool(source.option("is_fp_zero_point"))
    if stored in PARAM_DTYPES and source.scale_dtype in rounded and not is_fp_zero_point:
        return ""
    return f"{stored} scales cannot hold its {source.scale_dtype} scales"


def conversion_of(
    source: SourceFormat, schema: WeightSchema, param_dtype: str, *, round_scales: bool
) -> str:
    """Return the conversion of a GEMM: `quantized` from floats, else `direct`, `requantized` or `DIRECT_ROUNDED`.

    source: of `SourceFormat.of_gemm`.

    round_scales: also round scales of another 16-bit dtype.
    """
    if source.is_float:
        return QUANTIZED
    if not why_not_direct(source, schema, param_dtype):
        return DIRECT
    rounded = ROUNDED_IF_ASKED if round_scales else ROUNDED_ALWAYS
    return (
        REQUANTIZED
        if why_not_direct(source, schema, param_dtype, rounded=rounded)
        else DIRECT_ROUNDED
    )


def layer_conversion(conversions: Mapping[str, str]) -> str:
    """Return how a layer is converted by the conversions of its GEMMs: the common one, or both by name."""
    if len(set(conversions.values())) == 1:
        return next(iter(conversions.values()))
    return "; ".join(f"{gemm} {conversion}" for gemm, conversion in conversions.items())
