"""Findings from headers, config and the tensors beside the experts; no bytes of experts are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hqconv.checkup.findings import Finding
from hqconv.errors import InputError, first_few, plural
from hqconv.models.config_facts import DRAFT_LAYERS_KEYS, is_draft
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source, read_tensor
from hqconv.models.tensor_names import decoder_layer, is_router
from hqconv.planning.checks import check_matrix_scales
from hqconv.planning.notices import source_notices
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.engine import LOADER_FAULTS

if TYPE_CHECKING:
    pass

_MAX_BYTES = 64 << 20  # of a tensor beside the experts that is read
_SHARED_KEYS = ("n_shared_experts", "num_shared_experts")
_NORM = re.compile(r"\w*norm\w*\.(?:weight|bias)")


def header_findings(source: Source, experts: ExpertMap) -> Iterator[Finding]:
    """Yield what names, shapes, config and scales of whole matrices tell."""
    for text in source_notices(source, experts):
        yield Finding("config", text[:1].upper() + text[1:], is_damage=False)
    try:
        for text in check_matrix_scales(source, experts.layers):
            yield Finding("zero", text, is_damage=False)
    except InputError as error:
        yield Finding("scale-range", error.what, error.expected, error.found, where=error.where)
    yield from _missing_siblings(experts, source.tensors)
    yield from _promised(source, experts)
    for layer in experts.layers:
        yield from _of_loaders(source, layer)


def _missing_siblings(experts: ExpertMap, tensors: Iterable[str]) -> Iterator[Finding]:
    """Yield tensors beside the experts, and norms, that all MoE layers of the decoder have but one or few."""
    places = {
        decoder_layer(layer.name): layer for layer in experts.layers if "mtp" not in layer.name
    }  # in order
    beside: dict[str, set[str]] = {place: set() for place in places}
    for name in tensors:
        place = decoder_layer(name)
        layer = places.get(place)
        if layer is None or name.startswith(f"{layer.name}."):
            continue
        inner = name[len(place) :]
        if inner.split(".")[0] == layer.name[len(place) :].split(".")[0] or _NORM.fullmatch(inner):
            beside[place].add(inner)
    whole = {place: names for place, names in beside.items() if names}
    ends = [*whole][:: max(len(whole) - 1, 1)]
    for name in sorted(set().union(*whole.values())):
        lacking = [place for place, names in whole.items() if name not in names]
        if lacking and len(lacking) <= len(whole) // 4:
            # First and last layers, and several, may be built otherwise: DeepSeek-V4's first routers have no bias.
            is_damage = len(lacking) == 1 and lacking[0] not in ends
            what = "A tensor is missing that the other MoE layers have: a server may fill it with anything."
            found = f"absent in {plural(len(lacking), 'layer')} of {len(whole)}"
            where = first_few([f"{place}{name}" for place in lacking])
            yield Finding("missing", what, "present", found, is_damage, where)


def _promised(source: Source, experts: ExpertMap) -> Iterator[Finding]:
    """Yield what config.json counts and no tensor has."""
    text, family = text_config(source.config), BY_NAME.get(experts.family)
    drafts = _count(text, DRAFT_LAYERS_KEYS)
    layers = [
        layer
        for layer in experts.layers
        if family is not None and is_draft(family, layer.index, text)
    ]
    if (
        drafts
        and not layers
        and not any(re.search(r"(?:^|\.)(?:mtp|nextn|eh_proj)", name) for name in source.tensors)
    ):
        what = f"config.json counts {plural(drafts, 'layer')} for multi-token prediction, none is in the checkpoint."
        yield Finding("missing", f"{what} A server cannot speculate with it.", is_damage=False)
    shared = _count(text, _SHARED_KEYS)
    if shared and not any("share" in name for name in experts.copied):
        what = f"config.json counts {plural(shared, 'shared expert')}, and no tensor is named so."
        yield Finding(
            "missing",
            f"{what} Servers leave them out, or fill them with anything.",
            is_damage=False,
        )
    is_tied = source.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    heads = re.compile(r"(?:^|\.)(?:lm_head|head|output|embed_out)\.(?:weight|qweight|base_layer)")
    if is_tied is False and not any(heads.search(name) for name in source.tensors):
        what = "tie_word_embeddings is false, and the checkpoint has no output head: transformers makes a random one."
        yield Finding("missing", what, is_damage=False)


def _count(text: Mapping[str, Any], keys: Iterable[str]) -> int:
    values = (text.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _of_loaders(source: Source, layer: MoeLayer) -> Iterator[Finding]:
    """Yield what loaders are known to do, without an error, to checkpoints of this form."""
    method, parts = (source.quantization or {}).get("quant_method"), layer.slices["w2"]
    is_nvfp4 = layer.format.of("w2").b_dtype == "float4e2m1" and "scale_2" in parts
    is_single = not parts["weight"].is_stacked
    has_some = any(layer.input_scales.refs.values())
    forms = {
        "nvfp4 of single experts": method == "compressed-tensors" and is_nvfp4 and is_single,
        "no input scales": is_nvfp4 and method == "modelopt" and not has_some,
        "some input scales": is_nvfp4 and has_some and any(layer.input_scales.missing.values()),
        "granite of single experts": layer.family.startswith("granite") and is_single,
    }
    for form, is_so in forms.items():
        if is_so:
            yield Finding("loader", LOADER_FAULTS[form], is_damage=False, where=layer.name)


def unmapped_stacks(source: Source) -> Finding | None:
    """Return the finding for packed stacks of experts, which a wrong writer makes and no loader knows."""
    names = [
        name
        for name in source.tensors
        if re.search(r"experts\.(?:gate_up|down)_proj_packed$", name)
    ]
    return (
        Finding("broken", LOADER_FAULTS["packed stacks"], where=first_few(names)) if names else None
    )


def value_findings(
    source: Source, experts: ExpertMap, layers: Collection[MoeLayer]
) -> Iterator[Finding]:
    """Yield what is wrong with the values of routers, their biases, and norms of some MoE layers."""
    places = {decoder_layer(layer.name): layer for layer in layers}
    for name in experts.copied:
        place, ref = decoder_layer(name), source.tensors[name]
        inner = name[len(place) :]
        is_read = is_router(name) or _NORM.fullmatch(inner) or "e_score_correction" in name
        if (
            place not in places
            or not is_read
            or ref.dtype not in FLOATS
            or not 0 < ref.num_bytes <= _MAX_BYTES
        ):
            continue
        values = read_tensor(source, ref).float()
        if num := int((~values.isfinite()).sum()):
            yield Finding(
                "nan",
                "A tensor beside the experts holds NaN or infinity.",
                "finite",
                f"{num}",
                where=name,
            )
        elif is_router(name) and len(ref.shape) > 1 and not bool(values.any()):
            what = "A router is zero: it sends every token to the same experts."
            yield Finding("zero", what, is_damage=False, where=name)
