"""One layer's experts, from tensors in memory to a rank's kernel tensors on the same device.

The tensors are planned and encoded by the conversion's own code: names, formats, checks and bits are of `convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hqconv.artifact.load import RankGemm
from hqconv.conversion.encode import DeferredCheckError, LayerEncoder
from hqconv.errors import RequestError
from hqconv.formats.encoding import SourceMatrix
from hqconv.kernel_layout.rank_slices import gemm_tensors
from hqconv.kernel_layout.transform import to_kernel
from hqconv.models.expert_bytes import RawExperts, RawLayout
from hqconv.models.expert_map import ExpertMap, map_experts
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.checks import check_request
from hqconv.planning.output_units import MoeLayerPlan, kernel_unit
from hqconv.planning.spec import ConversionOptions, make_spec
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.dtypes import code_of_torch, is_stored, torch_dtype
from hqconv.schemas.gpu_target import parse_target
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.weight_schema import LayerSchema
from hqconv.sources.safetensors import decoded_expert

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
    if weights.keys() == _STACKS.keys():
        weights, model_config = _as_checkpoint(weights)
    if model_config is None:
        raise RequestError(
            "The names of a checkpoint's tensors are read with its config.",
            where="model_config",
            expected="config.json of the model, or the tensors w13 and w2 alone",
            found=", ".join(list(weights)[:3]),
        )
    devices = {tensor.device for tensor in weights.values()}
    if len(devices) != 1:
        raise RequestError(
            "All tensors must be on one device.",
            where="weights",
            found=", ".join(map(str, devices)),
        )
    (device,) = devices
    planned, schema = _plan(weights, dict(model_config), options, device)
    grid, layer = planned.grid, planned.layer
    if not (tp_rank in range(grid.tp) and ep_rank in range(grid.ep)):
        found = f"tp rank {tp_rank}, ep rank {ep_rank}"
        expected = f"tp rank < {grid.tp}, ep rank < {grid.ep}"
        raise RequestError(
            "There is no such rank.", where="to_kernel", expected=expected, found=found
        )
    local = grid.local_experts(layer.num_experts, ep_rank)
    tensors = {
        gemm: {
            name: torch.empty((len(local), *one.shape), dtype=torch_dtype(one.dtype), device=device)
            for name, one in form.tensors.items()
        }
        for gemm, form in planned.forms.items()
    }
    part = next(one for one in planned.slices if one.rank == tp_rank)
    flat = {
        name: tensor.detach().contiguous().flatten().view(torch.uint8)
        for name, tensor in weights.items()
    }
    step = max(1, _BATCH_BYTES * layer.num_experts // layer.num_bytes)
    for begin in range(0, len(local), step):
        experts = local[begin : begin + step]
        packed = _packed(planned, experts, flat, device)
        for gemm, of_gemm in gemm_tensors(packed, schema, part).items():
            for name, tensor in to_kernel(planned.forms[gemm], of_gemm).items():
                tensors[gemm][name][begin : begin + len(experts)].copy_(tensor)
    return {
        gemm: RankGemm(
            {**form.config, "num_experts": len(local)}, tensors[gemm], schema.of(gemm).rotation
        )
        for gemm, form in planned.forms.items()
    }


def _as_checkpoint(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Name w13 [E, 2I, H] and w2 [E, H, I] as a checkpoint of gated experts does, with a config of their sizes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    w13, w2 = shapes["w13"], shapes["w2"]
    if len(w13) != 3 or len(w2) != 3 or w13 != (w2[0], 2 * w2[2], w2[1]):
        expected = "[E, 2I, H] and [E, H, I]"
        raise RequestError(
            "The shapes are not of experts' matrices.",
            where="weights",
            expected=expected,
            found=found,
        )
    config = {
        "model_type": "qwen3_moe",
        "num_experts": w13[0],
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
    }
    config |= {"hidden_size": w13[2], "moe_intermediate_size": w2[2], "num_hidden_layers": 1}
    return {_STACKS[name]: tensor for name, tensor in weights.items()}, config


def _plan(
    weights: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    options: ConversionOptions,
    device: torch.device,
) -> tuple[MoeLayerPlan, LayerSchema]:
    """Plan the layer as `convert` would, with its checks; return the schemas of its GEMMs, too."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if not is_stored(tensor.dtype):
            what = "A tensor has a dtype that no checkpoint holds."
            raise RequestError(
                what, where=name, expected="bfloat16, float16, float32 …", found=tensor.dtype
            )
    refs = {
        name: TensorRef(
            name, code_of_torch(tensor.dtype), tuple(tensor.shape), number, 0, sizes[name]
        )
        for number, (name, tensor) in enumerate(weights.items())
    }
    experts = map_experts(refs, config, config.get("quantization_config"))
    _check(experts, options)
    sm = (
        "sm{}{}".format(*torch.cuda.get_device_capability(device))
        if device.type == "cuda"
        else None
    )
    target = options.target or sm
    if target is None:
        what, found = "The target GPU must be named.", "tensors on the CPU"
        raise RequestError(what, where="target", expected="h100, sm90 …", found=found)
    spec = make_spec(options, experts, config, parse_target(target, options.cuda))
    check_request(experts, spec)
    return kernel_unit(experts.layers[0], spec), spec.schema


def _check(experts: ExpertMap, options: ConversionOptions) -> None:
    """Refuse several layers at once, and options that need more than a layer's weights."""
    other = {
        "layout": options.layout != KERNEL,
        "calibrate": options.calibrate is not None,
        "overrides": bool(options.overrides),
        "input_schema": options.inputs.is_static,
    }
    if named := [name for name, is_asked in other.items() if is_asked]:
        what = "Weights of one layer in memory are not enough for this."
        raise RequestError(
            what,
            where=", ".join(named),
            expected="the kernel layout, dynamic activations, rtn or mse",
        )
    if len(experts.layers) > 1:
        found = ", ".join(layer.name for layer in experts.layers)
        raise RequestError(
            "One layer is converted at a time.", where="weights", expected="one layer", found=found
        )


def _packed(
    planned: MoeLayerPlan,
    experts: Sequence[int],
    flat: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, dict[str, torch.Tensor]]:
    """Encode some experts, whose tensors' bytes are `flat`: role → packed tensors. Raises InputError for bad values."""
    layout = RawLayout(planned.layer, experts)
    raw = RawExperts(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
    for ref, start in layout.ranges:
        raw.buffer[start : start + ref.num_bytes] = flat[ref.name][
            ref.offset_bytes : ref.offset_bytes + ref.num_bytes
        ]
    encoder = LayerEncoder(_InMemory(), planned.layer, planned.encoding, device)
    try:
        done = encoder.encode(experts, raw)
        done.error_sums([one.cpu() for one in done.measured])
    except DeferredCheckError:
        done = encoder.encode(experts, raw, is_careful=True)
        done.error_sums([one.cpu() for one in done.measured])
    return done.tensors
