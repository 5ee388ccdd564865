"""What an artifact has beside its weights: the source's other files, config.json, the index, and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.build import artifact_config
from hqconv.artifact.manifest_digest import json_bytes
from hqconv.artifact.model_card import card_bytes
from hqconv.io.durable_files import FileRecord, copy_whole, write_whole
from hqconv.models.protocols import Source
from hqconv.planning.plan import ConversionPlan
from hqconv.schemas import artifact_names


def write_beside(source: Source, plan: ConversionPlan, root: Path) -> list[FileRecord]:
    """Copy the tokenizer and the like, and write config.json and the index of the ordinary shards.

    From the Hub they are fetched first. Raises InputError where a file of the source cannot be read or is not what its
    manifest lists, OutputError, or NetworkError.
    """
    source.fetch(plan.other_files)
    written = [copy_whole(source.root / name, root, name) for name in plan.other_files]
    for record in written:
        source.guard.compare(record.path, record.sha256)
    if plan.spec.encoding.importance is not None:
        written.append(write_whole(root, artifact_names.IMPORTANCE, plan.spec.encoding.importance.data))
    written.append(write_whole(root, artifact_names.CONFIG, json_bytes(artifact_config(source, plan))))
    if artifact_names.INDEX in plan.paths:
        refs = {name: ref for unit in plan.units for file in unit.files for name, ref in file.tensors.items()}
        total = sum(refs[name].num_bytes for name in plan.weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(plan.weight_map.items()))}
        written.append(write_whole(root, artifact_names.INDEX, json_bytes(index)))
    return written


def write_card(source: Source, words: Mapping[str, Any], root: Path) -> FileRecord:
    """Write the model card. words: the manifest's, its files aside."""
    return write_whole(
        root, artifact_names.CARD, card_bytes(words, source.loose.card, is_artifact=source.guard.is_held)
    )
