"""vLLM's own quantization of the layers without experts: the source's config, and the class that stands for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from hqconv.schemas import artifact_names as names
from hqconv.serving.artifact_view import ArtifactLocation
from hqconv.serving.vllm.needs import METHOD


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


# Methods that take over a checkpoint of another method, in the order in which vLLM 0.33 tries them
# (config/model.py, `_verify_quantization`).
_OVERRIDES = (
    *("auto_gptq", "gptq", "gptq_marlin", "auto_awq", "awq", "awq_marlin", "inc", "moe_wna16"),
    *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "mxfp8", "modelopt_mixed"),
    *("mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8"),
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
    return {
        "total_num_heads": heads,
        "total_num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
    }
