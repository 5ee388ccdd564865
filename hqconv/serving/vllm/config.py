"""vLLM's quantization config of kernel artifacts: methods of the experts' layers, quantization of the other layers."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from hqconv.errors import RequestError
from hqconv.io.hub import is_commit
from hqconv.schemas import artifact_names as names
from hqconv.schemas.artifact_names import FORMAT_VERSION, MIXED_VERSION
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import ArtifactView, open_artifact_view
from hqconv.serving.parameter_loader import ParameterLoader
from hqconv.serving.server_compatibility import check_machine, no_layer
from hqconv.serving.vllm.layer_names import find_layer
from hqconv.serving.vllm.limits import warn_of_untested
from hqconv.serving.vllm.refusals import check_alike, no_layers

METHOD = "hqconv"
logger = logging.getLogger("vllm.hqconv")
_OWN = ("config_dict", "renamed", "loader", "view", "dense")


class HqconvConfig(QuantizationConfig):  # type: ignore[misc]
    """`quant_method: hqconv`. Experts come from rank files; every other layer is the source's own quantization's."""

    packed_modules_mapping: Any
    view: ArtifactView | None = None
    dense: QuantizationConfig | None = None

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

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class for `isinstance`: model classes test for the source's quantization to treat other layers specially."""
        dense = self.__dict__.get("dense")
        return type(self) if dense is None else type(dense)

    def get_name(self) -> str:
        """Name of the source's quantization, for the same reason; `hqconv` if the source has none."""
        return METHOD if self.dense is None else str(self.dense.get_name())

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

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
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
        self.dense = None if config_dict is None else dense_config(config_dict, self.view.location, hf_config)
        self.packed_modules_mapping = self.packed_modules_mapping  # which sets that of `dense`, too

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
            from hqconv.serving.vllm.moe_method import HqconvMoEMethod  # with all of vLLM's Humming layers

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
            return HqconvMoEMethod(self, self.view, self.view.layers[name], layer)
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

    def get_checkpoint_weight_mapper(self) -> Any:
        """Mapper of the source's quantization for tensors that stay unread."""
        return (self.dense or QuantizationConfig).get_checkpoint_weight_mapper()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the source's quantization that model classes read, such as `weight_block_size`."""
        dense = self.__dict__.get("dense")
        if dense is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes such as `use_deep_gemm` on the source's quantization as well, if it has them."""
        super().__setattr__(name, value)
        dense = self.__dict__.get("dense")
        if dense is not None and name not in _OWN and hasattr(dense, name):
            setattr(dense, name, value)


def _restored(state: dict[str, Any]) -> HqconvConfig:
    """Restore a config that was sent or copied."""
    config = HqconvConfig.__new__(HqconvConfig)
    config.__dict__.update(state, loader=ParameterLoader(logger))
    return config


def _is_part_of_model() -> bool:
    """Return whether this process has only some of the model's layers, maybe without experts."""
    config = get_current_vllm_config_or_none()
    return config is None or config.parallel_config.pipeline_parallel_size > 1


# Methods that take over a checkpoint of another method, in the order in which vLLM 0.33 tries them
# (config/model.py, `_verify_quantization`).
_OVERRIDES = (
    *("auto_gptq", "gptq", "gptq_marlin", "auto_awq", "awq", "awq_marlin", "inc", "moe_wna16"),
    *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "mxfp8", "modelopt_mixed"),
    *("mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8"),
)


def dense_config(document: Mapping[str, Any], location: ArtifactLocation, hf_config: Any) -> QuantizationConfig:
    """Create vLLM's config of the source's `quantization_config`. Raises vLLM's errors for an unknown one."""
    hf_config = _undrafted(location, hf_config)
    config = {**document, **_heads(document, hf_config)}
    method = str(config.get("quant_method", ""))
    for name in _OVERRIDES:
        override = get_quantization_config(name).override_quantization_method(config, None, hf_config=hf_config)
        if override is not None:
            method = override
            break
    found = get_quantization_config(method).from_config(config)
    found.maybe_update_config(location.name, hf_config=hf_config, revision=location.pinned_revision)
    return found


def _undrafted(location: ArtifactLocation, hf_config: Any) -> Any:
    """Config with the folder's own model_type: vLLM renames it for drafts, and methods are chosen by it."""
    document = json.loads(location.fetch(names.CONFIG).read_text(encoding="utf-8"))
    if hf_config is None or hf_config.model_type == document.get("model_type"):
        return hf_config
    own = copy.copy(hf_config)
    own.model_type = document.get("model_type", hf_config.model_type)
    return own


def _heads(document: Mapping[str, Any], hf_config: Any) -> dict[str, int]:
    """Entries that vLLM adds for compressed-tensors, so that scales of attention heads are cut for ranks."""
    if document.get("quant_method") != "compressed-tensors" or hf_config is None:
        return {}
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return {}
    return {"total_num_heads": heads, "total_num_kv_heads": getattr(text, "num_key_value_heads", None) or heads}
