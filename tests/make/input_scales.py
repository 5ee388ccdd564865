"""Small checkpoints with an activation scale for each projection of each expert, no two alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.make import configs
from tests.make.small import (
    LAYER,
    ROLES,
    E,
    Source,
    Tensors,
    fp8_blocks,
    fp8_tensors,
    nvfp4,
    per_expert,
)

PART = "input_scale"


def scale_of(expert: int, role: str) -> float:
    """What a projection's scale is before it is stored as float32: expert 1's are the largest, of w13 its gate's."""
    return (1 + (expert + 2) % 4) * {"gate_proj": 0.0317, "up_proj": 0.0311, "down_proj": 0.0119}[
        role
    ]


LARGEST = {"w13": scale_of(1, "gate_proj"), "w2": scale_of(1, "down_proj")}
"""What they come to: Humming's maximum, in float64."""


def as_stored(number: float) -> float:
    """A number as a checkpoint has it."""
    return torch.tensor(number).item()


def expected() -> dict[str, float]:
    """GEMM → its scale."""
    return {gemm: as_stored(number) for gemm, number in LARGEST.items()}


def scale_names() -> Iterator[tuple[str, int, str]]:
    """The activation scales' names with expert and projection."""
    for expert in range(E):
        for role in ROLES:
            yield f"model.layers.0.mlp.experts.{expert}.{role}.{PART}", expert, role


def _with_scales(source: Source, shape: tuple[int, ...] = ()) -> Source:
    tensors, config = source
    for name, expert, role in scale_names():
        tensors[name] = torch.full(shape, scale_of(expert, role))
    return tensors, config


def fp8() -> Source:
    """transformers' fp8 with a scale per tensor."""
    return _with_scales(fp8_tensors())


def layers() -> Source:
    """fp8 in blocks whose activations have static scales."""
    tensors, config = fp8_blocks()
    config["quantization_config"]["activation_scheme"] = "static"
    return _with_scales((tensors, config), (1,))


def modelopt() -> Source:
    """ModelOpt's fp8."""
    tensors, config = fp8_tensors()
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return _with_scales((tensors, config))


def int8() -> Source:
    """compressed-tensors' int8, weights per channel, activations per tensor."""

    def parts(n: int, k: int, seed: int) -> Tensors:
        codes = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(seed))
        scale = torch.rand(n, 1, generator=torch.Generator().manual_seed(seed)).add(0.1).bfloat16()
        return {"weight": codes.to(torch.int8), "weight_scale": scale}

    config = configs.compressed("int-quantized", 8, "int", "channel")["quantization_config"]
    group = config["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "strategy": "tensor"}
    return _with_scales(per_expert(parts, config), (1,))


def modelopt_nvfp4() -> Source:
    """ModelOpt's nvfp4: input_scale multiplies, the largest input / (6 * 448)."""
    return _with_scales(nvfp4())


def compressed_nvfp4() -> Source:
    """compressed-tensors' nvfp4: input_global_scale and weight_global_scale divide."""
    tensors, config = nvfp4()
    names = {
        "weight": "weight_packed",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
    }
    renamed = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if ".experts." not in name:
            renamed[name] = tensor
        elif part in names:
            renamed[f"{stem}.{names[part]}"] = (
                1 / tensor.reshape(1) if part == "weight_scale_2" else tensor
            )
    for name, expert, role in scale_names():
        renamed[name.replace(PART, "input_global_scale")] = torch.full(
            (1,), 1 / scale_of(expert, role)
        )
    config |= configs.compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16)
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    return renamed, config


STATIC: dict[str, tuple[Callable[[], Source], str, str]] = {
    "fp8": (fp8, "fp8-tensor", "fp8-static"),
    "blocks": (layers, "fp8-block", "fp8-static"),
    "modelopt": (modelopt, "int4", "fp8-static"),
    "int8": (int8, "int8", "int8-static"),
}
"""Writer, weight schema and input schema."""


def scales_in(out: Path, tensor: str = PART) -> dict[str, dict[str, float]]:
    """Rank → GEMM → the scale in its file."""
    scales = {}
    for path in sorted((out / "experts").rglob("*.safetensors")):
        tensors = load_file(path)
        found = {gemm: tensors[f"{LAYER}.{gemm}_{tensor}"] for gemm in ("w13", "w2")}
        assert all((scale.dtype, scale.shape) == (torch.float32, (1,)) for scale in found.values())
        scales[path.parent.name] = {gemm: scale.item() for gemm, scale in found.items()}
    return scales
