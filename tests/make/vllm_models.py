"""vLLM's whole model classes with tiny configs, on a machine without a GPU.

Much of vLLM asks for compiled extensions and for GPU libraries as soon as it is imported, and what stands in for them
is nothing for a process that tests anything else: `vllm_serving` is a program.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch

from tests.make.families import LAYERS

# Words that vLLM's classes ask of a config and transformers' tiny models do not have.
WORDS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "route_scale": 1.0},
    "bailing_hybrid": {"architectures": ["BailingMoeV2_5ForCausalLM"], "use_bias": False, "use_qkv_bias": False},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v32": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "deepseek_v4": {"head_dim": 512, "qk_rope_head_dim": 64, "compress_ratios": [0] * (LAYERS + 1)},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4v_moe": {"text_config": {"use_qk_norm": True}},
    "glm5_next": {
        "text_config": {
            "mhc": {"n": 2, "rate": 2},
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "mla_use_nope": True,
        }
    },
    "glm_moe_dsa": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "hy_v3": {
        "expert_hidden_dim": 48,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "router_scaling_factor": 1.0,
        "qk_norm": True,
    },
    "inkling_mm_model": {
        "text_config": {
            "dense_mlp_idx": 1,
            "local_layer_ids": [0, 1],
            "shared_expert_sink": True,
            **dict.fromkeys(("use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale"), True),
        }
    },
    "kimi_linear": {
        "mla_use_nope": True,
        "qk_rope_head_dim": 0,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 0],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "scoring_func": "sigmoid",
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "minimax_m3_vl": {
        "text_config": {
            "hidden_act": "swigluoai",
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
            "moe_layer_freq": [1, 1],
        },
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}},
    },
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}
# Drafts of the same folder: words, and the name that the checkpoint gives to the draft's layer.
NEXT = {"num_nextn_predict_layers": 1}
DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "bailing_hybrid"),
        (NEXT, f"model.layers.{LAYERS}.mlp.experts"),
    ),
    "qwen3_next": (NEXT, "mtp.layers.0.mlp.experts"),
    "qwen3_5_moe_text": ({"mtp_num_hidden_layers": 1}, "mtp.layers.0.mlp.experts"),
    "qwen3_5_moe": ({"text_config": {"mtp_num_hidden_layers": 1}}, "mtp.layers.0.mlp.experts"),
    "deepseek_v4": (NEXT, "mtp.0.ffn.experts"),
    "nemotron_h": (NEXT | {"mtp_layers_block_type": ["attention", "moe"]}, "mtp.layers.1.mixer.experts"),
}

# --- what stands in ----------------------------------------------------------------------------------------


class _Anything:
    """Whatever a module wants of a library that is not there."""

    def __call__(self, *args: Any, **words: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not words else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: object) -> Any:
        return _Anything()

    def __or__(self, other: object) -> Any:
        return _Anything()

    __ror__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a module's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Libraries(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Libraries of which nothing is used but names; asked after everything that is installed."""

    names = ("flashinfer", "cutlass", "deep_gemm", "cuda", "quack", "flash_attn", "tvm_ffi", "torchvision")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _operator(namespace: Any, name: str) -> Any:
    """An op of vLLM's extensions; `_custom_ops` must not find them, or it would register more about them."""
    try:
        return _real_operator(namespace, name)
    except AttributeError:
        asks_whether = sys._getframe(1).f_code.co_filename.endswith("_custom_ops.py")
        if name.startswith("__") or asks_whether or not namespace.name.lstrip("_").startswith(("C", "moe_C")):
            raise
        return _Anything()


sys.meta_path.append(_Libraries())
_real_operator = torch._ops._OpNamespace.__getattr__
torch._ops._OpNamespace.__getattr__ = _operator

from tests.make.vllm_cpu import Pretended  # noqa: E402  # isort: skip  - before vLLM

import transformers  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402
import vllm.triton_utils as triton_utils  # noqa: E402
import vllm.v1.attention.backends.fa_utils as fa_utils  # noqa: E402
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402


