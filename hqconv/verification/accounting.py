"""The `files` check's bookkeeping: every source tensor is converted, copied or dropped once, as the blocks say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from hqconv.verification.input_scales import is_static
from hqconv.verification.recorded_errors import check_changes
from hqconv.verification.result import CheckResult, compare_dicts, compare_names

_FACTS = {
    "layer": "layer",
    "num_experts": "num_experts",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "gated": "gated",
    "top_k": "top_k",
    "source_dtype": "dtype",
}
Placed = tuple[str, TensorRef]  # file of the artifact, and the position in it


def check_accounting(
    artifact: Artifact,
    blocks: Mapping[str, MoeLayer],
    copied: Mapping[str, Placed],
    config: Mapping[str, Any] | None,
    result: CheckResult,
) -> None:
    """Compare the manifest's `tensors` with its blocks and the shards; `copied`: the shards' ordinary tensors.

    With a `config` (given if there is no source), the names are mapped once more, as if they were a
    checkpoint's: the same blocks must come out.
    """
    tensors = artifact.manifest.tensors
    where = f"{names.MANIFEST}: tensors"
    seen: dict[str, str] = {}
    for kind in ("converted", "copied", "dropped"):
        for name in getattr(tensors, kind):
            if name in seen:
                result.add(f"{where}, tensor {name}", "A tensor is counted twice.", seen[name], kind)
            seen[name] = kind
    compare_names(f"{where}: copied", "tensor", tensors.copied, copied, result)
    _check_converted(artifact, blocks, tensors.converted, result)
    for name, layer in artifact.blocks.items():
        order = ["gate", "up"] if layer.gated else ["up"]
        if layer.w13_order != order:
            where = f"{names.MANIFEST}: {name}: w13_order"
            result.add(where, "The rows of w13 are in another order.", order, layer.w13_order)
        check_changes(name, layer, artifact.param_dtype, result)
    # The tensors of rank files and GGUF files say nothing by their names: only a source of that kind can map them.
    if config is not None and any(_is_known_by_names(block) for block in blocks.values()):
        _map_again(artifact, blocks, copied, config, result)


def _is_known_by_names(block: MoeLayer) -> bool:
    """Return whether the block came from a checkpoint, whose tensors lie in the block's module."""
    templates = (part.template for parts in block.parts.values() for part in parts.values())
    inside = any(template.startswith(f"{block.name}.") for template in templates)
    return inside or block.format.encoding not in KNOWN_BY_SOURCE


def _check_converted(
    artifact: Artifact, blocks: Mapping[str, MoeLayer], converted: Mapping[str, str], result: CheckResult
) -> None:
    where = f"{names.MANIFEST}: tensors: converted"
    by_block: dict[str, set[str]] = {name: set() for name in artifact.blocks}
    if not by_block:
        result.add(f"{names.MANIFEST}: blocks", "The artifact has no MoE block.", "at least one", "none")
    for name, block in converted.items():
        if block not in by_block:
            what = "A converted tensor belongs to a block that the manifest does not describe."
            result.add(f"{where}, tensor {name}", what, "one of its blocks", block)
        else:
            by_block[block].add(name)
    for block_name, one in blocks.items():
        found = by_block[block_name]
        if is_static(artifact, block_name):  # only the source's names tell which scales calibration missed
            scales = {name for name in found if name.endswith(names.INPUT_SCALE)}
            if not scales:
                what = "No tensor is recorded for the static activation scales."
                result.add(f"{where}: {block_name}", what, f"some named …{names.INPUT_SCALE}", "none")
            found = found - scales
        compare_names(f"{where}: {block_name}", "tensor", found, one.tensor_names(), result)


