"""Description of a model folder, a Hub repo or an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import is_artifact, is_unfinished
from hqconv.errors import VerificationError
from hqconv.io.checkpoint_files import readable
from hqconv.reports.artifact import describe_artifact, describe_unfinished
from hqconv.reports.documents import quant_method
from hqconv.reports.source import describe_source
from hqconv.schemas.artifact_names import MANIFEST
from hqconv.sources.opening import locate_source, open_location


def inspect(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Describe a model folder, a Hub repo or an artifact; reads headers only. See `hqconv.inspect`.

    Raises VerificationError if the manifest is damaged, or config.json is an artifact's and there is no manifest.
    """
    root = Path(path)
    if revision is None and is_artifact(root):
        return describe_artifact(root)
    if revision is None and is_unfinished(root):
        return describe_unfinished(root)
    with readable(path):
        location = locate_source(path, revision)
        if location.repo_id is not None and is_artifact(location.root):
            return describe_artifact(location.root, location.repo_id, location.listing)
        with open_location(location, is_lazy=True) as source:
            if quant_method(source.quantization) == "hqconv":  # the manifest is lost
                raise VerificationError(
                    "The artifact has lost its manifest.",
                    where=str(source.root),
                    expected=MANIFEST,
                    found="a config.json that hqconv made, and no manifest",
                    remedy="Copy it from where it is whole, or convert again.",
                )
            return describe_source(source)
