"""One layer's experts, from tensors in memory to a rank's kernel tensors on the same device.

The tensors are planned and encoded by the conversion's own code: names, formats, checks and bits are of `convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hqconv.artifact.load import RankGemm
from hqconv.conversion.encode import DeferredCheckError, LayerEncoder
from hqconv.errors import RequestError, first_few
from hqconv.formats.encoding import SourceMatrix
from hqconv.kernel_layout.transform import gemm_tensors, to_kernel
from hqconv.models.expert_map import map_experts
from hqconv.models.moe_layer import MoeLayer, RawExperts, RawLayout
from hqconv.planning.checks import check_request, refuse_unserved
from hqconv.planning.output_units import MoeLayerPlan, kernel_unit
from hqconv.planning.spec import ConversionOptions, make_spec
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.gpu_target import parse_target
from hqconv.schemas.tensors import TensorRef, code_of_torch, is_stored, torch_dtype
from hqconv.schemas.weight_schema import LayerSchema
from hqconv.sources.safetensors import decoded_expert

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCH_BYTES = 1 << 28  # of the experts that are encoded at once
_STACKS = {
    "w13": "model.layers.0.mlp.experts.gate_up_proj",
    "w2": "model.layers.0.mlp.experts.down_proj",
}


class _InMemory:
    """Experts whose bytes are given with every call."""

    def read_expert(
        self,
        layer: MoeLayer,
        expert: int,
        roles: Sequence[str],
        device: torch.device,
        raw: RawExperts | None = None,
    ) -> dict[str, SourceMatrix]:
        assert raw is not None
        return decoded_expert(layer, expert, roles, raw.tensor)


def layer_to_kernel(
    weights: Mapping[str, torch.Tensor],
    options: ConversionOptions,
    tp_rank: int,
    ep_rank: int,
    model_config: Mapping[str, Any] | None,
) -> dict[str, RankGemm]:
    """Convert one layer; arguments, result and errors as of `hqconv.to_kernel`."""
    _check_tensors(weights)
    if weights.keys() == _STACKS.keys():
        weights, model_config = _as_checkpoint(weights)
    if model_config is None:
        raise RequestError(
            "The names of a checkpoint's tensors are read with its config.",
            where="model_config",
            expected="config.json of the model, or the tensors w13 and w2 alone",
            found=first_few(list(weights)),
        )
    device = next(iter(weights.values())).device
    planned, schema = _plan(weights, dict(model_config), options, device)
    grid = planned.grid
    layer = planned.layer
    if not (tp_rank in range(grid.tp) and ep_rank in range(grid.ep)):
        raise RequestError(
            "There is no such rank.",
            where="to_kernel",
            expected=f"tp rank < {grid.tp}, ep rank < {grid.ep}",
            found=f"tp rank {tp_rank}, ep rank {ep_rank}",
        )
    local = grid.local_experts(layer.num_experts, ep_rank)
    gemms = {}
    for gemm, form in planned.forms.items():
        config = {**form.config, "num_experts": len(local)}
        tensors = {
            name: torch.empty((len(local), *ref.shape), dtype=torch_dtype(ref.dtype), device=device)
            for name, ref in form.tensors.items()
        }
        gemms[gemm] = RankGemm(config, tensors, schema.of(gemm).rotation)
    stored = {
        name: tensor.detach().contiguous().flatten().view(torch.uint8)
        for name, tensor in weights.items()
    }
    part = next(part for part in planned.slices if part.rank == tp_rank)
    step = max(1, _BATCH_BYTES * layer.num_experts // layer.num_bytes)
    for begin in range(0, len(local), step):
        experts = local[begin : begin + step]
        packed = _packed(planned, experts, stored, device)
        for gemm, sliced in gemm_tensors(packed, schema, part).items():
            for name, tensor in to_kernel(planned.forms[gemm], sliced).items():
                gemms[gemm].tensors[name][begin : begin + len(experts)].copy_(tensor)
    return gemms


def _check_tensors(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors without values here, and those of several devices."""
    for name, tensor in weights.items():
        if tensor.is_meta or type(tensor) not in _PLAIN:
            raise RequestError(
                "The tensor has no bytes of its own here.",
                where=name,
                expected="a plain tensor on the CPU or a GPU",
                found=f"{type(tensor).__name__} on {tensor.device}",
                remedy="Give the rank's local, materialized tensor, such as `tensor.full_tensor()` of a DTensor.",
            )
    devices = {str(tensor.device) for tensor in weights.values()}
    if len(devices) != 1:
        found = ", ".join(devices)
        raise RequestError("All tensors must be on one device.", where="weights", found=found)


