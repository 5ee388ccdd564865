"""Entry point of `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps more than once."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hqconv.errors import RequestError
from hqconv.serving.vllm.translation import METHOD


def register() -> None:
    """Register `quant_method: hqconv` with vLLM, without Humming or a GPU.

    A vLLM that lacks what the plugin imports refuses artifacts with one message, and serves other models as before.
    Raises ImportError if vLLM has no quantization methods from outside.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    register_quantization_config(METHOD)(_config_class())


def _config_class() -> Any:
    """Return the plugin's quantization config, or one that refuses every artifact and says what is missing."""
    try:
        from hqconv.serving.vllm.config import HqconvConfig
    except ImportError as error:
        reason = str(error)
    else:
        return HqconvConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def from_config(cls: type, config: dict[str, Any]) -> QuantizationConfig:
        raise RequestError(
            "This vLLM lacks what hqconv's plugin needs.",
            where=f"vLLM {version('vllm')}",
            found=reason,
            remedy="Install the vLLM that the extra asks for: `pip install './hqconv[vllm]'`.",
        )

    return type("UnfitConfig", (QuantizationConfig,), {"from_config": classmethod(from_config)})
