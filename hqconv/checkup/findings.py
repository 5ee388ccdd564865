"""Findings of a check: their class, their documents, and those from headers, config and tensors beside the experts.

Of the experts only activation scales are read here. Legend: d the checkpoint's values, w the original's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hqconv.checkup.matrices import CheckFinding, Matrix, compare, decoded, is_one
from hqconv.errors import InputError, RequestError, first_few, plural
from hqconv.models.config_facts import MEANT_KEYS, function_changes
from hqconv.models.expert_map import ExpertMap
from hqconv.models.source_protocol import INPUT_SCALE, DenseTensors, Source, read_module, read_rows
from hqconv.models.tensor_names import (
    INTEGERS,
    decoder_layer,
    header_faults,
    is_end,
    is_norm,
    is_router,
    missing_siblings,
)
from hqconv.planning.checks import check_matrix_scales
from hqconv.planning.notices import loader_notices, source_notices
from hqconv.schemas.artifact_names import text_config
from hqconv.schemas.tensors import TensorRef

_PIECE = 1 << 22  # values of a tensor beside the experts that are read at once


def grouped(findings: Iterable[CheckFinding]) -> list[dict[str, Any]]:
    """Return JSON documents; findings of one kind in a projection of a layer, or beside the experts, are one."""
    groups: dict[tuple[str, ...], list[CheckFinding]] = {}
    for finding in findings:
        key = (finding.kind, finding.what, finding.place.layer, finding.place.role)
        groups.setdefault(key, []).append(finding)
    return [_document(group) for group in groups.values()]


def _document(group: list[CheckFinding]) -> dict[str, Any]:
    first = group[0]
    place = group[0].place
    experts = sorted({finding.place.expert for finding in group if finding.place.expert >= 0})
    where = first_few([finding.where for finding in group if finding.where])
    found = first.found
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
    for kind, where, text in loader_notices(source, experts):
        yield CheckFinding(kind, text, is_damage=False, where=where)
    try:
        for text in check_matrix_scales(source, experts.layers):
            yield CheckFinding("zero", text, is_damage=False)
    except InputError as error:
        yield CheckFinding(
            "scale-range", error.what, error.expected, error.found, where=error.where
        )
    for name, lacking, num_layers, is_odd in missing_siblings(experts.layers, source.tensors):
        found = f"absent in {plural(len(lacking), 'layer')} of {num_layers}"
        where = first_few([place + name for place in lacking])
        yield CheckFinding(
            "missing",
            "A tensor is missing that the other MoE layers have: a server may fill it with anything.",
            "present",
            found,
            is_odd,
            where,
        )


def own_findings(dense: DenseTensors) -> Iterator[CheckFinding]:
    """Yield what the tensors beside the experts tell alone."""
    refs = [ref for parts in dense.modules.values() for ref in parts.values() if dense.is_read(ref)]
    for ref in (*dense.input_scales, *refs):
        yield from _own_faults(dense, ref)
    text = text_config(dense.source.config)
    for name, what, expected, found in header_faults(dense.modules.values(), text):
        yield CheckFinding("broken", what, expected, found, where=name)


def _own_faults(dense: DenseTensors, ref: TensorRef) -> Iterator[CheckFinding]:
    num_bad = 0
    least = math.inf
    most = -math.inf
    for piece in read_rows(dense.source, ref, _PIECE):
        num_bad += int((~piece.isfinite()).sum())
        least = min(least, float(piece.min()))
        most = max(most, float(piece.max()))
    if num_bad:
        yield CheckFinding(
            "nan",
            "A tensor beside the experts holds NaN or infinity.",
            "finite",
            str(num_bad),
            where=ref.name,
        )
    elif INPUT_SCALE.search(ref.name) and least <= 0:
        yield CheckFinding(
            "scale-range",
            "A scale of activations is not usable.",
            "above 0",
            f"{least:.4g}",
            where=ref.name,
        )
    elif least == most and ref.name.endswith(".weight") and (most == 0 or len(ref.shape) > 1):
        is_damage = bool(most) or is_end(ref.name)  # a zero norm or projection may be meant
        yield CheckFinding(
            "constant" if is_damage else "zero",
            "All weights of a tensor beside the experts are the same number.",
            "",
            f"{most:.4g}",
            is_damage,
            where=ref.name,
        )


# --- beside the original's -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Beside:
    """Findings about the tensors beside the experts, with the original.

    names: of tensors that were compared. changed: findings by tensor. balanced: tensors whose change others make up
    for. norms: factors of each norm that changed, of its weights and of these plus 1, which some families apply, by
    decoder layer; of a layer whose norms were not compared there is no entry. routers: the names of those whose rows
    were moved, with the original's number of each row, by decoder layer. unmoved: layers with experts that were not
    moved with them.
    """

    changed: dict[str, CheckFinding] = field(default_factory=dict)
    balanced: set[str] = field(default_factory=set)
    norms: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    routers: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    unmoved: set[str] = field(default_factory=set)

    def balances(self, place: str, factors: torch.Tensor) -> bool:
        """Return whether a norm of a decoder layer holds the inverse of factors of columns."""
        for name, inverses in self.norms.get(place, {}).items():
            is_long = inverses.size(1) == len(factors)
            if is_long and any(is_one(inverse * factors, factors) for inverse in inverses):
                self.balanced.add(name)
                return True
        return False

    def add(
        self, name: str, d: torch.Tensor, w: torch.Tensor, rounding: float, resolution: float
    ) -> None:
        """Take a piece of a tensor, float32 [rows, columns]. rounding: relative, of each number; resolution: of all."""
        place = decoder_layer(name)
        d = d.where(w.isfinite(), 0.0).nan_to_num(0.0, 0.0, 0.0)
        w = w.nan_to_num(0.0, 0.0, 0.0)
        moved = self.routers.get(place)
        if moved is not None and d.shape == (1, len(moved[1])):
            w = w[:, moved[1]]
        if is_norm(name):
            self.norms.setdefault(place, {})
        self.names.add(name)
        is_near = bool((d - w).norm() <= 3 * resolution * w.norm())
        if name in self.changed or is_near or torch.allclose(d, w, rounding, 1e-5 * rounding):
            return
        result = compare("", Matrix(name, d, resolution), {"": Matrix(name, w, resolution)})
        change = result.change
        fault = result.change_fault
        if len(d) == 1 and is_norm(name):
            what = "A norm is not the original's, and no matrix behind it makes up for it."
            fault = CheckFinding("stale", what)
            self.norms[place][name] = torch.cat([d / w, (d + 1) / (w + 1)]).nan_to_num(1.0)
        elif len(d) == 1 or change is None or fault is None:  # factors explain every vector
            what = "A tensor is not the original's: another version of it?"
            found = f"a cosine of {1 / math.hypot(1, result.tangent):.4f}"
            # below 2**-8 it was rounded once more
            stale = CheckFinding("stale", what, "", found, result.tangent > 2.0**-8)
            fault = next(iter(result.faults), stale)
        elif change.row_order is not None and is_router(name):
            self.routers[place] = (name, change.row_order.numbers)
        elif self.balances(place, change.columns * change.rows.median()) or (
            fault.kind == "scales" and not (is_router(name) and place in self.norms)
        ):
            self.balanced.add(name)
        self.changed[name] = replace(fault, where=name)

    def findings(self) -> Iterator[CheckFinding]:
        """Yield the findings, once it is known what the experts make up for."""
        for place in self.routers.keys() - self.unmoved:
            self.balanced.add(self.routers[place][0])
        kinds = [finding.kind for finding in self.changed.values()]
        is_version = 2 * kinds.count("stale") > len(self.names)  # of the whole model
        for name, finding in self.changed.items():
            if name in self.balanced:
                what = "A tensor is scaled or moved, which changes no output if its neighbours are by the inverse."
                finding = replace(finding, what=what, is_damage=False)
            elif finding.kind == "stale" and is_version:
                finding = replace(finding, is_damage=False)
            yield finding


def compare_dense(dense: DenseTensors, original: DenseTensors) -> Beside:
    """Compare the tensors beside the experts with the original's."""
    beside = Beside()
    for module in dense.common(original):
        ours = dense.modules[module]
        theirs = original.modules[module]
        if dense.is_coded_otherwise(original, module):
            _compare_decoded(beside, dense, original, module)
            continue
        for part, ref in sorted(ours.items(), key=lambda item: -len(item[1].shape)):
            if part in theirs and dense.is_read(ref) and original.is_read(theirs[part]):
                _compare_tensor(beside, dense, ref, original, theirs[part])
    for name, is_renamed in dense.lost(original):
        what = "The original has a tensor beside the experts that the checkpoint lacks."
        fault = CheckFinding("missing", what, is_damage=not is_renamed, where=name)
        beside.changed[name] = fault
    return beside