def _as_checkpoint(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Name w13 [E, 2I, H] and w2 [E, H, I] as a checkpoint of gated experts does, with a config of their sizes."""
    w13 = weights["w13"].shape
    w2 = weights["w2"].shape
    if len(w2) != 3 or w13 != (w2[0], 2 * w2[2], w2[1]):
        raise RequestError(
            "The shapes are not of experts' matrices.",
            where="weights",
            expected="[E, 2I, H] and [E, H, I]",
            found=f"{list(w13)} and {list(w2)}",
        )
    config = {
        "model_type": "qwen3_moe",
        "num_experts": w2[0],
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
        "hidden_size": w2[1],
        "moe_intermediate_size": w2[2],
        "num_hidden_layers": 1,
    }
    return {_STACKS[name]: tensor for name, tensor in weights.items()}, config


def _plan(
    weights: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    options: ConversionOptions,
    device: torch.device,
) -> tuple[MoeLayerPlan, LayerSchema]:
    """Plan the layer as `convert` would, with its checks; return the schemas of its GEMMs, too."""
    refs = {}
    for number, (name, tensor) in enumerate(weights.items()):
        if not is_stored(tensor.dtype):
            raise RequestError(
                "A tensor has a dtype that no checkpoint holds.",
                where=name,
                expected="bfloat16, float16 …",
                found=tensor.dtype,
            )
        code = code_of_torch(tensor.dtype)
        shape = tuple(tensor.shape)
        refs[name] = TensorRef(name, code, shape, number, 0, tensor.nbytes)
    experts = map_experts(refs, config, config.get("quantization_config"))
    needs_more = options.calibrate is not None or options.overrides or options.inputs.is_static
    if options.layout != KERNEL or needs_more or len(experts.layers) > 1:
        raise RequestError(
            "Weights of one layer in memory are not enough for this.",
            expected="one layer, the kernel layout, dynamic activations, rtn or mse",
        )
    target = options.target
    if target is None and device.type == "cuda":
        target = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    if target is None:
        raise RequestError(
            "The target GPU must be named.",
            where="target",
            expected="h100, sm90 …",
            found="tensors on the CPU",
        )
    gpu = parse_target(target, options.cuda)
    spec = make_spec(options.with_schema(experts, config, gpu), experts, config, gpu)
    check_request(experts, spec)
    if not options.allow_unserved:
        refuse_unserved(experts, spec)
    return kernel_unit(experts.layers[0], spec), spec.schema


def _packed(
    planned: MoeLayerPlan,
    experts: Sequence[int],
    stored: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, dict[str, torch.Tensor]]:
    """Encode some experts, from tensors' bytes: role → packed tensors. Raises InputError for bad values."""
    layout = RawLayout(planned.layer, experts)
    raw = RawExperts(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
    for ref, start in layout.ranges:
        values = stored[ref.name].narrow(0, ref.offset_bytes, ref.num_bytes)
        raw.buffer[start : start + ref.num_bytes] = values
    encoder = LayerEncoder(_InMemory(), planned.layer, planned.encoding, device)
    encoded = encoder.encode(experts, raw)
    try:
        encoded.error_sums([sums.cpu() for sums in encoded.measured])
    except DeferredCheckError:
        encoded = encoder.encode(experts, raw, is_careful=True)
        encoded.error_sums([sums.cpu() for sums in encoded.measured])
    return encoded.tensors
