"""The `files` check's bookkeeping: every source tensor is converted, copied or dropped once, as the layers say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from hqconv import __version__
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError, VerificationError
from hqconv.formats.source_format import KNOWN_BY_SOURCE
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorRef
from hqconv.verification.figures import check_changes
from hqconv.verification.rank_headers import is_static
from hqconv.verification.result import CheckResult, compare_dicts, compare_names

_FACTS = {
    "layer": "index",
    "num_experts": "num_experts",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "gated": "gated",
    "top_k": "top_k",
}
Placed = tuple[str, TensorRef]  # file of the artifact, and the position in it


def consistent_layers(
    artifact: Artifact, result: CheckResult, indices: Collection[int] | None = None
) -> dict[str, MoeLayer]:
    """Return the layers of `indices` (None: all) by name, without those whose entries contradict each other."""
    layers = {}
    for name, entry in artifact.layers.items():
        if indices is None or entry.layer in indices:
            try:
                layers[name] = artifact.moe_layer(name)
            except VerificationError as error:
                result.add_error(error)
    return layers


def check_accounting(
    artifact: Artifact,
    layers: Mapping[str, MoeLayer],
    copied: Mapping[str, Placed],
    config: Mapping[str, Any] | None,
    result: CheckResult,
) -> None:
    """Compare the manifest's `tensors` with its layers and the shards; `copied`: the shards' ordinary tensors.

    With a `config` (given if there is no source), the names are mapped once more, as if they were a
    checkpoint's: the same layers must come out.
    """
    tensors = artifact.manifest.tensors
    where = f"{names.MANIFEST}: tensors"
    seen: dict[str, str] = {}
    for kind in ("converted", "copied", "dropped"):
        for name in getattr(tensors, kind):
            if name in seen:
                result.add(
                    f"{where}, tensor {name}", "A tensor is counted twice.", seen[name], kind
                )
            seen[name] = kind
    compare_names(f"{where}: copied", "tensor", tensors.copied, copied, result)
    _check_converted(artifact, layers, tensors.converted, result)
    for name, layer in artifact.layers.items():
        order = ["gate", "up"] if layer.gated else ["up"]
        if layer.w13_order != order:
            where = f"{names.MANIFEST}: {name}: w13_order"
            result.add(where, "The rows of w13 are in another order.", order, layer.w13_order)
        check_changes(name, layer, artifact.param_dtype, result)
    # The tensors of rank files and GGUF files say nothing by their names: only a source of that kind can map them.
    if config is not None and any(_is_known_by_names(layer) for layer in layers.values()):
        _map_again(artifact, layers, copied, config, result)


def _is_known_by_names(layer: MoeLayer) -> bool:
    """Return whether the layer came from a checkpoint, whose tensors lie in the layer's module."""
    templates = (part.template for parts in layer.slices.values() for part in parts.values())
    inside = any(template.startswith(f"{layer.name}.") for template in templates)
    return inside or layer.format.of("w2").encoding not in KNOWN_BY_SOURCE


def _check_converted(
    artifact: Artifact,
    layers: Mapping[str, MoeLayer],
    converted: Mapping[str, str],
    result: CheckResult,
) -> None:
    where = f"{names.MANIFEST}: tensors: converted"
    by_layer: dict[str, set[str]] = {name: set() for name in artifact.layers}
    if not by_layer:
        result.add(
            f"{names.MANIFEST}: blocks", "The artifact has no MoE layer.", "at least one", "none"
        )
    for name, layer in converted.items():
        if layer not in by_layer:
            what = "A converted tensor belongs to a layer that the manifest does not describe."
            result.add(f"{where}, tensor {name}", what, "one of its layers", layer)
        else:
            by_layer[layer].add(name)
    for layer_name, one in layers.items():
        found = by_layer[layer_name]
        if is_static(
            artifact, layer_name
        ):  # only the source's names tell which scales calibration missed
            scales = {name for name in found if name.endswith(names.SOURCE_SCALES)}
            if not scales:
                what = "No tensor is recorded for the static activation scales."
                result.add(
                    f"{where}: {layer_name}", what, f"some named …{names.INPUT_SCALE}", "none"
                )
            found = found - scales
        compare_names(f"{where}: {layer_name}", "tensor", found, one.tensor_names(), result)


