"""What an artifact says of itself: the words of hqconv.json and config.json, from the plan and what was measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from hqconv import __version__
from hqconv.planning.encoding import RTN
from hqconv.planning.groups import PlannedBlock
from hqconv.planning.plan import Plan
from hqconv.schemas import artifact
from hqconv.sources.source import Source


@dataclass(frozen=True)
class FileRecord:
    """A finished output file."""

    path: str
    size_bytes: int
    sha256: str


def artifact_config(source: Source, plan: Plan) -> dict[str, Any]:
    """The source's config.json plus the artifact's quantization_config; in the kernel layout not for transformers."""
    request = plan.request
    words = copy.deepcopy(source.config)
    if request.layout == artifact.CHECKPOINT:
        names = [block.name for block in plan.experts.blocks]
        words["quantization_config"] = artifact.humming_quantization_config(request.schema, names)
    else:
        words = artifact.refuse_transformers(words)
        words["quantization_config"] = artifact.hqconv_quantization_config(
            request.schema, request.input_schema, request.sm_version, source.quantization
        )
    return words


def request_words(source: Source, plan: Plan) -> dict[str, Any]:
    """What the manifest says before anything is converted: versions, source and request."""
    request = plan.request
    return {
        "format_version": artifact.FORMAT_VERSION,
        "hqconv_version": __version__,
        "humming_kernels_version": version("humming-kernels"),
        "source": {
            "name": source.repo_id or source.name,
            "revision": source.revision,
            "quantization_config": source.quantization,
            "index_sha256": source.index_sha256,
            "files": [
                {"name": f.name, "size_bytes": f.size_bytes, "header_sha256": f.header_sha256}
                for f in source.files
            ],
        },
        "layout": request.layout,
        "schema_name": request.schema.name,
        "weight_schema": request.schema.humming_fields(),
        "input_schema": request.input_schema,
        **({} if request.quantizer == RTN else {"quantizer": request.quantizer}),
        "dtype": request.param_dtype,
        "target": f"sm{request.sm_version}",
        "tp": request.grid.tp,
        "ep": request.grid.ep,
        "expert_placement": request.grid.placement,
        "redundant_experts": request.grid.redundant,
        "family": plan.experts.family,
        "family_chosen_because": plan.experts.chosen_because,
    }


def build_manifest(
    source: Source, plan: Plan, measured: Mapping[str, dict[str, Any]], files: Iterable[FileRecord]
) -> dict[str, Any]:
    """The words of hqconv.json, in an order that does not depend on how the conversion went.

    `measured`: each block's quantization error. `files`: every file but the manifest.
    """
    return {
        **request_words(source, plan),
        "blocks": {block.name: _block_words(block, measured[block.name]) for block in plan.blocks},
        "files": {
            record.path: {"size_bytes": record.size_bytes, "sha256": record.sha256}
            for record in sorted(files, key=lambda record: record.path)
        },
        "tensors": {
            "converted": plan.experts.converted,
            "copied": list(plan.experts.copied),
            "dropped": plan.experts.dropped,
        },
    }


def _block_words(group: PlannedBlock, errors: dict[str, Any]) -> dict[str, Any]:
    block = group.block
    words: dict[str, Any] = {
        "layer": block.layer,
        "num_experts": block.num_experts,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "activation": block.activation,
        "gated": block.gated,
        "top_k": block.top_k,
        "w13_order": ["gate", "up"] if block.gated else ["up"],
        "source_dtype": block.dtype,
        "source_format": block.format.words(),
        "source_parts": block.parts_words(),
        "conversion": group.encoding.conversion,
        "quantization_error": errors,
    }
    for gemm, form in group.forms.items():
        words[gemm] = {
            "shape_n": form.config["shape_n"],
            "shape_k": form.config["shape_k"],
            "pad_shape_n": form.config["pad_shape_n"],
            "pad_shape_k": form.config["pad_shape_k"],
            "flags": form.flags,
        }
    return words


def json_bytes(words: Mapping[str, Any]) -> bytes:
    """A JSON document as it is written into an artifact."""
    return (json.dumps(words, indent=2, ensure_ascii=False) + "\n").encode()
