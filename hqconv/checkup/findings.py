"""Findings of a check: their class, their documents, and those from headers, config and tensors beside the experts.

No bytes of experts are read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hqconv.errors import InputError, first_few, plural
from hqconv.models.config_facts import DRAFT_LAYERS_KEYS
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source, read_tensor
from hqconv.models.tensor_names import decoder_layer, is_router
from hqconv.planning.checks import check_matrix_scales
from hqconv.planning.notices import source_notices
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.tensors import FLOATS

_MAX_BYTES = 64 << 20  # of a tensor beside the experts that is read
_NORM = re.compile(r"\w*norm\w*\.(?:weight|bias)")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|head|output|embed_out)\.(?:weight|qweight|base_layer)")
# what config.json counts, by which keys, and what its tensors are named
_COUNTED = (
    (
        "layers for multi-token prediction",
        DRAFT_LAYERS_KEYS,
        re.compile(r"(?:^|\.)(?:mtp|nextn|eh_proj)"),
    ),
    ("shared experts", ("n_shared_experts", "num_shared_experts"), re.compile("share")),
)


@dataclass(frozen=True)
class MatrixPlace:
    """A projection of an expert of a layer. Without a role it is the whole expert, with expert -1 the whole layer."""

    layer: str = ""
    expert: int = -1
    role: str = ""

    def seen_from(self, place: MatrixPlace) -> str:
        """Describe the matrix to a reader who knows the other's layer."""
        text = f"{self.role} of expert {self.expert}"
        return text if self.layer == place.layer else f"{text} of {self.layer}"


@dataclass(frozen=True)
class CheckFinding:
    """One observation. kind: its name in docs/check.md. where: a tensor, or what else; "" for the place alone.

    is_damage: the checkpoint is surely wrong; else it is a notice. place: of the matrix, if it is one's.
    """

    kind: str
    what: str
    expected: str = ""
    found: str = ""
    is_damage: bool = True
    where: str = ""
    place: MatrixPlace = MatrixPlace()

    def at(self, place: MatrixPlace, where: str = "") -> CheckFinding:
        """Return the finding with its place; `where` unless it names a tensor itself."""
        return replace(self, place=place, where=self.where or where)


def grouped(findings: Iterable[CheckFinding]) -> list[dict[str, Any]]:
    """Return JSON documents; findings of one kind in a projection of a layer, or beside the experts, are one."""
    groups: dict[tuple[str, ...], list[CheckFinding]] = {}
    for finding in findings:
        key = (finding.kind, finding.what, finding.place.layer, finding.place.role)
        groups.setdefault(key, []).append(finding)
    return [_document(group) for group in groups.values()]


def _document(group: list[CheckFinding]) -> dict[str, Any]:
    first, place = group[0], group[0].place
    experts = sorted({finding.place.expert for finding in group if finding.place.expert >= 0})
    where, found = first_few([finding.where for finding in group if finding.where]), first.found
    if len(experts) > 1 or (place.layer and not where):
        where = place.layer
        if experts:
            where += f", expert{'s' if len(experts) > 1 else ''} {first_few([*map(str, experts)])}"
        if place.role:
            where += f", {place.role}"
    if found and len(experts) > 1:
        found += f" (expert {place.expert})"
    return {
        "kind": first.kind,
        "where": where,
        "what": first.what,
        "expected": first.expected,
        "found": found,
        "layer": place.layer,
        "projection": place.role,
        "experts": experts,
    }


# --- headers and config --------------------------------------------------------------------------------------


def header_findings(source: Source, experts: ExpertMap) -> Iterator[CheckFinding]:
    """Yield what names, shapes, config and scales of whole matrices tell."""
    for text in source_notices(source, experts):
        yield CheckFinding("config", text[:1].upper() + text[1:], is_damage=False)
    try:
        for text in check_matrix_scales(source, experts.layers):
            yield CheckFinding("zero", text, is_damage=False)
    except InputError as error:
        yield CheckFinding(
            "scale-range", error.what, error.expected, error.found, where=error.where
        )
    yield from _missing_siblings(experts, source.tensors)
    yield from _unkept_promises(source)


def _missing_siblings(experts: ExpertMap, tensors: Iterable[str]) -> Iterator[CheckFinding]:
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
    ends = (next(iter(whole), ""), next(reversed(whole), ""))
    for name in sorted(set().union(*whole.values())):
        lacking = [place for place, names in whole.items() if name not in names]
        if lacking and len(lacking) <= len(whole) // 4:
            # First and last layers, and several, may be built otherwise: DeepSeek-V4's first routers have no bias.
            yield CheckFinding(
                "missing",
                "A tensor is missing that the other MoE layers have: a server may fill it with anything.",
                "present",
                f"absent in {plural(len(lacking), 'layer')} of {len(whole)}",
                is_damage=len(lacking) == 1 and lacking[0] not in ends,
                where=first_few([f"{place}{name}" for place in lacking]),
            )


def _unkept_promises(source: Source) -> Iterator[CheckFinding]:
    """Yield what config.json counts and no tensor has."""
    text = text_config(source.config)
    for what, keys, names in _COUNTED:
        counts = [text.get(key) for key in keys]
        is_counted = any(isinstance(count, int) and count > 0 for count in counts)
        if is_counted and not any(names.search(name) for name in source.tensors):
            what = f"config.json counts {what}, and no tensor is named so: servers leave them out, or invent them."
            yield CheckFinding("missing", what, is_damage=False)
    is_tied = source.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if is_tied is False and not any(_HEAD.search(name) for name in source.tensors):
        what = "tie_word_embeddings is false, and the checkpoint has no output head: transformers makes a random one."
        yield CheckFinding("missing", what, is_damage=False)


def value_findings(
    source: Source, experts: ExpertMap, layers: Collection[MoeLayer]
) -> Iterator[CheckFinding]:
    """Yield what is wrong with the values of routers, their biases, and norms of some MoE layers."""
    places = {decoder_layer(layer.name) for layer in layers}
    for name in experts.copied:
        place, ref = decoder_layer(name), source.tensors[name]
        if place not in places or ref.dtype not in FLOATS or not 0 < ref.num_bytes <= _MAX_BYTES:
            continue
        is_norm = _NORM.fullmatch(name[len(place) :]) is not None
        if not (is_router(name) or is_norm or "e_score_correction" in name):
            continue
        values = read_tensor(source, ref).float()
        if num := int((~values.isfinite()).sum()):
            what = "A tensor beside the experts holds NaN or infinity."
            yield CheckFinding("nan", what, "finite", f"{num}", where=name)
        elif is_router(name) and len(ref.shape) > 1 and not bool(values.any()):
            what = "A router is zero: it sends every token to the same experts."
            yield CheckFinding("zero", what, is_damage=False, where=name)