class _Configuration:
    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 1, **_: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


class _NoPrefill(_Anything):
    def __init__(self, *args: Any, **words: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "none"


def _attention(cls: type, backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    kinds = AttentionBackendEnum
    if not attn_selector_config.use_mla:
        return str(kinds.TRITON_ATTN.get_path())
    return str((kinds.FLASHMLA_SPARSE if attn_selector_config.use_sparse else kinds.TRITON_MLA).get_path())


Pretended.get_attn_backend_cls = classmethod(_attention)
Pretended.get_mla_prefill_backend_cls = classmethod(lambda cls, *args, **words: _NoPrefill)
Pretended.check_if_supports_dtype = classmethod(lambda cls, dtype: None)
Pretended.num_compute_units = classmethod(lambda cls, device_id=0: 132)
Pretended.device_count = classmethod(lambda cls: 1)
Pretended.simple_compile_backend, Pretended.dist_backend = "inductor", "gloo"
registry._run_in_subprocess = lambda function: function()
triton_utils.triton.Config = _Configuration
KERNELS = ("flash_attn_varlen_func", "compile_flash_attn_varlen_func_from_specs", "reshape_and_cache_flash")
for _name in (*KERNELS, "get_scheduler_metadata"):
    if not hasattr(fa_utils, _name):
        setattr(fa_utils, _name, _Anything())
for _name in torch.accelerator.__all__:
    if "memory" in _name or _name in ("empty_cache", "synchronize", "current_device_index"):
        setattr(torch.accelerator, _name, lambda *args, **words: 0)


def _merged(config: dict[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: config[key] | word for key, word in words.items() if isinstance(config.get(key), dict)}
    return {**config, **words, **nested}


def reword(folder: Path, model_type: str, **more: Any) -> str:
    """Write into a tiny model's config what vLLM asks for, its draft, and more; returns the draft's layer, or ""."""
    path = folder / "config.json"
    words, drafted = DRAFTS.get(model_type, ({}, ""))
    config = json.loads(path.read_text())
    for one in (WORDS.get(model_type, {}), words, more):
        config = _merged(config, one)
    path.write_text(json.dumps(config))
    return drafted


def configure(folder: Path, is_drafted: bool) -> tuple[VllmConfig, ModelConfig | None]:
    """A server's config for a folder, and the model config of its draft."""
    words: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True}
    model_config = ModelConfig(model=str(folder), tokenizer=str(folder), max_model_len=64, **words)
    vllm = VllmConfig(model_config=model_config)
    if not is_drafted:
        return vllm, None
    ranks = {"target_model_config": model_config, "target_parallel_config": vllm.parallel_config}
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=1, **ranks)
    return VllmConfig(model_config=model_config, speculative_config=speculative), speculative.draft_model_config


@contextmanager
def building(vllm: VllmConfig, device: str = "meta") -> Iterator[None]:
    """Make models of this config inside, in bfloat16."""
    processors = (transformers.AutoImageProcessor, transformers.AutoProcessor)
    with (
        set_current_vllm_config(vllm),
        set_default_torch_dtype(torch.bfloat16),
        torch.device(device),
        patch("torch.cuda.Stream", _NoPrefill),
        patch("torch.cuda.Event", _NoPrefill),
        patch.object(processors[0], "from_pretrained", _Anything()),
        patch.object(processors[1], "from_pretrained", _Anything()),
    ):
        yield


def answer(out: Path, ask_one: Callable[[Path, str], dict[str, Any]], names: Sequence[str]) -> None:
    """Ask about each name in a folder of its own, as the only rank, and write the answers, or the error."""
    torch.set_num_threads(1)
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cpu"))
        for name in names:
            try:
                with set_current_vllm_config(VllmConfig()):  # what is imported on the way asks for one
                    answers[name] = ask_one(Path(scratch) / name, name)
            except Exception as error:  # noqa: BLE001 - the test's to judge
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
    out.write_text(json.dumps(answers))
