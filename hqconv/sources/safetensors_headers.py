"""A checkpoint of safetensors files as its headers tell of it: what there is to convert. No torch is loaded for it."""

from __future__ import annotations

from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.sources.checkpoint import Checkpoint


class SafetensorsHeaders(Checkpoint):
    """A checkpoint whose experts are tensors of its own. See `hqconv.models.protocols.SourceHeaders`."""

    def map_experts(self) -> ExpertMap:
        """The experts, from the tensors' names, shapes and the config."""
        return map_experts(self.tensors, self.config, self.quantization)
