"""The production kernel: Humming's indexed fused-MoE GEMMs, as vLLM's `fused_humming_moe.py` calls them.

Legend: T tokens, k choices per token, E experts of this rank, H hidden size, I this rank's intermediate size.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hqconv.humming_ops.runtime import humming, humming_gpu
from hqconv.kernel_layout.transform import prepare_linear
from hqconv.schemas.activation import Activation
from hqconv.schemas.input_schema import STATIC_SCALES
from hqconv.schemas.weight_schema import WeightSchema

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
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = {
    "float4e2m1": (*_FP4, *(-value for value in _FP4)),
    "int4": (*map(float, range(8)), *map(float, range(-8, 0))),
}
_CLAMPED_UP = "fmaxf(fminf(b, {limit}), -{limit})"


def humming_activation(activation: Activation, gated: bool) -> dict[str, str]:
    """The activation as Humming's input-processing kernel takes it. KeyError if unknown."""
    if not gated:
        return {"activation_type": "unary", "activation_impl": _UNARY[activation.name]}
    return {"activation_type": "binary_split", "activation_impl": _gated_text(activation)}


def _gated_text(activation: Activation) -> str:
    """The C expression of gate a and up b. KeyError where the formula or one of its numbers is not known."""
    name = activation.name
    number = {key: f"{value!r}f" for key, value in activation.numbers.items()}
    function, _, kind = name.rpartition("_")
    if name == "swigluoai":
        gate = f"fminf(a, {number['limit']})"
        up = _CLAMPED_UP.format_map(number)
        return f"{gate} / (1.f + expf(-({number['alpha']}) * {gate})) * ({up} + ({number['beta']}))"
    if name == "situ":
        beta = number["beta"]
        linear = number.get("linear_beta")
        up = "b" if linear is None else f"{linear} * tanhf(b / {linear})"
        return f"{beta} * tanhf(a / {beta}) / (1.f + expf(-a)) * ({up})"
    if kind == "bound":
        return f"fminf({_UNARY[function]}, {number['limit']}) * {_CLAMPED_UP.format_map(number)}"
    if kind == "clamp":
        clamped = re.sub(_OPERAND, f"fminf(a, {number['limit']})", _UNARY[function])
        return f"({clamped}) * {_CLAMPED_UP.format_map(number)}"
    if kind == "shift":
        return f"({_UNARY[function]}) * (b + ({number['beta']}))"
    return f"({_UNARY[name]}) * b"


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a rank: Humming's LayerConfig and its kernel tensors [E, …] on the device.

    input_scale: of its activations, float32 [1], where it was measured beforehand.
    rotation: the block size that its inputs are rotated in, 0 for none.
    """

    config: Any
    tensors: Mapping[str, torch.Tensor]
    input_scale: torch.Tensor | None = None
    rotation: int = 0


@dataclass(frozen=True)
class KernelInputs:
    """A GEMM's activations as its kernel takes them: rows of codes, or of 16-bit numbers without scales.

    group_scale: float32 [rows, G], or int32 [rows, ceil(G / 4)] of four 8-bit scales each, the first lowest.
    token_scale: float32 [rows, 1], or the one that was measured beforehand, [1].
    """

    codes: torch.Tensor
    group_scale: torch.Tensor | None = None
    token_scale: torch.Tensor | None = None


def load_gemm(
    document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], rotation: int = 0
) -> Gemm:
    """Make a GEMM from a LayerConfig document of a rank file's metadata, and its tensors; see `Gemm`."""
    static = [tensors[name] for name in STATIC_SCALES.values() if name in tensors]
    plain = {name: tensor for name, tensor in tensors.items() if name not in STATIC_SCALES.values()}
    return Gemm(layer_config(document), plain, static[0] if static else None, rotation)


@functools.lru_cache(maxsize=64)
def tuning_entry(config: Any, shape_m: int) -> dict[str, Any]:
    """The tuning for `shape_m`. That for all sizes takes seconds of Python to find, and most of a minute to compile."""
    tune = humming_gpu().tune
    return dict(
        tune.get_heuristics_config(layer_config=config, shape_m=shape_m, gemm_type="indexed")
    )


def layer_config(document: Mapping[str, Any]) -> Any:
    """Humming's LayerConfig from the document in a rank file's metadata."""
    return humming().config.LayerConfig(**document)


def compile_kernels(configs: Iterable[Any], tuned_for_m: int, device: torch.device) -> None:
    """Compile the GEMMs that `fused_moe` will need, side by side; each takes seconds on a fresh kernel cache.

    The compilers are processes of their own, so that threads do not hold each other up.
    """
    lib = humming_gpu()

    def compile_one(config: Any) -> None:
        with torch.cuda.device(device):
            entry = tuning_entry(config, tuned_for_m)
            lib.kernel.HummingKernel.prepare_kernels(config.to_str(), _COMPUTE, entry, device)

    distinct = list({config.to_str(): config for config in configs}.values())
    with ThreadPoolExecutor(max(1, len(distinct))) as pool:
        list(pool.map(compile_one, distinct))


