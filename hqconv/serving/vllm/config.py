"""vLLM's quantization config of kernel artifacts: methods of the experts' layers, quantization of the other layers.

Layers without experts are quantized by vLLM's own config of the source's `quantization_config`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.platforms import current_platform

from hqconv.errors import RequestError, VerificationError, first_few
from hqconv.io.hub import is_commit
from hqconv.schemas.artifact_names import CONFIG, FORMAT_VERSION, MIXED_VERSION, split_dense
from hqconv.serving.artifact_view import ArtifactLocation, ArtifactView, open_artifact_view
from hqconv.serving.parameter_loader import ParameterLoader
from hqconv.serving.server_compatibility import check_machine
from hqconv.serving.vllm.translation import METHOD, check_alike, find_layer, warn_of_untested

logger = logging.getLogger("vllm.hqconv")


class SourceProxy(QuantizationConfig):  # type: ignore[misc]
    """A quantization config that vLLM's model classes take for the source's own one, `dense`, where there is one.

    Model classes build attention and dense layers by the quantization of the checkpoint: they ask
    `isinstance(quant_config, Fp8Config)` and `quant_config.get_name()`, read attributes such as `weight_block_size`,
    and set some, such as `use_deep_gemm`. All of this reaches `dense`:

    * `isinstance(proxy, type(dense))` is true, since Python asks an object's `__class__` as well; `type(proxy)` and
      `isinstance(proxy, SourceProxy)` stay what they are.
    * An attribute that the proxy lacks is read from `dense`. One that is set is set on both, if `dense` has it.
    * The proxy's `own_state` is never looked up or set in `dense`.

    Without `dense` it is an ordinary config.
    """

    own_state: frozenset[str] = frozenset({"dense"})
    dense: QuantizationConfig | None = None
    packed_modules_mapping: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        dense = self.__dict__.get("dense")
        return type(self) if dense is None else type(dense)

    def __getattr__(self, name: str) -> Any:
        dense = self.__dict__.get("dense")
        if dense is None or name.startswith("__") or name in type(self).own_state:
            raise AttributeError(name)
        return getattr(dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        dense = self.__dict__.get("dense")
        if dense is not None and name not in type(self).own_state and hasattr(dense, name):
            setattr(dense, name, value)

    def set_dense(self, dense: QuantizationConfig | None) -> None:
        """Stand for this config from now on, which gets the names of packed modules that vLLM has set by now."""
        self.dense = dense
        self.packed_modules_mapping = self.packed_modules_mapping  # sets that of `dense`, too

    def get_name(self) -> str:
        """Name of the source's quantization; `hqconv` if the source has none."""
        return METHOD if self.dense is None else str(self.dense.get_name())

    def get_checkpoint_weight_mapper(self) -> Any:
        """Mapper of the source's quantization for tensors that stay unread."""
        return (self.dense or QuantizationConfig).get_checkpoint_weight_mapper()


class HqconvConfig(SourceProxy):
    """`quant_method: hqconv`. Experts come from rank files; every other layer is the source's own quantization's."""

    own_state = SourceProxy.own_state | {
        "config_dict",
        "renamed",
        "loader",
        "view",
        "movable",
        "added",
    }
    view: ArtifactView | None = None
    added: QuantizationConfig | None = None  # of linear layers that the source has in 16 or 32 bits

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
        source, added = (None, None) if config_dict is None else split_dense(config_dict)
        if added is not None:
            self.added = dense_config(added, self.view.location, hf_config)
        self.set_dense(
            None if source is None else dense_config(source, self.view.location, hf_config)
        )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Note the model classes' names of the layers; vLLM's model classes call it, outer ones first."""
        for name, layer in list(self.renamed.items()):
            for new in hf_to_vllm_mapper.apply_list([name]):
                if self.renamed.setdefault(new, layer) != layer:
                    self.renamed[new] = ""  # two layers: ambiguous name
        for config in (self.dense, self.added):
            if config is not None:
                config.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer. Raises RequestError for experts that the artifact lacks, or has otherwise."""
        self._pin_weights()
        if isinstance(layer, RoutedExperts):
            # with all of vLLM's Humming layers
            from hqconv.serving.vllm.moe_method import HqconvMoEMethod

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
                raise RequestError(
                    "The artifact has no experts for a layer of the model.",
                    where=f"{self.view.location.name}: layer {prefix}",
                    expected=first_few([*self.view.layers]),
                    found=prefix,
                    remedy="Convert the whole model with this version of hqconv; if it was, please report the names.",
                )
            return HqconvMoEMethod(self.loader, self.view, self.view.layers[name], layer)
        found = None if self.dense is None else self.dense.get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return found
        is_plain = found is None or isinstance(found, UnquantizedLinearMethod)
        if is_plain and self.added is not None:
            found = self.added.get_quant_method(layer, prefix)
        if found is None:
            return UnquantizedLinearMethod()
        _share_scales(found)
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
            raise RequestError(
                "The server's model has asked for none of the artifact's experts.",
                where=self.view.location.name,
                expected="layers of experts that vLLM's Humming methods can serve",
                found="none of them, so that their weights would stay random",
                remedy="Leave --moe-backend at its default, and serve the main model, not a part of it.",
            )
        return (self.dense or QuantizationConfig).get_cache_scale_mapper()


def _share_scales(method: Any) -> None:
    """Have vLLM's Humming method take the tensor-level scale that all matrices of a fused layer have.

    Its own loader (vllm/model_executor/layers/quantization/humming.py, `prepare_weight_loader`) has a place for one
    matrix. Raises VerificationError where the matrices have different ones.
    """
    prepare = getattr(method, "prepare_weight_loader", None)
    if prepare is None:  # another method, or none
        return

    def prepared(layer: torch.nn.Module, weight_loader: Any) -> Any:
        load = prepare(layer, weight_loader)
        known = dict[str, float]()

        def loading(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
            if param.numel() > 1 or loaded.numel() > 1:
                load(param, loaded, *shard)
                return
            scale = float(loaded)
            if known.setdefault(param.param_name, scale) != scale:
                raise VerificationError(
                    "Matrices of a fused layer have different tensor-level scales.",
                    expected=known[param.param_name],
                    found=scale,
                )
            param.data.fill_(scale)

        return loading

    method.prepare_weight_loader = prepared


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
    "auto_gptq",
    "gptq",
    "gptq_marlin",
    "auto_awq",
    "awq",
    "awq_marlin",
    "inc",
    "moe_wna16",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mxfp8",
    "mxfp8",
    "modelopt_mixed",
    "mxfp4",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
)


def dense_config(
    document: Mapping[str, Any], location: ArtifactLocation, hf_config: Any
) -> QuantizationConfig:
    """Create vLLM's config of the source's `quantization_config`. Raises vLLM's errors for an unknown one."""
    hf_config = _undrafted(location, hf_config)
    config = {**document, **_heads(document, hf_config)}
    method = str(config.get("quant_method", ""))
    for name in _OVERRIDES:
        override = get_quantization_config(name).override_quantization_method(
            config, None, hf_config=hf_config
        )
        if override is not None:
            method = override
            break
    found = get_quantization_config(method).from_config(config)
    found.maybe_update_config(location.name, hf_config=hf_config, revision=location.pinned_revision)
    return found


def _undrafted(location: ArtifactLocation, hf_config: Any) -> Any:
    """Config with the folder's own model_type: vLLM renames it for drafts, and methods are chosen by it."""
    document = json.loads(location.fetch(CONFIG).read_text(encoding="utf-8"))
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
    return {
        "total_num_heads": heads,
        "total_num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
    }
