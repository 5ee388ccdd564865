"""vLLM's own model classes of tiny configs on a machine without a GPU: built, and given weights, but never run."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.make import vllm_cpu  # isort: skip  - before vLLM
import vllm.model_executor.layers.attention.attention as attention
import vllm.model_executor.layers.attention.chunked_local_attention as chunked
import vllm.model_executor.layers.attention.mla_attention as mla
import vllm.triton_utils
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.models import registry

# Config values that vLLM's classes ask for and transformers' own configs of these families lack.
LACKING = {"scoring_func": "softmax", "n_group": 1, "topk_group": 1}


class Nothing:
    """Stands for a stream, an event or an operator: can be made and asked for anything."""

    def __init__(self, *args: Any, **words: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **words: Any) -> Any:
        return Nothing()


class TritonConfig(types.SimpleNamespace):
    """triton.Config, whose stages vLLM's mamba kernels look at while they are imported."""

    def __init__(
        self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 1, **more: Any
    ) -> None:
        super().__init__(kwargs=kwargs, num_warps=num_warps, num_stages=num_stages, **more)


def _no_attention(self: nn.Module, *args: Any, **words: Any) -> None:
    """An attention layer without a backend."""
    nn.Module.__init__(self)
    self.attn_backend, self.impl, self.kv_cache_dtype = Nothing(), None, "auto"


def _inspect(self: Any) -> Any:
    """What a model class can do, asked here instead of in a new process, which would have no pretended GPU."""
    return registry._ModelInfo.from_model_cls(self.load_model_cls())


_find_op = torch._ops._OpNamespace.__getattr__


def _op(self: Any, name: str) -> Any:
    """An operator; where vLLM's own extensions are asked, which are not built for this machine, nothing."""
    try:
        return _find_op(self, name)
    except AttributeError:
        if self.name in ("_C", "_moe_C"):
            return Nothing()
        raise


@contextlib.contextmanager
def stand_ins(folder: Path) -> Iterator[None]:
    """What the classes need to be built: one rank of a process group, and nothing in place of devices and kernels."""
    with contextlib.ExitStack() as stack:
        for module, name in (
            (attention, "Attention"),
            (mla, "MLAAttention"),
            (chunked, "ChunkedLocalAttention"),
        ):
            stack.enter_context(patch.object(getattr(module, name), "__init__", _no_attention))
        for name in ("Stream", "Event", "current_stream"):
            stack.enter_context(patch.object(torch.cuda, name, Nothing))
        stack.enter_context(
            patch.object(vllm.triton_utils.triton, "Config", TritonConfig, create=True)
        )
        stack.enter_context(
            patch.object(registry._LazyRegisteredModel, "inspect_model_cls", _inspect)
        )
        stack.enter_context(patch.object(torch._ops._OpNamespace, "__getattr__", _op))
        stack.enter_context(vllm_cpu.config())
        parallel_state.init_distributed_environment(
            1, 0, f"file://{folder}/group", 0, backend="gloo"
        )
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_distributed_environment)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


@contextlib.contextmanager
def stock_model(folder: Path) -> Iterator[nn.Module]:
    """The model of a folder as vLLM builds it from config.json, its quantization_config included, in bfloat16."""
    from vllm.model_executor.model_loader.utils import configure_quant_config, get_model_cls

    words: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 32,
    }
    model_config = ModelConfig(model=str(folder), dtype="bfloat16", **words)
    vllm_config = VllmConfig(model_config=model_config)
    vllm_config.compilation_config.custom_ops = ["none"]
    for name, value in LACKING.items():
        if getattr(model_config.hf_text_config, name, None) is None:
            setattr(model_config.hf_text_config, name, value)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(vllm_config):
            model_class = get_model_cls(model_config)
            configure_quant_config(vllm_config.quant_config, model_class)
            yield model_class(vllm_config=vllm_config, prefix="")
    finally:
        torch.set_default_dtype(before)
