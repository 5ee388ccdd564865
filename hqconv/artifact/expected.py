"""Expected structure of an artifact, and its differences from an artifact that is there.

A spec and a source imply every structural key of the manifest, config.json, the index of shards, and every byte of the
headers of safetensors files. One comparison serves `verify`, resumed and finished conversions, updates and pushes.
Where no source is at hand, the records of the artifact stand for it: the parts of experts that the manifest describes,
the names of all tensors, and the headers of the copied ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hqconv.artifact.build import (
    Origin,
    artifact_config,
    planned_manifest,
    shard_index,
    with_fingerprints,
)
from hqconv.artifact.manifest import ABSENT, Difference, Manifest, differences, structure
from hqconv.artifact.reader import Artifact
from hqconv.errors import VerificationError
from hqconv.formats.source_format import KNOWN_BY_SOURCE
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import OutFile, OutputUnit, has_index
from hqconv.planning.plan import plan_units, with_dense
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas.artifact_names import CONFIG, GEMMS, admit_transformers
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_json


@dataclass(frozen=True)
class ExpectedArtifact:
    """Documents and safetensors files of an artifact. index: None for a single shard."""

    spec: ConversionSpec
    planned: Manifest
    config: dict[str, Any]
    index: dict[str, Any] | None
    files: dict[str, OutFile]

    @classmethod
    def of(
        cls, origin: Origin, experts: ExpertMap, spec: ConversionSpec, units: Sequence[OutputUnit]
    ) -> ExpectedArtifact:
        """Derive all documents from a source's facts and a plan's parts."""
        return cls(
            spec=spec,
            planned=planned_manifest(origin, experts, spec, units),
            config=artifact_config(origin, experts, spec),
            index=shard_index(units) if has_index(units, spec.layout) else None,
            files={file.path: file for unit in units for file in unit.files},
        )

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest's `structure`."""
        return structure(with_fingerprints(self.planned, self.spec))

    def identity(self) -> dict[str, Any]:
        """Return a short document that only the same request, source and Humming have: for journals."""
        planned = structure(self.planned)
        headers = hashlib.sha256()
        for file in self.files.values():
            headers.update(f"{file.path}\0{file.size_bytes}\0".encode() + file.header)
        structure_bytes = json.dumps(planned, sort_keys=True).encode()
        return {
            "humming-kernels version": self.planned.humming_kernels_version,
            "request": planned["request"],
            "source": planned["source"],
            CONFIG: self.config,
            "structure of the manifest": hashlib.sha256(structure_bytes).hexdigest(),
            "headers of the output files": headers.hexdigest(),
        }

    def difference(self, manifest: Manifest) -> Difference | None:
        """Return the first difference of a finished artifact's manifest; None where the artifact would be the same."""
        return next(differences(self.manifest, structure(manifest)), None)


# --- an artifact that is there -----------------------------------------------------------------------------


def expected_artifact(artifact: Artifact, source: Source | None) -> ExpectedArtifact:
    """Derive what an artifact must be: from its spec, and from its source or its own records about the source.

    Raises HqconvError where no plan can be made of them.
    """
    if source is not None:
        origin = Origin.of(source)
        recorded = artifact.manifest.source
        if None in (source.revision, recorded.revision):  # a folder may hold a repo's files
            entry = replace(origin.source, name=recorded.name, revision=recorded.revision)
            origin = replace(origin, source=entry)
        tensors = source.tensors
        experts = source.map_experts()
    else:
        origin = _recorded_origin(artifact)
        tensors = _recorded_tensors(artifact)
        experts = _recorded_experts(artifact, tensors, origin.config)
    if artifact.left:
        experts = experts.without(artifact.left, tensors)
    spec = artifact.spec
    if spec.dense:
        experts = with_dense(experts, tensors, spec)
    experts = experts.with_input_scales({layer.name for layer in spec.static_layers(experts)})
    return ExpectedArtifact.of(origin, experts, spec, plan_units(experts, tensors, spec))


def _recorded_origin(artifact: Artifact) -> Origin:
    try:
        config = read_json(artifact.fetched(CONFIG), MAX_LIST_BYTES)
    except (OSError, ValueError) as error:
        raise VerificationError(
            "A file cannot be read as JSON.", where=CONFIG, expected="a JSON object", found=error
        ) from error
    if not isinstance(config, dict):
        raise VerificationError(
            "A file cannot be read as JSON.", where=CONFIG, found=type(config).__name__
        )
    is_sorted = {name for name, layer in artifact.layers.items() if layer.intermediate_order}
    return Origin(artifact.manifest.source, admit_transformers(config), is_sorted)


