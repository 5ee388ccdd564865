"""Facts about the source that plans and inspections report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.models.expert_map import ExpertMap
from hqconv.models.source_protocol import Source


@dataclass(frozen=True)
class SourceFacts:
    """A source. name: of the folder, or of the repo without the organisation. bytes_of: converted, copied, dropped."""

    name: str
    repo_id: str | None
    revision: str | None
    folder: str
    model_type: str | None
    quantization: Mapping[str, Any] | None
    num_files: int
    num_tensors: int
    num_bytes: int
    bytes_of: Mapping[str, int]

    @property
    def origin(self) -> dict[str, str | None]:
        """Return the source's entry of a manifest: its name, and the commit of a Hub repo."""
        return {"name": self.repo_id or self.name, "revision": self.revision}


def source_facts(checkpoint: Source, experts: ExpertMap | None) -> SourceFacts:
    """Return the facts of an opened source; `experts` None where they cannot be mapped."""
    kinds = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped} if experts else {}
    tensors = checkpoint.tensors
    return SourceFacts(
        name=checkpoint.name,
        repo_id=checkpoint.repo_id,
        revision=checkpoint.revision,
        folder=str(checkpoint.root),
        model_type=checkpoint.config.get("model_type"),
        quantization=checkpoint.quantization,
        num_files=len(checkpoint.files),
        num_tensors=len(tensors),
        num_bytes=checkpoint.total_bytes,
        bytes_of={kind: sum(tensors[name].num_bytes for name in names) for kind, names in kinds.items()},
    )
