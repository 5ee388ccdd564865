"""vLLM's own classes on a machine without a GPU, rank by rank: import this before anything of vLLM.

vLLM sees a CUDA device of SM 90 whose tensors lie on the CPU; Humming's weight ops are the CPU twins. What only a
kernel needs, compiled tuning tables and locks, is left out.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import vllm.platforms as platforms
from safetensors.torch import load_file
from vllm.platforms.interface import PlatformEnum

from hqconv.humming_ops.runtime import humming, resident, target_facts
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.warm import no_gpu
from hqconv.warm.no_gpu import NoDevice

is_whole = no_gpu.platform is not None  # the stand-ins of whole models are there already
Pretended = no_gpu.platform or no_gpu.platform_class(90, "NVIDIA H200", 132)
if not is_whole:
    platforms._current_platform = Pretended()
# What vLLM asks its CUDA extension while it is imported.
_extension = torch.library.Library("_C", "FRAGMENT")
for _name in () if is_whole else no_gpu.ASKED_OF_CUTLASS:
    _extension.define(f"cutlass_{_name}(int capability) -> bool")
    _extension.impl(f"cutlass_{_name}", lambda capability: False, "CompositeExplicitAutograd")

import vllm.model_executor.layers.fused_moe.experts.fused_humming_moe as experts  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

Pretended._enum = PlatformEnum.CUDA
experts.create_humming_locks = lambda device: torch.zeros(1, dtype=torch.int32)
experts.HummingExpertsBase.init_humming_moe = lambda self: None


@contextmanager
def humming_on_cpu(sm_version: int = 90) -> Iterator[None]:
    """Humming as on a GPU of this SM, with its weight ops on the CPU."""
    humming()
    with (
        target_facts(GpuTarget(sm_version)),
        resident(torch.device("cpu")),
        patch("torch.cuda.device", NoDevice),
    ):
        yield


@contextmanager
def config(sm_version: int = 90, **words: Any) -> Iterator[VllmConfig]:
    """A current vLLM config, and Humming as on a GPU of this SM."""
    with set_current_vllm_config(current := VllmConfig(**words)), humming_on_cpu(sm_version):
        yield current


def parallel(
    tp: int = 1, tp_rank: int = 0, ep: int = 1, ep_rank: int = 0, eplb: bool = False
) -> FusedMoEParallelConfig:
    """One rank, as vLLM counts the ranks of MoE layers."""
    return FusedMoEParallelConfig(
        tp_size=tp,
        tp_rank=tp_rank,
        ep_size=ep,
        ep_rank=ep_rank,
        dp_size=1,
        dp_rank=0,
        pcp_size=1,
        pcp_rank=0,
        sp_size=1,
        use_ep=ep > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=eplb,
    )


def build_layer(
    quant_config: Any,
    name: str,
    *,
    num_experts: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    has_bias: bool = False,
    grid: FusedMoEParallelConfig | None = None,
    placement: str = "linear",
    expert_groups: int | None = None,
    redundant: int = 0,
    situ: tuple[float | None, float | None] = (None, None),
    **words: Any,
) -> RoutedExperts:
    """A layer of experts as vLLM's model classes make it, for one rank; parameters exist, nothing is loaded."""
    grid, function = grid or parallel(), MoEActivation.from_str(activation)
    manager = ExpertMapManager(
        max_num_batched_tokens=128,
        top_k=2,
        global_num_experts=num_experts + redundant,
        num_redundant_experts=redundant,
        num_expert_group=expert_groups,
        moe_parallel_config=grid,
        placement_strategy=placement,
        enable_eplb=grid.enable_eplb,
    )
    moe = FusedMoEConfig(
        num_experts=num_experts + redundant,
        experts_per_token=2,
        hidden_dim=hidden,
        intermediate_size=inter,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=num_experts,
        activation=function,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=grid,
        in_dtype=dtype,
        has_bias=has_bias,
        swiglu_limit=words.get("swiglu_limit"),
        activation_situ_beta=situ[0],
        activation_situ_linear_beta=situ[1],
    )
    up = {} if function.is_gated else {"ckpt_up_proj_name": None}
    return RoutedExperts(name, dtype, moe, quant_config, expert_map_manager=manager, **up, **words)


def open_config(out: Path, model: str = "") -> Any:
    """The quantization config of an artifact as vLLM makes it, sent to another process."""
    document = json.loads((out / "config.json").read_text())["quantization_config"]
    found = get_quantization_config("hqconv").from_config(document)
    found.maybe_update_config(model or str(out))
    return pickle.loads(pickle.dumps(found))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_holds_its_file(layer: Any) -> None:
    """Every parameter has the bytes, the dtype and the name that the layer's rank file has, and there are no others."""
    method = layer.quant_method
    stored, found = load_file(method.file.path), dict(layer.named_parameters())
    assert {f"{method.stored.name}.{name}" for name in found} == set(stored)
    for name, parameter in found.items():
        expected = stored[f"{method.stored.name}.{name}"]
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(as_bytes(parameter), as_bytes(expected)), name


def linear() -> LinearBase:
    """A linear layer, as far as a quantization config looks at it."""
    return LinearBase.__new__(LinearBase)
