"""Description of a checkpoint as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hqconv.errors import RequestError
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.source_facts import SourceFacts, source_facts
from hqconv.planning.source_schema import direct_schemas
from hqconv.planning.spec import default_param_dtype
from hqconv.reports.documents import SHAPE_KEYS, Words, layer_runs, quant_method
from hqconv.schemas.grid import slice_unit, working_tp_sizes
from hqconv.schemas.weight_schema import PRESETS, WeightSchema


def describe_source(checkpoint: Source) -> Words:
    """Describe a checkpoint: sizes, formats, family and layers, or why it cannot be converted.

    Raises InputError if the checkpoint contradicts itself.
    """
    document: Words = {"kind": "source", **source_to_dict(source_facts(checkpoint, None))}
    document["bytes_by_dtype"] = _bytes_by_dtype(checkpoint)
    try:
        experts = checkpoint.map_experts()
    except RequestError as error:
        return {**document, "convertible": False, "obstacle": error.message()}
    facts = source_facts(checkpoint, experts)
    return {
        **document,
        "convertible": True,
        "family": experts.family,
        "family_chosen_because": experts.chosen_because,
        "tensors": tensors_to_dict(facts, experts),
        "num_bytes_experts": facts.bytes_of["converted"],
        "blocks": layer_runs({layer.name: layer_to_dict(layer) for layer in experts.layers}),
        "direct_schemas": direct_schemas(experts, default_param_dtype(checkpoint.config, experts)),
        "tp_sizes": {name: _tp_sizes(experts.layers, schema) for name, schema in PRESETS.items()},
    }


def source_to_dict(facts: SourceFacts) -> Words:
    """Facts of a checkpoint that need no mapping of its experts."""
    return {
        "name": facts.repo_id or facts.name,
        "folder": facts.folder,
        "revision": facts.revision,
        "model_type": facts.model_type,
        "quant_method": quant_method(facts.quantization),
        "num_files": facts.num_files,
        "num_tensors": facts.num_tensors,
        "num_bytes": facts.num_bytes,
    }


def tensors_to_dict(facts: SourceFacts, experts: ExpertMap) -> Words:
    """Numbers of converted, copied and dropped tensors, and the reasons."""
    kinds = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
    document: Words = {
        kind: {"num_tensors": len(names), "num_bytes": facts.bytes_of[kind]} for kind, names in kinds.items()
    }
    document["dropped"]["reasons"] = dict(experts.dropped)
    return document


def layer_to_dict(layer: MoeLayer) -> Words:
    """Facts of a layer by which `layer_runs` groups layers."""
    document = {key: getattr(layer, key) for key in SHAPE_KEYS if hasattr(layer, key)}
    document |= layer.activation.to_dict(layer.gated)
    return document | {"source_dtype": layer.dtype, "source_format": layer.format.describe()}


def _bytes_by_dtype(checkpoint: Source) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        totals[ref.dtype] += ref.num_bytes
    return dict(totals.most_common())


def _tp_sizes(layers: Iterable[MoeLayer], schema: WeightSchema) -> list[int]:
    """TP sizes that work for every layer."""
    sizes: list[set[int]] = []
    for hidden, inner, pads in {(b.hidden_size, b.intermediate_size, b.pads_last_rank) for b in layers}:
        works = working_tp_sizes(inner, schema, pads_last_rank=pads)
        sizes.append(set() if hidden % slice_unit(schema) else set(works))
    return sorted(set.intersection(*sizes)) if sizes else []
