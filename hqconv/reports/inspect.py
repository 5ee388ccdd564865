"""Finds out what a folder or a repo is, and describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import is_artifact, is_unfinished
from hqconv.errors import VerificationError
from hqconv.io.checkpoint_files import readable
from hqconv.models.expert_map import map_experts
from hqconv.reports.artifact import describe_artifact, describe_unfinished
from hqconv.reports.documents import quant_method
from hqconv.reports.source import describe_source
from hqconv.schemas.artifact_names import MANIFEST
from hqconv.sources.checkpoint import Checkpoint
from hqconv.sources.opening import SourceLocation, locate_source, open_headers


def inspect(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """What a model folder, a Hub repo or an artifact holds, in words; reads headers only. See `hqconv.inspect`.

    Raises VerificationError where the manifest is damaged, or config.json is an artifact's and there is none.
    """
    root = Path(path)
    if revision is None and is_artifact(root):
        return describe_artifact(root)
    if revision is None and is_unfinished(root):
        return describe_unfinished(root)
    with readable(path):
        place = locate_source(path, revision)
    if place.words and is_artifact(place.root):
        return describe_artifact(place.root, place.words["repo_id"], place.words["listing"])
    if place.kind == "gguf":
        with open_headers(path) as source:
            return describe_source(source, source.map_experts)
    with _opened(place, path, revision) as checkpoint:
        if quant_method(checkpoint.quantization) == "hqconv":  # the manifest is lost
            raise VerificationError(
                "The artifact has lost its manifest.",
                where=str(checkpoint.root),
                expected=MANIFEST,
                found="a config.json that hqconv made, and no manifest",
                remedy="Copy it from where it is whole, or convert again.",
            )
        words = (checkpoint.tensors, checkpoint.config, checkpoint.quantization)
        return describe_source(checkpoint, lambda: map_experts(*words))


def _opened(place: SourceLocation, path: str | Path, revision: str | None) -> Checkpoint:
    if place.words:
        with readable(path):
            return Checkpoint(place.root, name=place.name, **place.words)
    return Checkpoint.open(str(path), revision)