def linear_gemm(
    tensors: Mapping[str, torch.Tensor], schema: WeightSchema, param_dtype: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the dense GEMM x [M, K] → [M, N] of packed tensors on a GPU, prepared as vLLM's linear layers do."""
    lib = humming_gpu()
    weight = tensors["weight"]
    device = weight.device
    with torch.cuda.device(device):
        config, laid_out = prepare_linear(tensors, schema, param_dtype)
    locks = new_locks(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(device):
            out: torch.Tensor = lib.forward.humming_forward(
                config,
                inputs=x,
                **laid_out,
                locks=locks,
                compute_config={**_COMPUTE, "gemm_type": "dense"},
            )
        return out[:, : weight.size(0)]

    return run


def process_input(gemm: Gemm, values: torch.Tensor, **activation: str) -> KernelInputs:
    """Prepare rows of the parameter dtype for a GEMM: activated if configured, rotated and quantized."""
    static = (
        gemm.input_scale if gemm.config.input_quant_mode.value.startswith("static_tensor") else None
    )
    return KernelInputs(
        *humming_gpu().forward.may_process_input(
            gemm.config,
            inputs=values,
            token_scales=static,
            hadamard_block_size=gemm.rotation,
            **activation,
        )
    )


def input_values(config: Any, inputs: KernelInputs) -> torch.Tensor:
    """Values of the codes, float32 [rows, K]; 16-bit activations as they are."""
    if not config.input_quant_mode.should_quantize:
        return inputs.codes
    values = _decoded(config.a_dtype.dtype_str, inputs.codes)
    if inputs.group_scale is not None:
        size = config.input_scale_group_size
        num_groups = -(-values.size(1) // size)
        scales = _group_scales(config.as_dtype.dtype_str, inputs.group_scale)[:, :num_groups]
        values = values * scales.repeat_interleave(size, dim=1)[:, : values.size(1)]
    return values if inputs.token_scale is None else values * inputs.token_scale


def _decoded(dtype: str, codes: torch.Tensor) -> torch.Tensor:
    """Codes as float32; of 4 bits, two in a byte, the first lower."""
    if dtype not in _NIBBLES:
        return codes.float()
    packed = codes.view(torch.uint8)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return torch.tensor(_NIBBLES[dtype], device=codes.device)[nibbles.int()]


def _group_scales(dtype: str, scales: torch.Tensor) -> torch.Tensor:
    types = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}
    return scales.view(types[dtype]).float() if dtype in types else scales


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
    places = (
        first_place[experts] + torch.arange(len(routes), device=flat.device) - first_route[experts]
    )
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
    activation: Activation,
    gated: bool,
    tuned_for_m: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's share of an MoE layer on tokens `x` [T, H] of the parameter dtype.

    `local_ids` int64 [T, k] are this rank's expert indices, -1 for routes of other ranks; `weights` float32
    [T, k]. Returns float32 partial sums [T, H] and the activated intermediate [T * k, I] as the second GEMM saw it,
    so after rotation and quantization (zero rows for other ranks' routes). `tuned_for_m` picks the tuning entry, so
    that batches of several sizes compile one kernel.
    """
    num_tokens, top_k = local_ids.shape
    is_local = (local_ids >= 0).reshape(-1, 1)
    num_local = int(is_local.sum())
    w13 = gemms["w13"]
    w2 = gemms["w2"]
    inner = w2.config.shape_k - w2.config.pad_shape_k
    if not num_local:
        return x.new_zeros(x.shape, dtype=torch.float32), x.new_zeros(num_tokens * top_k, inner)
    width = w13.config.shape_n - w13.config.pad_shape_n
    wide = x.new_zeros(num_tokens * top_k, width)
    wide = _gemm(w13, process_input(w13, x), local_ids, top_k, wide, num_local, tuned_for_m)
    hidden = process_input(w2, wide, **humming_activation(activation, gated))
    out = x.new_zeros(num_tokens * top_k, x.size(1))
    out = _gemm(w2, hidden, local_ids, 1, out, num_local, tuned_for_m)
    routed = torch.where(is_local, out.float(), 0.0).view(num_tokens, top_k, -1)
    inner_values = torch.where(is_local, input_values(w2.config, hidden), 0.0)
    return (routed * weights.unsqueeze(-1)).sum(1), inner_values


def _gemm(
    gemm: Gemm,
    inputs: KernelInputs,
    local_ids: torch.Tensor,
    top_k: int,
    outputs: torch.Tensor,
    num_local: int,
    tuned_for_m: int,
) -> torch.Tensor:
    entry = tuning_entry(gemm.config, tuned_for_m)
    routes = align(local_ids, gemm.config.num_experts, entry["block_shape"][0])
    return launch_gemm(
        gemm, inputs, routes, top_k, outputs, num_local, entry, new_locks(outputs.device)
    )


def new_locks(device: torch.device) -> torch.Tensor:
    """Locks int32 for `launch_gemm`, all open; a kernel leaves them open."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(num_sms * 8, dtype=torch.int32, device=device)


def launch_gemm(
    gemm: Gemm,
    inputs: KernelInputs,
    routes: Mapping[str, torch.Tensor],
    top_k: int,
    outputs: torch.Tensor,
    num_local: int,
    entry: Mapping[str, Any],
    locks: torch.Tensor,
) -> torch.Tensor:
    """Launch one GEMM into `outputs` [T * k, N] and return it; the host does not wait for the device.

    `routes`: of `align` for the block size of `entry`, which is of `tuning_entry`. `top_k`: routes per row of the
    inputs, 1 for w2. `num_local`: routes of this rank.
    """
    both = inputs.group_scale is not None
    result: torch.Tensor = humming_gpu().forward.humming_forward(
        gemm.config,
        inputs=inputs.codes,
        outputs=outputs,
        input_scale=inputs.group_scale if both else inputs.token_scale,
        input_scale_2=inputs.token_scale if both else None,
        locks=locks,
        top_k=top_k,
        valid_shape_m=num_local,
        compute_config=_COMPUTE,
        tuning_config=dict(entry),
        **gemm.tensors,
        **routes,
    )
    return result
