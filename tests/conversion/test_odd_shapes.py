"""Conversions nobody's family test reaches: ungated experts, one expert, square and narrow ones, float32."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hqconv.conversion.output_folder import UnitWriter
from hqconv.schemas.grid import Grid
from tests.make.conversions import assert_verified, manifest, run
from tests.make.qwen import write_qwen3_moe

GATED = {"model_type": "qwen3_moe", "hidden_act": "silu"}
UNGATED = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}


def write(folder: Path, gated: bool, sizes: tuple[int, int, int], dtype: torch.dtype) -> Path:
    """One MoE layer of (experts, hidden, intermediate) and a head."""
    num_experts, hidden, inner = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    layer = "model.layers.0.mlp.experts" if gated else "backbone.layers.0.mixer.experts"
    shapes = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes |= {"gate_proj": (inner, hidden)} if gated else {}
    tensors = {
        f"{layer}.{e}.{name}.weight": (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        for e in range(num_experts)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(
        {**tensors, "lm_head.weight": torch.ones(8, hidden, dtype=dtype)},
        folder / "model.safetensors",
    )
    words = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_hidden_layers": 1}
    words |= {"num_experts_per_tok": 1, "num_experts" if gated else "n_routed_experts": num_experts}
    (folder / "config.json").write_text(json.dumps(words | (GATED if gated else UNGATED)))
    return folder


@pytest.mark.parametrize(
    ("sizes", "dtype", "gated"),
    [
        ((1, 64, 64), torch.bfloat16, False),
        ((3, 128, 128), torch.float32, True),
        ((2, 256, 64), torch.bfloat16, True),
        ((5, 192, 320), torch.float32, False),
    ],
)
def test_they_convert_and_verify(
    tmp_path: Path, gated: bool, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    source = write(tmp_path / "source", gated, sizes, dtype)
    cases = [
        ("mxfp4", Grid(tp=2)),
        ("nvfp4", Grid(ep=min(2, sizes[0]))),
        ("int4-g64-zp", Grid()),
        ("int8", None),
    ]
    for schema, grid in cases:
        out = tmp_path / schema
        run(source, out, schema, grid, layout="kernel" if grid else "checkpoint")
        assert_verified(out, source)
        (layer,) = manifest(out)["blocks"].values()
        assert layer["w13_order"] == (["gate", "up"] if gated else ["up"])


def test_a_shard_of_nothing_but_empty_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are finished although nothing is ever written to them, and not before they are made."""

    class Slow(UnitWriter):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.2)
            super().__init__(*arguments)

    monkeypatch.setattr("hqconv.conversion.executor.UnitWriter", Slow)
    src = write_qwen3_moe(tmp_path / "src", num_layers=1)
    tensors = {
        name: tensor
        for name, tensor in load_file(src / "model.safetensors").items()
        if ".experts." in name
    }
    save_file(
        {**tensors, "nothing": torch.empty(0), "no.rows": torch.empty(0, 7)},
        src / "model.safetensors",
    )
    run(src, tmp_path / "out", "mxfp4")
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "nothing": (0,),
        "no.rows": (0, 7),
    }
