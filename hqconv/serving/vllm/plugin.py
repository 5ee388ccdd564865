"""Entry point of `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps more than once."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hqconv.errors import RequestError
from hqconv.serving.vllm.needs import METHOD, missing


def register() -> None:
    """Register `quant_method: hqconv` with vLLM, without Humming or a GPU.

    Where vLLM lacks what the plugin needs, artifacts are refused with a message that says what; other models are served
    as ever. Raises ImportError if vLLM has no quantization methods from outside.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    register_quantization_config(METHOD)(_refusal(lacks) if (lacks := [*missing()]) else _config())


def _config() -> type:
    from hqconv.serving.vllm.config import HqconvConfig

    return HqconvConfig


def _refusal(lacks: list[str]) -> type:
    """Quantization config that refuses every artifact."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def from_config(cls: type, config: dict[str, Any]) -> QuantizationConfig:
        raise RequestError(
            "This vLLM lacks what hqconv's plugin needs.",
            where=f"vLLM {version('vllm')}",
            expected=lacks[0],
            found=f"no such name, and {len(lacks) - 1} more that are missing"
            if lacks[1:]
            else "no such name",
            remedy="Install the vLLM that the extra asks for: `pip install './hqconv[vllm]'`.",
        )

    return type("UnfitConfig", (QuantizationConfig,), {"from_config": classmethod(from_config)})
