"""vLLM's quantization config of kernel artifacts: methods of the experts' layers, quantization of the other layers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.platforms import current_platform

from hqconv.errors import RequestError
from hqconv.io.hub import is_commit
from hqconv.schemas.artifact_names import FORMAT_VERSION, MIXED_VERSION
from hqconv.serving.artifact_view import ArtifactLocation, ArtifactView, open_artifact_view
from hqconv.serving.parameter_loader import ParameterLoader
from hqconv.serving.server_compatibility import check_machine, no_layer
from hqconv.serving.vllm.layer_names import find_layer
from hqconv.serving.vllm.other_layers import SourceProxy, dense_config
from hqconv.serving.vllm.refusals import check_alike, no_layers, warn_of_untested

logger = logging.getLogger("vllm.hqconv")


class HqconvConfig(SourceProxy):
    """`quant_method: hqconv`. Experts come from rank files; every other layer is the source's own quantization's."""

    own_state = SourceProxy.own_state | {"config_dict", "renamed", "loader", "view", "movable"}
    view: ArtifactView | None = None

    def __init__(self, config_dict: dict[str, Any]) -> None:
        """config_dict: the `quantization_config` of an artifact's config.json."""
        super().__init__()
        self.config_dict = config_dict
        self.renamed: dict[str, str] = {}  # name of a layer in vLLM's model → layer
        self.loader = ParameterLoader(logger)
        self.movable: list[str] = []  # layers whose experts the server moves between ranks

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the config for vLLM, which sends and copies configs; loaded state stays in its process."""
        return _restored, ({key: value for key, value in vars(self).items() if key != "loader"},)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HqconvConfig:
        """Create the config of an artifact. Raises RequestError for one of a newer hqconv."""
        found = config.get("format_version")
        if found not in (FORMAT_VERSION, MIXED_VERSION):
            raise RequestError(
                "The artifact was made by another version of hqconv.",
                where="config.json: quantization_config: format_version",
                expected=MIXED_VERSION,
                found=found,
                remedy="Upgrade hqconv in the server's environment.",
            )
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the manifest and refuse artifacts that cannot be served; vLLM calls it with the model's folder or repo.

        Raises the errors of `open_artifact_view` and `check_machine`.
        """
        warn_of_untested()
        self.view = open_artifact_view(ArtifactLocation(model_name, revision))
        capability = current_platform.get_device_capability()
        if capability is not None:
            check_machine(self.view, capability.to_int())
        self.renamed = {name: name for name in (*self.view.layers, *self.view.left)}
        config_dict = self.config_dict.get("source_quantization_config")
        self.set_dense(
            None
            if config_dict is None
            else dense_config(config_dict, self.view.location, hf_config)
        )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Note the model classes' names of the layers; vLLM's model classes call it, outer ones first."""
        for name, layer in list(self.renamed.items()):
            for new in hf_to_vllm_mapper.apply_list([name]):
                if self.renamed.setdefault(new, layer) != layer:
                    self.renamed[new] = ""  # two layers: ambiguous name
        if self.dense is not None:
            self.dense.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer. Raises RequestError for experts that the artifact lacks, or has otherwise."""
        self._pin_weights()
        if isinstance(layer, RoutedExperts):
            from hqconv.serving.vllm.moe_method import (
                HqconvMoEMethod,
            )  # with all of vLLM's Humming layers

            assert self.view is not None, "vLLM did not say where the model is"
            indices = {name: known.index for name, known in self.view.layers.items()}
            name = find_layer(prefix, self.renamed, indices)
            if name and layer.moe_config.moe_parallel_config.enable_eplb:
                self.movable.append(name)
                check_alike(self.view, self.movable)
            if name in self.view.left:
                found = None if self.dense is None else self.dense.get_quant_method(layer, prefix)
                return found or UnquantizedFusedMoEMethod(layer.moe_config)
            if not name or self.loader.claimed.setdefault(name, prefix) != prefix:
                raise no_layer(self.view, prefix)
            return HqconvMoEMethod(self.loader, self.view, self.view.layers[name], layer)
        found = None if self.dense is None else self.dense.get_quant_method(layer, prefix)
        if found is None and isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return found

    def _pin_weights(self) -> None:
        """Have vLLM fetch the other weights at the manifest's commit too, if it did not find out the branch's commit.

        vLLM itself resolves a revision once, unless the Hub failed just then (transformers_utils/repo_utils.py,
        `resolve_revision`); before its loader runs, the first layer asks for its method.
        """
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if model is None or self.view is None or self.view.location.commit is None:
            return
        is_resolved = hasattr(model.revision, "resolved") or is_commit(model.revision)
        if model.model == self.view.location.name and not is_resolved:
            model.revision = self.view.location.commit

    def get_cache_scale_mapper(self) -> Any:
        """Mapper of the source's quantization for KV cache scales; called before a whole model is loaded.

        Raises RequestError if the model created none of the artifact's layers: they would stay unfilled.
        """
        if self.view is not None and not self.loader.claimed and not _is_part_of_model():
            raise no_layers(self.view)
        return (self.dense or QuantizationConfig).get_cache_scale_mapper()


def _restored(state: dict[str, Any]) -> HqconvConfig:
    """Restore a config that was sent or copied."""
    config = HqconvConfig.__new__(HqconvConfig)
    config.__dict__.update(state, loader=ParameterLoader(logger))
    return config


def _is_part_of_model() -> bool:
    """Return whether this process has only some of the model's layers, maybe without experts."""
    config = get_current_vllm_config_or_none()
    return config is None or config.parallel_config.pipeline_parallel_size > 1