def _recorded_tensors(artifact: Artifact) -> dict[str, TensorRef]:
    """Return the tensors of the source: experts' by the manifest, copied ones by the artifact's headers."""
    known: dict[str, TensorRef] = {}
    for path in artifact.manifest.files:
        if artifact.is_shard(path):
            known |= artifact.header(path)[0]
    for name in artifact.manifest.linear_layers or ():
        known |= dict(artifact.linear_weights(name))
    unknown = TensorRef("", "BF16", (1,), 0, 0, 0)
    for name in artifact.layers:
        layer = artifact.moe_layer(name)
        known |= {ref.name: ref for ref in _tensors_of(layer)}
        unknown = unknown._replace(dtype=layer.dtype)
    recorded = artifact.manifest.tensors
    missing = next((name for name in recorded.copied if name not in known), None)
    if missing is not None:
        raise VerificationError(
            "A tensor of the source was not copied.",
            where=f"tensor {missing}",
            expected="in a model shard",
            found=ABSENT,
        )
    # Of dropped tensors, and of activation scales, only names are recorded; one number fits in any layer.
    listed = (*recorded.converted, *recorded.copied, *recorded.dropped)
    return {name: known.get(name, unknown._replace(name=name)) for name in listed}


def _tensors_of(layer: MoeLayer) -> Iterator[TensorRef]:
    for parts in layer.slices.values():
        for part in parts.values():
            for expert in range(1 if part.is_stacked else layer.num_experts):
                name = part.template.format(expert=expert)
                yield TensorRef(name, part.dtype, part.shape, 0, 0, 0)


def _recorded_experts(
    artifact: Artifact, tensors: Mapping[str, TensorRef], config: Mapping[str, Any]
) -> ExpertMap:
    """Map the recorded names once more, as if they were a checkpoint's; GGUF's and rank files' say nothing."""
    layers = [artifact.moe_layer(name) for name in artifact.layers]
    if any(_is_known_by_names(layer) for layer in layers):
        return map_experts(tensors, config, artifact.manifest.source.quantization_config)
    recorded = artifact.manifest.tensors
    linear = artifact.manifest.linear_layers or {}
    dense = [name for name, layer in recorded.converted.items() if layer in linear]
    return ExpertMap(
        family=artifact.manifest.family,
        chosen_because="",
        layers=tuple(layers),
        converted={k: layer for k, layer in recorded.converted.items() if layer not in linear},
        copied=(*recorded.copied, *dense),
        dropped=recorded.dropped,
    )


def _is_known_by_names(layer: MoeLayer) -> bool:
    templates = [part.template for parts in layer.slices.values() for part in parts.values()]
    is_inside = any(template.startswith(f"{layer.name}.") for template in templates)
    return is_inside or layer.format.of("w2").encoding not in KNOWN_BY_SOURCE


# --- sentences about the commonest faults --------------------------------------------------------------------

# End of a difference's key → what a user is told.
SENTENCES = {
    "metadata: rank": "This is the file of another rank.",
    "dtype": "A tensor's bits are labelled with another dtype: a loader would reinterpret them.",
    "shape": "A tensor has another shape.",
    "data_offsets": "A tensor lies at other bytes.",
    "w13_order": "The rows of w13 are in another order.",
    "conversion": "The layer was not converted as its source's format asks for.",
    "intermediate_order": "The recorded order of intermediate columns is not that of the conversion.",
    "fingerprint": "The layout is that of another humming-kernels.",
    "revision": "The source is another commit than the one that was converted.",
    "header_sha256": "A file of the source has another header than the one that was converted.",
    "quantization_config": "The config does not describe the artifact's quantization.",
}


def sentence(key: str) -> str:
    """Return what a difference at a key means; the general sentence for uncommon ones."""
    found = (text for end, text in SENTENCES.items() if key == end or key.endswith(f": {end}"))
    return next(found, "A value is not what the request and the source give.")


def header_differences(artifact: Artifact, file: OutFile) -> Iterator[Difference]:
    """Compare the header of a file on disk with the planned one, byte for byte, and name what differs."""
    tensors, metadata = artifact.header(file.path)
    if artifact.header_digest(file.path) == hashlib.sha256(file.header).hexdigest():
        return
    planned = json.loads(file.header[8:])
    expected_metadata = planned.pop("__metadata__")
    data_start = len(file.header)
    found = {
        name: {
            "dtype": ref.dtype,
            "shape": list(ref.shape),
            "data_offsets": [
                ref.offset_bytes - data_start,
                ref.offset_bytes - data_start + ref.num_bytes,
            ],
        }
        for name, ref in tensors.items()
    }
    has_difference = False
    for key, expected, other in (
        ("metadata", _parsed(expected_metadata), _parsed(metadata)),
        ("tensor", planned, found),
    ):
        for difference in differences(expected, other, key):
            has_difference = True
            yield difference
    if not has_difference:
        yield Difference("header", "the bytes that a conversion writes", "other bytes")


def _parsed(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return metadata with layer configs as objects, so that their keys are compared."""
    parsed = dict(metadata)
    for gemm in GEMMS:
        try:
            parsed[gemm] = json.loads(metadata[gemm])
        except (KeyError, ValueError, RecursionError):
            continue
    return parsed
