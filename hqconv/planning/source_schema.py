"""`--schema source`: the target schemas that keep what a quantized source already holds, layer by layer.

Legend: I intermediate size, H hidden size; a block scale serves bn rows × bk columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from hqconv.errors import RequestError
from hqconv.formats.source_format import (
    LAID_OUT,
    PER_PROJECTION,
    ROUNDED_ALWAYS,
    ROUNDED_IF_ASKED,
    SourceFormat,
    why_not_direct,
)
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.layer_encoding import EncodingOptions
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.grid import EVEN, GROUPS, Grid, hidden_unit, slice_unit
from hqconv.schemas.options import LayerChoice
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

_TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # tried where the requested size does not work
_DEFAULTS = EncodingOptions()
_MAX_BLOCK = 128  # of scales that serve whole matrices
_MIN_BLOCK_N, _MIN_BLOCK_K = 64, 16  # what the kernel can load


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
        choice, own = choices.get(layer.name, LayerChoice()), {}
        if choice.w13 is not None and choice.w2 is not None:
            continue
        for gemm, chosen in zip(GEMMS, (choice.w13, choice.w2), strict=True):
            kind = (
                gemm,
                _kind(layer.format.of_gemm(gemm)),
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
    layer: MoeLayer, source: SourceFormat, param_dtype: str, grid: Grid, round_scales: bool = False
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
    known, shorthand = [*PRESETS.values()], shorthand_of(schema)
    if shorthand and (
        schema.bs_dtype in (None, *PARAM_DTYPES) or schema.weight_scale_2_type != "none"
    ):
        known.append(resolve_schema(shorthand))
    return next((one for one in known if one.humming_fields() == schema.humming_fields()), schema)


def direct_schemas(experts: ExpertMap, param_dtype: str) -> list[str]:
    """List presets, and `source`, that keep the codes of every layer: with exact scales first, then rounded ones.

    Of columns with an order of groups only the values tell how much is kept: the texts say so.
    """
    is_permuted = any(
        layer.format.of(role).is_permuted for layer in experts.layers for role in layer.roles
    )
    return [
        f"{text}, as far as g_idx allows" * is_permuted or text
        for text in _direct_schemas(experts, param_dtype)
    ]


def _direct_schemas(experts: ExpertMap, param_dtype: str) -> list[str]:
    def presets(rounded: tuple[str, ...]) -> list[str]:
        return [
            name
            for name, schema in PRESETS.items()
            if all(
                not why_not_direct(b.format, schema, param_dtype, rounded=rounded)
                for b in experts.layers
            )
            and all(_fits(layer, schema) for layer in experts.layers)
        ]

    exact = presets(())
    others = [f"{name} (scales rounded)" for name in presets(ROUNDED_ALWAYS) if name not in exact]
    if own := _own_schema_text(experts, param_dtype, EncodingOptions()):
        return [*exact, f"{SOURCE} ({own})", *others]
    own = _own_schema_text(experts, param_dtype, EncodingOptions(round_scales=True))
    return [*exact, *others, *([f"{SOURCE} --round-scales ({own})"] if own else [])]


def _own_schema_text(experts: ExpertMap, param_dtype: str, options: EncodingOptions) -> str:
    """Describe the schema of `source`, with numbers of layers where they differ; "" where it is refused."""
    dtype, left = source_param_dtype(experts) or param_dtype, plain_layers(experts)
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


def _kind(source: SourceFormat) -> tuple[object, ...]:
    document = source.to_dict()
    return tuple(
        document[key] for key in sorted(document) if key not in ("name", "options", "decoder")
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
