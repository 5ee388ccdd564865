"""`hqconv.to_kernel`: tensors in memory to a rank's kernel tensors, equal to those of a converted folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hqconv
from hqconv.errors import HqconvError, InputError
from tests.make.families import save_family
from tests.make.formats import write
from tests.make.small import HIDDEN, INNER, LAYER, QWEN, save
from tests.make.tensors import same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def layer_of(folder: Path, out: Path) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """The first converted layer: its name, its tensors as the folder has them, and the model's config."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layer = next(iter(json.loads((out / "hqconv.json").read_text())["blocks"]))
    of_layer = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{layer}.")}
    return layer, of_layer, json.loads((folder / "config.json").read_text())


def assert_as_converted(
    folder: Path,
    tmp_path: Path,
    options: dict[str, Any],
    device: str = "cpu",
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Every rank's tensors and LayerConfigs, from memory and from an artifact."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = tmp_path / "out"
    hqconv.convert(folder, out, target="sm90", device="cpu", **options)
    layer, tensors, config = layer_of(folder, out)
    given = {name: one.to(device) for name, one in (weights or tensors).items()}
    named = {} if weights else {"model_config": config}
    for tp_rank in range(options.get("tp", 1)):
        for ep_rank in range(options.get("ep", 1)):
            rank = {"tp_rank": tp_rank, "ep_rank": ep_rank}
            expected = hqconv.load(out, layer=layer, **rank)
            found = hqconv.to_kernel(given, target="sm90", **rank, **named, **options)
            assert found.keys() == expected.keys()
            for gemm, there in expected.items():
                here = found[gemm]
                assert here.config == there.config
                assert here.hadamard_block_size == there.hadamard_block_size
                assert here.tensors.keys() == there.tensors.keys()
                for name, tensor in there.tensors.items():
                    assert here.tensors[name].device.type == device
                    assert same_bits(here.tensors[name], tensor), (gemm, name, rank)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("schema", "grid"),
    [
        ("mxfp4", {"tp": 2}),
        ("int4-g32-e4m3", {"ep": 2, "redundant_experts": 2, "expert_placement": "round_robin"}),
        ("nvfp4", {"tp": 2, "ep": 2}),
        ("int3-g64-h64+int4-g32-zp", {}),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoints_tensors(
    family: str, schema: str, grid: dict[str, Any], device: str, tmp_path: Path
) -> None:
    save_family(
        tmp_path / "source",
        family,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
    )
    assert_as_converted(
        tmp_path / "source", tmp_path, {"schema": schema, "dtype": "bfloat16", **grid}, device
    )


@pytest.mark.parametrize(
    "form", ["fp8-block", "ct-int4-g32", "gptq-int4-zp", "mxfp4-gpt-oss", "modelopt-nvfp4"]
)
def test_quantized_tensors(form: str, tmp_path: Path) -> None:
    write(tmp_path / "source", form)
    assert_as_converted(tmp_path / "source", tmp_path, {"schema": "source"})


@pytest.mark.parametrize("device", DEVICES)
def test_stacks_of_experts(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """w13 [E, 2I, H] and w2 [E, H, I], views of larger tensors and with gradients, one expert at a time."""
    monkeypatch.setattr("hqconv.conversion.layer_to_kernel._BATCH_BYTES", 1)
    torch.manual_seed(0)
    w13, w2 = torch.randn(4, 2 * INNER, HIDDEN).bfloat16(), torch.randn(4, HIDDEN, INNER).bfloat16()
    each = {"gate_proj": w13[:, :INNER], "up_proj": w13[:, INNER:], "down_proj": w2}
    tensors = {f"{LAYER}.{e}.{word}.weight": one[e] for word, one in each.items() for e in range(4)}
    save(tmp_path / "source", (tensors, QWEN))
    weights = {
        "w13": torch.cat([w13, w13], 2)[..., :HIDDEN].requires_grad_(),
        "w2": w2.mT.contiguous().mT,
    }
    options = {"schema": "int4-g32-e4m3", "dtype": "bfloat16", "tp": 2}
    assert_as_converted(tmp_path / "source", tmp_path, options, device, weights)


W13, W2 = (
    torch.zeros(4, 512, 256, dtype=torch.bfloat16),
    torch.zeros(4, 256, 256, dtype=torch.bfloat16),
)


class Sharded(torch.Tensor):
    """A tensor whose values lie elsewhere, as torch's DTensor."""


@pytest.mark.parametrize(
    ("weights", "options", "what"),
    [
        ({"w13": W13, "w2": W2[:, :, :128]}, {}, "not of experts' matrices"),
        ({"w13": W13[0], "w2": W2}, {}, "not of experts' matrices"),
        ({"a.experts.w": W2}, {}, "read with its config"),
        ({"w13": W13, "w2": W2}, {"tp": 2, "tp_rank": 2}, "no such rank"),
        ({"w13": W13, "w2": W2}, {"target": None}, "target GPU must be named"),
        ({"w13": W13, "w2": W2}, {"layout": "checkpoint"}, "not enough for this"),
        ({"w13": W13, "w2": W2}, {"calibrate": "builtin"}, "not enough for this"),
        (
            {"w13": W13, "w2": W2},
            {"schema": "fp8", "input_schema": "fp8-static"},
            "not enough for this",
        ),
        ({"w13": W13, "w2": W2}, {"tp": 3}, "cannot be split|cannot be cut|TP"),
        ({"w13": W13.to("meta"), "w2": W2}, {}, "no bytes of its own"),
        ({"w13": W13.as_subclass(Sharded), "w2": W2}, {}, "no bytes of its own"),
        ({"w13": W13.double(), "w2": W2.double()}, {}, "float64 are not read"),
        ({"w13": W13, "w2": W2}, {"schema": "int4-g32-e5m2", "dtype": "float16"}, "No server runs"),
        ({"w13": W13, "w2": W2}, {"schema": "int4-g32-e4m3-row", "dtype": "float16"}, "No server"),
        ({"w13": W13.to(torch.complex64), "w2": W2}, {}, "no checkpoint holds"),
    ],
)
def test_refused(weights: dict[str, torch.Tensor], options: dict[str, Any], what: str) -> None:
    with pytest.raises(HqconvError, match=what):
        hqconv.to_kernel(
            weights, **{"schema": "mxfp4", "target": "sm90", "dtype": "bfloat16", **options}
        )


@pytest.mark.parametrize("row", [3, 259])  # of gate and of up, which are one tensor
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fused_weight_that_is_not_finite_is_refused(row: int, value: float) -> None:
    bad = W13.clone()
    bad[2, row, 4] = value
    with pytest.raises(InputError, match=r"NaN or infinite(.|\n)*expert 2"):
        hqconv.to_kernel({"w13": bad, "w2": W2}, schema="mxfp4", target="sm90", dtype="bfloat16")
