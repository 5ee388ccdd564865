"""Runs the production kernel: Humming's indexed fused-MoE GEMMs, as vLLM's `fused_humming_moe.py` calls them.

Legend: T tokens, k choices per token, E experts of this rank, H hidden size, I this rank's intermediate size.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.backends.runtime import humming, humming_gpu

_COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}

_SILU = "a / (1.f + expf(-a))"
_GELU = "0.5f * a * (1.f + erff(a * 0.7071067811865476f))"
_GELU_TANH = "0.5f * a * (1.f + tanhf(0.7978845608028654f * (a + 0.044715f * a * a * a)))"
_RELU2 = "fmaxf(a, 0.f) * fmaxf(a, 0.f)"
_UNARY = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "relu": "fmaxf(a, 0.f)",
    "relu2": _RELU2,
}
_OPERAND = r"\ba\b"
# `silu_clamp10`: gate and up cut off before the function; `silu_bound7`: its value, and up, cut off.
_LIMITED = re.compile(r"(?P<function>\w+)_(?P<kind>clamp|bound)(?P<limit>\d+(?:\.\d+)?)")
_CLAMPED_SWIGLU = "fminf(a, 7.f) / (1.f + expf(-1.702f * fminf(a, 7.f))) * (fmaxf(fminf(b, 7.f), -7.f) + 1.f)"


def activation_words(name: str, gated: bool) -> dict[str, str]:
    """The activation as Humming's input-processing kernel takes it. KeyError if unknown."""
    if name == "swigluoai":
        return {"activation_type": "binary_split", "activation_impl": _CLAMPED_SWIGLU}
    if not gated:
        return {"activation_type": "unary", "activation_impl": _UNARY[name]}
    limited = _LIMITED.fullmatch(name)
    if limited is None:
        return {"activation_type": "binary_split", "activation_impl": f"({_UNARY[name]}) * b"}
    function, limit = _UNARY[limited["function"]], f"{float(limited['limit'])}f"
    gate = f"fminf({function}, {limit})"
    if limited["kind"] == "clamp":
        gate = f"({re.sub(_OPERAND, f'fminf(a, {limit})', function)})"
    return {
        "activation_type": "binary_split",
        "activation_impl": f"{gate} * fmaxf(fminf(b, {limit}), -{limit})",
    }


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a rank: Humming's LayerConfig and its kernel tensors [E, …] on the device.

    rotation: the block size that its inputs are rotated in, 0 for none.
    """

    config: Any
    tensors: Mapping[str, torch.Tensor]
    rotation: int = 0


def load_gemm(words: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], rotation: int = 0) -> Gemm:
    """A GEMM from LayerConfig words, as a rank file's metadata holds them, and its tensors; see `Gemm`."""
    return Gemm(layer_config(words), tensors, rotation)


@functools.lru_cache(maxsize=64)
def _tuning_entry(config: Any, shape_m: int) -> dict[str, Any]:
    """The tuning for `shape_m`. That for all sizes takes seconds of Python to find, and most of a minute to compile."""
    tune = humming_gpu().tune
    return dict(tune.get_heuristics_config(layer_config=config, shape_m=shape_m, gemm_type="indexed"))


def layer_config(words: Mapping[str, Any]) -> Any:
    """Humming's LayerConfig from its words, as a rank file's metadata holds them."""
    return humming().config.LayerConfig(**words)


def compile_kernels(configs: Iterable[Any], tuned_for_m: int, device: torch.device) -> None:
    """Compile the GEMMs that `fused_moe` will need, side by side; each takes seconds on a fresh kernel cache.

    The compilers are processes of their own, so that threads do not hold each other up.
    """
    lib = humming_gpu()

    def compile_one(config: Any) -> None:
        with torch.cuda.device(device):
            entry = _tuning_entry(config, tuned_for_m)
            lib.kernel.HummingKernel.prepare_kernels(config.to_str(), _COMPUTE, entry, device)

    distinct = list({config.to_str(): config for config in configs}.values())
    with ThreadPoolExecutor(max(1, len(distinct))) as pool:
        list(pool.map(compile_one, distinct))


def compile_activation(
    w13: Any,
    w2: Any,
    activation: str,
    gated: bool,
    num_routes: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
    rotation: int = 0,
) -> None:
    """Compile the kernels between two GEMMs, given as LayerConfigs, for some numbers of routes."""
    width = w13.shape_n - w13.pad_shape_n
    with torch.cuda.device(device):
        for count in num_routes:
            wide = torch.zeros(count, width, dtype=dtype, device=device)
            words = activation_words(activation, gated)
            humming_gpu().forward.may_process_input(w2, inputs=wide, hadamard_block_size=rotation, **words)