def _map_again(
    artifact: Artifact,
    layers: Mapping[str, MoeLayer],
    copied: Mapping[str, Placed],
    config: Mapping[str, Any],
    result: CheckResult,
) -> None:
    known = {name: ref for layer in layers.values() for name, ref in source_tensors(layer).items()}
    known |= {name: TensorRef(name, e.dtype, e.shape, 0, 0, 0) for name, (_, e) in copied.items()}
    layer = next(iter(layers.values()))
    # Only names are recorded of dropped tensors; one number fits in any layer.
    unknown = (layer.dtype, (1,), 0, 0, 0)
    tensors = artifact.manifest.tensors
    listed = (*tensors.converted, *tensors.copied, *tensors.dropped)
    refs = {name: known.get(name) or TensorRef(name, *unknown) for name in listed}
    try:
        experts = map_experts(refs, config, artifact.manifest.source.quantization_config)
        experts = as_converted(artifact, experts, refs)
    except HqconvError as error:
        what = "The manifest's tensors and config.json contradict each other."
        result.add(
            f"{names.MANIFEST}: {error.where}", what, error.expected, f"{error.what}: {error.found}"
        )
        return
    compare_layers(artifact, experts, "config.json and the tensors' names", result)
    if any(is_static(artifact, name) for name in artifact.layers):
        compare_names(
            f"{names.MANIFEST}: tensors: converted",
            "tensor",
            tensors.converted,
            experts.converted,
            result,
        )


def source_tensors(layer: MoeLayer) -> dict[str, TensorRef]:
    """Source tensors of a layer by name, as the manifest describes them; file and offset mean nothing."""
    return {
        part.template.format(expert=e): TensorRef(
            part.template.format(expert=e), part.dtype, part.shape, 0, 0, 0
        )
        for parts in layer.slices.values()
        for part in parts.values()
        for e in (range(1) if part.is_stacked else range(layer.num_experts))
    }


def as_converted(artifact: Artifact, experts: ExpertMap, order: Iterable[str]) -> ExpertMap:
    """Map the source with the artifact's choices: layers copied unchanged, activation scales converted.

    Raises RequestError if these choices do not fit the source.
    """
    if artifact.left:
        experts = experts.without(artifact.left, order)
    return experts.with_input_scales(
        {name for name in artifact.layers if is_static(artifact, name)}
    )


def compare_layers(
    artifact: Artifact, experts: ExpertMap, origin: str, result: CheckResult, *, is_own: bool = True
) -> None:
    """Compare the manifest's layers with the layers of a mapping, fact by fact.

    is_own: they are of the artifact's own source; of an ancestor's, formats and tensors are others.
    """
    manifest = artifact.manifest
    if manifest.family != experts.family:
        found = manifest.family
        result.add(
            f"{names.MANIFEST}: family",
            f"The family is not that of {origin}.",
            experts.family,
            found,
        )
    # Another version may phrase this differently.
    because, is_ours = (
        manifest.family_chosen_because,
        is_own and manifest.hqconv_version == __version__,
    )
    if is_ours and because != experts.chosen_because:
        what = f"Why the family was chosen is not what {origin} say."
        result.add(
            f"{names.MANIFEST}: family_chosen_because", what, experts.chosen_because, because
        )
    mapped = {layer.name: layer for layer in experts.layers}
    for name in artifact.layers:
        if name not in mapped:
            result.add(
                f"{names.MANIFEST}: {name}", f"A layer is not in {origin}.", "absent", "present"
            )
    for name, layer in mapped.items():
        entry = artifact.layers.get(name)
        if entry is None:
            expected = f"layer {layer.index}, {layer.num_experts} experts"
            result.add(
                f"layer {name}",
                f"An MoE layer of {origin} is missing in the artifact.",
                expected,
                "no such layer",
            )
            continue
        facts = _facts(layer, artifact, is_own=is_own)
        facts |= layer.activation.to_dict(layer.gated)
        ours = {
            key: value
            for key, value in entry.to_dict().items()
            if key in facts or key.startswith("activation_is")
        }
        what = f"A layer's fact is not that of {origin}."
        compare_dicts(f"{names.MANIFEST}: {name}", what, facts, ours, result)


def _facts(layer: MoeLayer, artifact: Artifact, *, is_own: bool) -> dict[str, Any]:
    """Manifest entries that follow from a mapped layer."""
    facts = {key: getattr(layer, attribute) for key, attribute in _FACTS.items()}
    if not is_own:
        return facts
    facts["source_dtype"] = layer.dtype
    facts["source_format"] = layer.format.to_dict()
    facts["source_parts"] = layer.parts_to_dict()
    with suppress(VerificationError):  # reported already
        facts["conversion"] = artifact.spec.encoding_of(layer).conversion
    return facts