def _compare_decoded(
    beside: Beside, dense: DenseTensors, original: DenseTensors, module: str
) -> None:
    """Compare the weight of a module that is quantized in one of both, or in both otherwise."""
    modules = [(given, given.modules[module]) for given in (dense, original)]
    name = next(iter(modules[0][1].values())).name
    weights = [parts["weight"] for _, parts in modules if "weight" in parts]
    shape = next((ref.shape for ref in weights if ref.dtype not in INTEGERS), ())
    if len(shape) != 2 or math.prod(shape) > dense.max_weights:
        return
    matrices = []
    for given, parts in modules:
        num_bits = 8 * max(ref.num_bytes for ref in parts.values()) / math.prod(shape)
        with suppress(InputError, RequestError):  # in no format that is known
            matrix = read_module(given.source, given.declared, parts, shape)
            matrices.append(decoded(matrix, num_bits))
    if len(matrices) == 2:
        resolution = math.hypot(*(matrix.resolution for matrix in matrices))
        beside.add(name, matrices[0].values, matrices[1].values, 0.0, resolution)


def _compare_tensor(
    beside: Beside, dense: DenseTensors, ref: TensorRef, original: DenseTensors, other: TensorRef
) -> None:
    """Compare a tensor with the original's, up to the first piece that differs."""
    is_padded = ref.shape[1:] == other.shape[1:] != ()  # a vocabulary may be
    if not is_padded and math.prod(ref.shape) != math.prod(other.shape):
        what = "A tensor has another shape than the original's."
        texts = str(other.shape), str(ref.shape)
        beside.changed[ref.name] = CheckFinding("broken", what, *texts, where=ref.name)
        return
    rounding = 2.0**-7 if ref.dtype != other.dtype and "correction" not in ref.name else 0.0
    resolution = 0.0
    if dense.is_decoded or original.is_decoded:
        resolution = 0.1 if len(ref.shape) > 1 else 0.003
    pieces = (read_rows(dense.source, ref, _PIECE), read_rows(original.source, other, _PIECE))
    for d, w in zip(*pieces, strict=False):
        w = w.reshape(-1, d.size(1))
        num_rows = min(len(d), len(w))
        beside.add(ref.name, d[:num_rows], w[:num_rows], rounding, resolution)


def config_findings(source: Source, original: Source) -> Iterator[CheckFinding]:
    """Yield keys of config.json that change what the model computes, and are not the original's."""
    for key, expected, found in function_changes(source.config, original.config):
        is_damage = None not in (expected, found) and not MEANT_KEYS.search(key)
        texts = repr(expected), repr(found)
        yield CheckFinding(
            "config",
            f"config.json is not the original's: {key} changes what the model computes.",
            *texts,
            is_damage,
            where=f"config.json: {key}",
        )
