"""Stands in for Humming's kernels on the CPU: what `backends/moe` asks of them, done plainly, weights as floats.

Activations are quantized by search, with scales laid out as Humming's process_input.h wants them, and read back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hqconv.kernel_layout.fused_moe as moe
from hqconv.artifact.reader import Artifact
from hqconv.formats.encoding import resized
from hqconv.kernel_layout.fused_moe import Gemm, layer_config
from hqconv.quantization.quantized import rotate
from hqconv.schemas.grid import tp_slices
from hqconv.verification import kernel
from hqconv.verification.result import CheckResult
from tests.make.activations import NUMBERS, quantize_by_search
from tests.make.formulas import run_c

BLOCK_M = 16
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_TORCH = {"float8e4m3": torch.float8_e4m3fn, "float8e5m2": torch.float8_e5m2, "int8": torch.int8}


def scheme_of(config: Any) -> SimpleNamespace:
    """A LayerConfig's activations in the words of `quantize_by_search`."""
    return SimpleNamespace(
        dtype=config.a_dtype.dtype_str,
        mode=config.input_quant_mode.value,
        group_size=config.input_scale_group_size,
        scale_dtype=config.as_dtype and config.as_dtype.dtype_str,
    )


def _packed(numbers: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype in _TORCH:
        return torch.from_numpy(numbers).to(_TORCH[dtype])
    if dtype == "int4":
        codes = numbers.astype(np.int64) & 15
    else:
        codes = np.vectorize(_FP4.index)(np.abs(numbers)) + 8 * (numbers < 0)
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def _unpacked(codes: torch.Tensor, dtype: str) -> np.ndarray:
    if dtype in _TORCH:
        assert codes.dtype == _TORCH[dtype]
        return codes.double().numpy()
    raw = codes.numpy()
    nibbles = np.empty((len(raw), 2 * raw.shape[1]), np.int64)
    nibbles[:, 0::2], nibbles[:, 1::2] = raw & 15, raw >> 4
    if dtype == "int4":
        return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float64)
    return np.array(_FP4)[nibbles & 7] * np.where(nibbles > 7, -1.0, 1.0)


def _scale_numbers(dtype: str) -> np.ndarray:
    return NUMBERS[dtype][NUMBERS[dtype] >= 0] if dtype == "float8e4m3" else NUMBERS[dtype]


def _stored_scales(scales: np.ndarray, dtype: str) -> torch.Tensor:
    """Group scales as Humming keeps them: float32, or the bytes of four groups in an int32, the first lowest."""
    if dtype == "float32":
        return torch.from_numpy(scales.astype(np.float32))
    codes = np.searchsorted(_scale_numbers(dtype), scales.astype(np.float64))
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    words = sum(codes[:, i::4].astype(np.int64) << 8 * i for i in range(4))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _read_scales(stored: torch.Tensor, dtype: str, num_groups: int) -> np.ndarray:
    if dtype == "float32":
        assert stored.dtype == torch.float32
        return stored.double().numpy()
    assert stored.dtype == torch.int32
    words = stored.numpy().view(np.uint32)
    codes = np.stack([words >> np.uint32(8 * i) & np.uint32(255) for i in range(4)], axis=-1)
    return _scale_numbers(dtype)[codes.reshape(len(words), -1)[:, :num_groups]]


