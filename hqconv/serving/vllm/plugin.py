"""Entry point of `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps more than once."""

from __future__ import annotations


def register() -> None:
    """Register `quant_method: hqconv` with vLLM, without Humming or a GPU.

    Raises ImportError if vLLM has no quantization methods from outside.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from hqconv.serving.vllm.config import HqconvConfig
    from hqconv.serving.vllm.other_layers import METHOD

    register_quantization_config(METHOD)(HqconvConfig)