def _map_again(
    artifact: Artifact,
    blocks: Mapping[str, MoeLayer],
    copied: Mapping[str, Placed],
    config: Mapping[str, Any],
    result: CheckResult,
) -> None:
    known = {name: ref for block in blocks.values() for name, ref in source_tensors(block).items()}
    known |= {name: TensorRef(name, e.dtype, e.shape, 0, 0, 0) for name, (_, e) in copied.items()}
    block = next(iter(blocks.values()))
    # Only names are recorded of dropped tensors; one number fits in any block.
    unknown = (block.dtype, (1,), 0, 0, 0)
    tensors = artifact.manifest.tensors
    listed = (*tensors.converted, *tensors.copied, *tensors.dropped)
    refs = {name: known.get(name) or TensorRef(name, *unknown) for name in listed}
    try:
        experts = map_experts(refs, config, artifact.manifest.source.quantization_config)
        experts = as_converted(artifact, experts, refs)
    except HqconvError as error:
        what = "The manifest's tensors and config.json contradict each other."
        result.add(f"{names.MANIFEST}: {error.where}", what, error.expected, f"{error.what}: {error.found}")
        return
    compare_blocks(artifact, experts, "config.json and the tensors' names", result)
    if any(is_static(artifact, name) for name in artifact.blocks):
        compare_names(f"{names.MANIFEST}: tensors: converted", "tensor", tensors.converted, experts.converted, result)


def source_tensors(block: MoeLayer) -> dict[str, TensorRef]:
    """Source tensors of a block by name, as the manifest describes them; file and offset mean nothing."""
    return {
        part.template.format(expert=e): TensorRef(part.template.format(expert=e), part.dtype, part.shape, 0, 0, 0)
        for parts in block.parts.values()
        for part in parts.values()
        for e in (range(1) if part.is_stacked else range(block.num_experts))
    }


def as_converted(artifact: Artifact, experts: ExpertMap, order: Iterable[str]) -> ExpertMap:
    """Map the source with the artifact's choices: blocks copied unchanged, activation scales converted.

    Raises RequestError if these choices do not fit the source.
    """
    if artifact.left:
        experts = experts.without(artifact.left, order)
    return experts.with_input_scales({name for name in artifact.blocks if is_static(artifact, name)})


def compare_blocks(artifact: Artifact, experts: ExpertMap, origin: str, result: CheckResult) -> None:
    """Compare the manifest's blocks with the blocks of a mapping, fact by fact."""
    manifest = artifact.manifest
    if manifest.family != experts.family:
        found = manifest.family
        result.add(f"{names.MANIFEST}: family", f"The family is not that of {origin}.", experts.family, found)
    # Another version may phrase this differently.
    because, is_ours = manifest.family_chosen_because, manifest.hqconv_version == __version__
    if is_ours and because != experts.chosen_because:
        what = f"Why the family was chosen is not what {origin} say."
        result.add(f"{names.MANIFEST}: family_chosen_because", what, experts.chosen_because, because)
    mapped = {block.name: block for block in experts.blocks}
    for name in artifact.blocks:
        if name not in mapped:
            result.add(f"{names.MANIFEST}: {name}", f"A block is not in {origin}.", "absent", "present")
    for name, block in mapped.items():
        entry = artifact.blocks.get(name)
        if entry is None:
            expected = f"layer {block.index}, {block.num_experts} experts"
            result.add(
                f"block {name}", f"A MoE block of {origin} is missing in the artifact.", expected, "no such block"
            )
            continue
        facts = _facts(block, artifact)
        ours = {key: getattr(entry, key) for key in facts}
        ours |= entry.activation_function.to_dict(entry.gated)
        facts |= block.activation.to_dict(block.gated)
        what = f"A block's fact is not that of {origin}."
        compare_dicts(f"{names.MANIFEST}: {name}", what, facts, ours, result)


def _facts(block: MoeLayer, artifact: Artifact) -> dict[str, Any]:
    """Manifest entries that follow from a mapped block."""
    facts = {key: getattr(block, attribute) for key, attribute in _FACTS.items()}
    facts["source_format"] = block.format.to_dict()
    facts["source_parts"] = block.parts_to_dict()
    with suppress(VerificationError):  # reported already
        spec = artifact.spec
        facts["conversion"] = spec.conversion_of(block)
    return facts