def process(
    config: Any,
    inputs: torch.Tensor,
    token_scales: torch.Tensor | None = None,
    activation_type: str = "none",
    activation_impl: str | None = None,
    hadamard_block_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`humming.forward.may_process_input` of an activation with a gate, or none."""
    values = inputs.float()
    if activation_type != "none":
        assert activation_type == "binary_split"
        gate, up = (half.double().numpy() for half in values.chunk(2, -1))
        values = torch.from_numpy(run_c(activation_impl or "", gate, up)).float()
    if hadamard_block_size:
        values = rotate(values, hadamard_block_size)
    scheme = scheme_of(config)
    if scheme.mode == "none":
        assert token_scales is None
        return values.to(inputs.dtype), None, None
    static = None if token_scales is None else token_scales.item()
    assert (static is not None) == scheme.mode.startswith("static_tensor")
    rows = [quantize_by_search(row, scheme, static) for row in values.numpy()]
    codes = _packed(np.stack([row[0] for row in rows]), scheme.dtype)
    groups = None
    if rows[0][1] is not None:
        groups = _stored_scales(
            np.stack([row[1] for row in rows if row[1] is not None]), scheme.scale_dtype
        )
    if static is not None or rows[0][2] is None:
        return codes, groups, token_scales
    return codes, groups, torch.tensor([[float(row[2] or 0)] for row in rows])


def _multiplied(config: Any, inputs: torch.Tensor, scale: Any, scale_2: Any) -> torch.Tensor:
    """What the GEMM makes of its activations; scales must be just those that Humming's launcher asserts."""
    scheme = scheme_of(config)
    if scheme.mode == "none":
        assert scale is None
        assert scale_2 is None
        return inputs.double()
    assert (scale_2 is not None) == config.input_quant_mode.has_secondary_scale
    values = _unpacked(inputs, scheme.dtype)
    if scheme.group_size:
        groups = _read_scales(scale, scheme.scale_dtype, -(-values.shape[1] // scheme.group_size))
        values = values * np.repeat(groups, scheme.group_size, axis=1)[:, : values.shape[1]]
        scale = scale_2
    if scale is not None:
        assert scale.dtype == torch.float32
        shape = (1,) if scheme.mode.startswith("static_tensor") else (len(values), 1)
        assert scale.shape == shape
        values = values * scale.double().numpy()
    return torch.from_numpy(values)


def multiply(
    config: Any, inputs: torch.Tensor, outputs: torch.Tensor, **words: Any
) -> torch.Tensor:
    """`humming.forward.humming_forward` of the indexed kind, with weights [E, N, K] of floats."""
    x = _multiplied(config, inputs, words["input_scale"], words["input_scale_2"])
    weight, bias = words["weight"].double(), words.get("bias")
    for place, route in enumerate(words["sorted_ids"].tolist()):
        if route < len(outputs):
            expert = int(words["expert_ids"][place // BLOCK_M])
            out = weight[expert] @ x[route // words["top_k"]]
            outputs[route] = out if bias is None else out + bias[expert].double()
    return outputs


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `backends/moe` run these instead of Humming's, on the CPU."""
    library = SimpleNamespace(
        forward=SimpleNamespace(may_process_input=process, humming_forward=multiply)
    )
    monkeypatch.setattr(moe, "humming_gpu", lambda: library)
    monkeypatch.setattr(moe, "tuning_entry", lambda *_: {"block_shape": [BLOCK_M]})
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


Damage = Callable[[dict[str, Gemm]], dict[str, Gemm]]


def check_kernel(
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    experts: list[dict[str, torch.Tensor]],
    layers: list[str],
    damage: Damage = lambda gemms: gemms,
) -> CheckResult:
    """Check the kernel on the CPU, with weights that are made up, cut for each rank and maybe damaged."""
    use(monkeypatch)
    hidden, inner = experts[0]["w2"].shape

    def load(
        _: Artifact, layer: str, tp_rank: int, ep_rank: int, device: torch.device
    ) -> dict[str, Gemm]:
        schema = artifact.manifest.layer_spec.schema
        _, begin, end, share = tp_slices(inner, artifact.grid, schema)[tp_rank]
        mine = [experts[e] for e in artifact.grid.local_experts(len(experts), ep_rank)]
        stacks = {
            "w13": [
                torch.cat([resized(e[role][begin:end], (share, hidden)) for role in ("w1", "w3")])
                for e in mine
            ],
            "w2": [resized(e["w2"][:, begin:end], (hidden, share)) for e in mine],
        }
        gemms = {}
        for gemm, parts in stacks.items():
            config = layer_config(artifact.rank_file(layer, tp_rank, ep_rank).configs[gemm])
            weight, rotation = torch.stack(parts), schema.of(gemm).rotation
            if rotation:
                weight = rotate(weight, rotation)
            gemms[gemm] = Gemm(config, {"weight": weight}, rotation=rotation)
        return damage(gemms)

    monkeypatch.setattr(kernel, "_load_rank", load)
    monkeypatch.setattr(kernel, "decoded_experts", lambda *_: (expert for expert in experts))
    monkeypatch.setattr(kernel, "compile_kernels", lambda *_: None)
    return kernel.check_kernel(artifact, None, layers, [1, 24], torch.device("cpu"))
