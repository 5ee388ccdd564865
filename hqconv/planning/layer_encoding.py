"""Encoding of an MoE layer's matrices, decided from headers and options before any byte is read.

`EncodingOptions` are the options that decide codes and scales beside the schema. One value of them travels from
`ConversionOptions` to `ConversionSpec` to each layer's `LayerEncoding`; its methods alone say how the options appear in
the manifest, the journal, the output folder's name and the summary. `--schema source` finds the target schemas that
keep what a quantized source already holds, layer by layer.
Legend: I intermediate size, H hidden size; a block scale serves bn rows × bk columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats.source_format import (
    DIRECT,
    DIRECT_ROUNDED,
    LAID_OUT,
    PER_PROJECTION,
    ROUNDED_ALWAYS,
    ROUNDED_IF_ASKED,
    SourceFormat,
    conversion_of,
    layer_conversion,
    why_not_direct,
)
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.calibration import Calibration
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.grid import EVEN, GROUPS, Grid, hidden_unit, slice_unit, stored_size
from hqconv.schemas.options import GPTQ, QUANTIZERS, RTN, ConversionArguments, LayerChoice
from hqconv.schemas.weight_schema import (
    PARAM_DTYPES,
    PRESETS,
    SOURCE,
    LayerSchema,
    WeightSchema,
    pair,
    resolve_schema,
    shorthand_of,
)

# Version of the scale candidates that mse tries and of its choice (`quantization/scale_search`):
# raised by every change of its results, so that `verify` knows which searches it can repeat.
# tests/quantization/test_scale_search.py holds the results to a digest.
SEARCH_VERSION = 4
# of the results of gptq (`calibration/gptq`): raised by every change of them
CALIBRATION_VERSION = 5


def quantizer_version(quantizer: str) -> int:
    """Return the version of the results of a quantizer that is not rtn."""
    return CALIBRATION_VERSION if quantizer == GPTQ else SEARCH_VERSION


@dataclass(frozen=True)
class EncodingOptions:
    """Options that decide codes and scales beside the schema.

    round_scales: scales of another 16-bit dtype than the parameters' are rounded, and the codes kept; in a spec set
    only where this changes a layer. quantizer: rtn, mse or gptq, for codes that are not kept. calibration: of gptq.
    """

    round_scales: bool = False
    quantizer: str = RTN
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        assert (self.calibration is not None) == (self.quantizer == GPTQ), (
            "a calibration belongs to gptq"
        )

    @classmethod
    def parse(cls, arguments: ConversionArguments) -> EncodingOptions:
        """Return the options of the API's arguments; a calibration comes when the device is known."""
        return cls(arguments.round_scales, arguments.quantizer)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> EncodingOptions:
        """Read the options that a manifest records.

        Raises RequestError, whose `where` is the manifest's key, for values that no conversion writes.
        """
        quantizer = document.get("quantizer", RTN)
        version = document.get("quantizer_version")
        is_versioned = quantizer != RTN and type(version) is int and version > 0
        found = {
            "round_scales": (
                document.get("round_scales", True) is True,
                document.get("round_scales"),
            ),
            "quantizer": (quantizer in (*QUANTIZERS, GPTQ), repr(quantizer)),
            "calibration": (
                ("calibration" in document) == (quantizer == GPTQ),
                f"quantizer {quantizer}",
            ),
            "quantizer_version": (
                version is None or is_versioned,
                f"{version!r}, of the quantizer {quantizer}",
            ),
        }
        for key, (is_possible, value) in found.items():
            if not is_possible:
                raise RequestError(
                    "A recorded option has an impossible value.", where=key, found=value
                )
        calibration = Calibration.from_dict(document["calibration"]) if quantizer == GPTQ else None
        return cls("round_scales" in document, quantizer, calibration)

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's keys; options at their default have none."""
        document: dict[str, Any] = {"round_scales": True} if self.round_scales else {}
        if self.quantizer != RTN:
            document["quantizer"] = self.quantizer
            document["quantizer_version"] = quantizer_version(self.quantizer)
        if self.calibration is not None:
            document["calibration"] = self.calibration.to_dict()
        return document

    def request(self) -> dict[str, Any]:
        """Return all options by their names on the command line."""
        calibration = self.calibration
        return {
            "quantizer": self.quantizer,
            "round_scales": self.round_scales,
            "calibrate": None if calibration is None else calibration.name,
            "calibrate_tokens": None if calibration is None else calibration.num_tokens,
            "calibrate_context": None if calibration is None else calibration.context_length,
        }

    def name_parts(self) -> tuple[str, ...]:
        """Return the parts of a default output folder's name."""
        return () if self.quantizer == RTN else (self.quantizer,)

    def summary(self) -> dict[str, Any]:
        """Return the keys of plans and summaries: see `summary_of`."""
        return self.summary_of(self.to_dict())

    @staticmethod
    def summary_of(document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of plans and summaries for a manifest, which may be damaged."""
        return {
            "quantizer": document.get("quantizer", RTN),
            "calibration": document.get("calibration"),
        }

    def conversion(self, source: SourceFormat, schema: WeightSchema, param_dtype: str) -> str:
        """Return how a GEMM in the format `source` is converted, as `conversion_of`."""
        return conversion_of(source, schema, param_dtype, round_scales=self.round_scales)

    def conversions(
        self, source: SourceFormat, schema: LayerSchema, param_dtype: str
    ) -> dict[str, str]:
        """Return how each GEMM of a layer in the format `source` is converted, as `conversion_of`."""
        return {
            gemm: self.conversion(source.of_gemm(gemm), schema.of(gemm), param_dtype)
            for gemm in GEMMS
        }

    def effective(
        self, layers: Iterable[tuple[SourceFormat, LayerSchema]], param_dtype: str
    ) -> EncodingOptions:
        """Return the options without a `round_scales` that changes no layer: equal bytes get equal manifests."""
        plain = replace(self, round_scales=False)
        changes = any(
            self.conversions(source, schema, param_dtype)
            != plain.conversions(source, schema, param_dtype)
            for source, schema in layers
        )
        return replace(self, round_scales=changes)


@dataclass(frozen=True)
class GemmEncoding:
    """Encoding of the matrices of one of a layer's GEMMs.

    conversion: of `hqconv.formats.source_format`. must_be_direct: a matrix that cannot keep its codes is an error.
    takes_powers_of_two: fp8 group scales under a second scale stand for the source's powers of two, mxfp4 to nvfp4.
    is_coded: the source has codes, so that scale groups which are quantized anew without any error are counted.
    is_permuted: columns have an order of groups (`SourceFormat.is_permuted`).
    """

    schema: WeightSchema
    param_dtype: str
    options: EncodingOptions
    conversion: str
    must_be_direct: bool
    takes_powers_of_two: bool
    is_coded: bool
    is_permuted: bool

    @property
    def quantizer(self) -> str:
        """Method that chooses scales for codes that are not kept: rtn, mse or gptq."""
        return self.options.quantizer

    @property
    def plain_quantizer(self) -> str:
        """Method for matrices whose inputs no calibration knows: rtn or mse."""
        return RTN if self.quantizer == GPTQ else self.quantizer

    @property
    def is_direct(self) -> bool:
        """True where codes are kept, with their scales or rounded ones, if gate and up share what they must share."""
        return self.conversion in (DIRECT, DIRECT_ROUNDED)

    @property
    def keeps_codes(self) -> bool:
        """True where the codes of all matrices are kept, whatever their values."""
        return self.is_direct and not (self.schema.is_coupled or self.is_permuted)


@dataclass(frozen=True)
class LayerEncoding:
    """Encoding of one layer's matrices: that of its GEMMs.

    shapes: role → [out, in] of the packed tensors: zeros fill the last scale group where the intermediate size is no
    whole number of them.
    """

    w13: GemmEncoding
    w2: GemmEncoding
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def of(self, part: str) -> GemmEncoding:
        """Return the encoding of a GEMM (w13, w2) or of a projection (w1, w3, w2)."""
        return self.w2 if part == "w2" else self.w13

    @property
    def schema(self) -> LayerSchema:
        """The schemas of the GEMMs."""
        return pair(self.w13.schema, self.w2.schema)

    @property
    def conversion(self) -> str:
        """Conversion of the layer: see `layer_conversion`."""
        return layer_conversion({gemm: self.of(gemm).conversion for gemm in GEMMS})

    @property
    def is_direct(self) -> bool:
        """True where the codes of both GEMMs are kept: see `GemmEncoding`."""
        return self.w13.is_direct and self.w2.is_direct

    @property
    def keeps_codes(self) -> bool:
        """True where the codes of all matrices are kept, whatever their values."""
        return self.w13.keeps_codes and self.w2.keeps_codes

    @property
    def is_coded(self) -> bool:
        """True for a source with codes."""
        return self.w13.is_coded

    @property
    def quantizer(self) -> str:
        """Method that chooses scales for codes that are not kept: rtn, mse or gptq."""
        return self.w13.quantizer

    @property
    def sorts_columns(self) -> bool:
        """True where codes of w2 are kept and its columns are sorted by group, with gate's and up's rows."""
        return self.w2.is_direct and self.w2.is_permuted


def encoding_of(
    layer: MoeLayer,
    schema: LayerSchema,
    param_dtype: str,
    options: EncodingOptions,
    *,
    must_be_direct: Collection[str] = (),
) -> LayerEncoding:
    """Return the encoding of a source's layer. must_be_direct: GEMMs that must keep the source's codes."""
    is_exact = layer.is_linear and schema.of("w13").num_bits >= _EXACT_BITS
    if is_exact and options.quantizer == GPTQ:
        options = replace(options, quantizer=RTN, calibration=None)
    filled = replace(layer, intermediate_size=stored_size(layer.intermediate_size, schema))
    of_gemms = {}
    for gemm in GEMMS:
        source = layer.format.of_gemm(gemm)
        one = schema.of(gemm)
        of_gemms[gemm] = GemmEncoding(
            one,
            param_dtype,
            options,
            options.conversion(source, one, param_dtype),
            gemm in must_be_direct,
            takes_powers_of_two(source, one),
            not layer.format.is_float,
            source.is_permuted,
        )
    return LayerEncoding(**of_gemms, shapes={role: filled.shape(role) for role in layer.roles})


def takes_powers_of_two(source: SourceFormat, schema: WeightSchema) -> bool:
    """Return whether fp8 group scales under a second scale can hold the source's powers of two: mxfp4 to nvfp4."""
    return (
        source.scale_dtype == "float8e8m0"
        and source.scale_2 == "none"
        and not schema.rotation
        and source.b_dtype == schema.b_dtype
        and schema.bs_dtype == "float8e4m3"
        and schema.weight_scale_2_type == "tensor"
        and source.group_n == 1
        and source.group_k % schema.weight_scale_group_size == 0
    )


_TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # tried where the requested size does not work
_DEFAULTS = EncodingOptions()
_ROUNDED = EncodingOptions(round_scales=True)
_EXACT_BITS = 8  # of linear layers that a calibration does not make better
_MAX_BLOCK = 128  # of scales that serve whole matrices
# what the kernel can load
_MIN_BLOCK_N = 64
_MIN_BLOCK_K = 16


def source_schemas(
    layers: Iterable[MoeLayer],
    param_dtype: str,
    grid: Grid,
    options: EncodingOptions = _DEFAULTS,
    choices: Mapping[str, LayerChoice] = MappingProxyType({}),
) -> dict[str, LayerSchema]:
    """Return layer → the schema that keeps its codes and scales, cut for the TP ranks of `grid`.

    Block scales are repeated into smaller blocks where a slice would cut them; the TP split `groups` cuts none. With
    the option `round_scales` a schema may also keep the codes and round the scales to the parameter dtype, if no schema
    keeps both. choices: by layer; GEMMs that have a schema there keep nothing, and layers of such GEMMs are left out.
    Raises RequestError if a GEMM is not quantized or has no such schema.
    """
    found: dict[str, LayerSchema] = {}
    of_kind: dict[tuple[object, ...], WeightSchema] = {}
    for layer in layers:
        choice = choices.get(layer.name, LayerChoice())
        own = {}
        if choice.w13 is not None and choice.w2 is not None:
            continue
        for gemm, chosen in zip(GEMMS, (choice.w13, choice.w2), strict=True):
            kind = (
                gemm,
                replace(layer.format.of_gemm(gemm), name="", encoding="", options=()),
                layer.hidden_size,
                layer.intermediate_size,
                layer.gated,
            )
            if chosen is None and kind not in of_kind:
                of_kind[kind] = _source_schema(layer, gemm, param_dtype, grid, options.round_scales)
            own[gemm] = chosen or of_kind[kind]
        found[layer.name] = pair(own["w13"], own["w2"])
    return found


def plain_layers(experts: ExpertMap) -> set[str]:
    """Return the layers that are not quantized although others are: they have no schema, and are copied unchanged."""
    plain = {layer.name for layer in experts.layers if layer.format.is_float}
    return plain if len(plain) < len(experts.layers) else set()


def _source_schema(
    layer: MoeLayer, gemm: str, param_dtype: str, grid: Grid, round_scales: bool
) -> WeightSchema:
    source = layer.format.of_gemm(gemm)
    named_gemm = layer.name if source == layer.format else f"{layer.name}: {gemm}"
    if source.is_float:
        raise RequestError(
            "The source's experts are not quantized: they have no schema of their own.",
            where=f"--schema source, {named_gemm}",
            found=layer.dtype,
            remedy="Name the schema to quantize to, such as mxfp4.",
        )
    schema, obstacle = _keeping(layer, source, param_dtype, grid, round_scales)
    if schema is not None:
        return named(schema)
    cuts = {t: replace(grid, tp=t, ep=1) for t in _TP_SIZES if t != grid.tp}
    others = [
        t for t, cut in cuts.items() if _keeping(layer, source, param_dtype, cut, round_scales)[0]
    ]
    works = f" TP sizes that work: {', '.join(map(str, others))}." if others else ""
    raise RequestError(
        "No schema of Humming keeps the source's experts exactly.",
        where=f"--schema source, --tp {grid.tp}, {named_gemm}",
        expected=f"scales in {param_dtype}, an 8-bit dtype, or float32 for blocks",
        found=f"{source.describe()}: {obstacle}",
        remedy=_remedy(layer, source, param_dtype, grid) + works,
    )


def _keeping(
    layer: MoeLayer, source: SourceFormat, param_dtype: str, grid: Grid, round_scales: bool
) -> tuple[WeightSchema | None, str]:
    """Return the closest schema that keeps a GEMM's format when it is cut for the ranks, or None and the reason."""
    obstacle = "" if source.b_dtype else "no kernel reads codes of this kind"
    if source.encoding == PER_PROJECTION:
        obstacle = "its projections have formats of their own"
    if layer.intermediate_size % grid.tp and not layer.pads_last_rank and grid.split == EVEN:
        return None, f"{layer.intermediate_size} columns are not {grid.tp} equal slices"
    rounded = ROUNDED_IF_ASKED if round_scales else ()
    for schema in _candidates(layer, source, grid, may_round=round_scales):
        why = why_not_direct(source, schema, param_dtype, rounded=rounded)
        if not why:
            return schema, ""
        obstacle = obstacle or why
    return None, obstacle or "no kernel loads scales cut like this"


def source_param_dtype(experts: ExpertMap) -> str | None:
    """Return the parameter dtype the source was made for, or that keeps its 16-bit scales; None where any does.

    If layers differ, the dtype of the first layer that has one.
    """
    sources = [layer.format.of(role) for layer in experts.layers for role in layer.roles]
    made_for = (
        source.option("param_dtype", source.scale_dtype)
        for source in sources
        if not source.is_float
    )
    return next((str(dtype) for dtype in made_for if dtype in PARAM_DTYPES), None)


def named(schema: WeightSchema) -> WeightSchema:
    """Return the same schema under the name of its preset or shorthand.

    8-bit scales without a second one keep the name `source`, which manifests had before there was a shorthand of them.
    """
    known = [*PRESETS.values()]
    shorthand = shorthand_of(schema)
    if shorthand and (
        schema.bs_dtype in (None, *PARAM_DTYPES) or schema.weight_scale_2_type != "none"
    ):
        known.append(resolve_schema(shorthand))
    return next((one for one in known if one.humming_fields() == schema.humming_fields()), schema)


def direct_schemas(experts: ExpertMap, param_dtype: str) -> list[str]:
    """List presets, and `source`, that keep the codes of every layer: with exact scales first, then rounded ones.

    Of columns with an order of groups only the values tell how much is kept: the texts say so.
    """

    def presets(rounded: tuple[str, ...]) -> list[str]:
        return [
            name
            for name, schema in PRESETS.items()
            if all(
                _fits(layer, schema)
                and not why_not_direct(layer.format, schema, param_dtype, rounded=rounded)
                for layer in experts.layers
            )
        ]

    exact = presets(())
    others = [f"{name} (scales rounded)" for name in presets(ROUNDED_ALWAYS) if name not in exact]
    texts = [*exact, *others]
    if own := own_schema_text(experts, param_dtype, _DEFAULTS):
        texts = [*exact, f"{SOURCE} ({own})", *others]
    elif own := own_schema_text(experts, param_dtype):
        texts.append(f"{SOURCE} --round-scales ({own})")
    if any(layer.format.of(role).is_permuted for layer in experts.layers for role in layer.roles):
        return [f"{text}, as far as g_idx allows" for text in texts]
    return texts


def own_schema_text(
    experts: ExpertMap, param_dtype: str, options: EncodingOptions = _ROUNDED
) -> str:
    """Describe the schema of `source`, with numbers of layers where they differ; "" where it is refused."""
    dtype = source_param_dtype(experts) or param_dtype
    left = plain_layers(experts)
    kept = [layer for layer in experts.layers if layer.name not in left]
    try:
        own = source_schemas(kept, dtype, Grid(), options)
    except RequestError:
        return ""
    counts = Counter(
        one.describe() if SOURCE in [part.name for part in one.each] else one.name
        for one in own.values()
    )
    if len(counts) == 1 and not left:
        return next(iter(counts))
    counted = [f"{name}: {number} layer{'s' * (number > 1)}" for name, number in counts.items()]
    return "; ".join([*counted, *([f"left as they are: {len(left)}"] if left else [])])


def _fits(layer: MoeLayer, schema: WeightSchema) -> bool:
    """Return whether the layer's sizes are whole scale groups of the schema, uncut."""
    return not (
        layer.hidden_size % hidden_unit(schema) or layer.intermediate_size % slice_unit(schema)
    )


def _candidates(
    layer: MoeLayer, source: SourceFormat, grid: Grid, *, may_round: bool
) -> Iterator[WeightSchema]:
    """Yield schemas that may hold a GEMM's format, the closest first; schemas that no kernel loads are left out."""
    small = source.scale_dtype if source.scale_dtype.startswith("float8") else None
    # A slice is whole groups, whatever their size, if groups are dealt.
    share = layer.hidden_size if grid.split == GROUPS else layer.intermediate_size // grid.tp
    share = math.gcd(layer.hidden_size, share)
    makers: list[dict[str, object]] = []
    # Gate and up have one scale in a laid out artifact; elsewhere only a layer without a gate is sure to.
    is_shared = source.encoding == LAID_OUT or not layer.gated
    if is_shared and (source.group_n, source.group_k) == (0, 0):
        makers.append({"weight_scale_type": "tensor", "bs_dtype": "float32"})
    if source.group_n == 1:
        kind = "group" if source.group_k else "channel"
        makers.append(
            {
                "weight_scale_type": kind,
                "weight_scale_group_size": source.group_k,
                "bs_dtype": small,
            }
        )
    else:
        rows, columns = (
            _power_of_two(math.gcd(g or _MAX_BLOCK, share))
            for g in (source.group_n, source.group_k)
        )
        block = {"weight_scale_type": "block", "bs_dtype": "float32"}
        if rows >= _MIN_BLOCK_N and columns >= _MIN_BLOCK_K:
            makers.append(
                {**block, "weight_scale_group_size_n": rows, "weight_scale_group_size": columns}
            )
        if source.group_k == 0 and (may_round or source.scale_dtype != "float32"):
            makers.append({"weight_scale_type": "channel"})
        if small == "float8e8m0":
            makers.append(
                {"weight_scale_type": "group", "weight_scale_group_size": 32, "bs_dtype": small}
            )
    for maker in makers:
        try:
            yield WeightSchema(
                name=SOURCE,
                b_dtype=source.b_dtype,
                has_zero_point=source.has_zero_point,
                is_fp_zero_point=bool(source.option("is_fp_zero_point")),
                weight_scale_2_type=source.scale_2,
                **maker,  # type: ignore[arg-type]
            )
        except RequestError:
            continue


def _power_of_two(number: int) -> int:
    """Return the largest power of two that divides a number."""
    return number & -number


def _remedy(layer: MoeLayer, source: SourceFormat, param_dtype: str, grid: Grid) -> str:
    ways = []
    if source.scale_dtype in PARAM_DTYPES and source.scale_dtype != param_dtype:
        ways.append(f"Use --dtype {source.scale_dtype}")
    if _keeping(layer, source, param_dtype, grid, round_scales=True)[0] is not None:
        ways.append(
            f"{'add' if ways else 'Add'} --round-scales: codes kept, scales rounded to {param_dtype}"
        )
    if not ways:
        return "Name the schema to requantize to, such as fp8 or int4; the error is measured and recorded."
    return f"{', or '.join(ways)}; or name another schema to requantize to."
