"""Quantization of the layers that hqconv copies: vLLM's own config for the source's `quantization_config`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from hqconv.schemas import artifact_names as names
from hqconv.serving.artifact_location import ArtifactLocation

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
    found.maybe_update_config(location.name, hf_config=hf_config, revision=location.revision)
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