def align(local_ids: torch.Tensor, num_experts: int, block_size: int) -> dict[str, torch.Tensor]:
    """Route indices sorted by expert, each expert's run padded to the block size; routes of -1 are left out.

    Waits for the device once, for how many there are.
    """
    flat = local_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)  # the first: routes of other ranks
    num_blocks = (counts[1:] + block_size - 1) // block_size
    num_elsewhere, total = torch.stack([counts[0], num_blocks.sum() * block_size]).tolist()
    routes = order[num_elsewhere:]
    experts = flat[routes]
    # A route's place: where its expert's blocks begin, and its number among the expert's routes.
    first_place = (num_blocks.cumsum(0) - num_blocks) * block_size
    first_route = counts[1:].cumsum(0) - counts[1:]
    places = first_place[experts] + torch.arange(len(routes), device=flat.device) - first_route[experts]
    sorted_ids = flat.new_full((total,), flat.numel()).index_copy_(0, places, routes)
    return {
        "sorted_ids": sorted_ids.to(torch.int32),
        "expert_ids": torch.arange(num_experts, device=flat.device)
        .repeat_interleave(num_blocks, output_size=total // block_size)
        .to(torch.int32),
        "num_tokens_padded": torch.tensor(total, dtype=torch.int32, device=flat.device),
    }


def fused_moe(
    gemms: Mapping[str, Gemm],
    x: torch.Tensor,
    local_ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    gated: bool,
    tuned_for_m: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's share of a MoE block on tokens `x` [T, H] of the parameter dtype.

    `local_ids` int64 [T, k] are this rank's expert indices, -1 for routes of other ranks; `weights` float32
    [T, k]. Returns float32 partial sums [T, H] and the activated intermediate [T * k, I], rotated where w2 is (zero
    rows for other ranks' routes). `tuned_for_m` picks the tuning entry, so that batches of several sizes compile one
    kernel.
    """
    num_tokens, top_k = local_ids.shape
    is_local = (local_ids >= 0).reshape(-1, 1)
    num_local = int(is_local.sum())
    w13, w2 = gemms["w13"], gemms["w2"]
    inner = w2.config.shape_k - w2.config.pad_shape_k
    if not num_local:
        return x.new_zeros(x.shape, dtype=torch.float32), x.new_zeros(num_tokens * top_k, inner)
    width = w13.config.shape_n - w13.config.pad_shape_n
    wide = _gemm(w13, x, local_ids, top_k, x.new_zeros(num_tokens * top_k, width), num_local, tuned_for_m)
    hidden, group_scale, token_scale = humming_gpu().forward.may_process_input(
        w2.config, inputs=wide, hadamard_block_size=w2.rotation, **activation_words(activation, gated)
    )
    scale = group_scale if group_scale is not None else token_scale
    out = x.new_zeros(num_tokens * top_k, x.size(1))
    rotated = replace(w2, rotation=0)
    out = _gemm(rotated, hidden, local_ids, 1, out, num_local, tuned_for_m, scale)
    routed = torch.where(is_local, out.float(), 0.0).view(num_tokens, top_k, -1)
    inner_values = torch.where(is_local, hidden, 0.0) if hidden.dtype == x.dtype else hidden
    return (routed * weights.unsqueeze(-1)).sum(1), inner_values


def _gemm(
    gemm: Gemm,
    inputs: torch.Tensor,
    local_ids: torch.Tensor,
    top_k: int,
    outputs: torch.Tensor,
    num_local: int,
    tuned_for_m: int,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    lib = humming_gpu()
    entry = _tuning_entry(gemm.config, tuned_for_m)
    aligned = align(local_ids, gemm.config.num_experts, entry["block_shape"][0])
    num_sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    result: torch.Tensor = lib.forward.humming_forward(
        gemm.config,
        inputs=inputs,
        outputs=outputs,
        input_scale=input_scale,
        hadamard_block_size=gemm.rotation,
        locks=torch.zeros(num_sms * 8, dtype=torch.int32, device=inputs.device),
        top_k=top_k,
        valid_shape_m=num_local,
        compute_config=_COMPUTE,
        tuning_config=entry,
        **gemm.tensors,
        **aligned,
    )
    return result
