"""`--tp-split groups`: ranks hold whole scale groups, the last ranks fewer, and zeros fill what is not whole.

The oracle is a checkpoint whose experts have the zeros already: hqconv converts it without any split.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import hqconv
from hqconv import dequantize
from hqconv.errors import RequestError
from hqconv.schemas.grid import GROUPS, Grid, slice_unit, stored_size, tp_share, tp_slices, working_tp_sizes
from hqconv.schemas.weight_schema import WeightSchema
from tests.make import conversions
from tests.make.conversions import manifest, schema_of

LAYER = "model.layers.0.mlp.experts"
HIDDEN, EXPERTS = 256, 2
ROTATED = WeightSchema(
    name="rotated", b_dtype="uint4", weight_scale_type="group", weight_scale_group_size=32, hadamard_block_size=64
)


def source(folder: Path, inner: int, stored: int | None = None, has_bias: bool = False) -> Path:
    """Write a checkpoint of one layer; rows and columns from `inner` to `stored` are zeros."""
    folder.mkdir()
    generator, stored = torch.Generator().manual_seed(inner), stored or inner
    tensors = {"model.layers.0.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
            values = torch.randn(shape, generator=generator).bfloat16()
            rows, columns = (stored - inner if size == inner else 0 for size in shape)
            filled = torch.nn.functional.pad(values, (0, columns, 0, rows))
            tensors[f"{LAYER}.{expert}.{name}_proj.weight"] = filled
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": stored,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rank_tensors(out: Path, tp: int) -> list[dict[str, bytes]]:
    found = []
    for rank in range(tp):
        with safe_open(out / f"experts/tp{rank}-ep0/{LAYER}.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found.append({name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()})
    return found


CASES = [
    ("int4-g64", 96, (1, 2)),
    ("int4-g64", 192, (2, 3)),
    ("int4-g64-zp", 96, (1, 2)),
    ("int4-g64-fpzp", 160, (2, 3)),
    ("mxfp4", 80, (2, 3)),
    ("nvfp4", 80, (1, 2)),
    ("fp8", 80, (1, 2)),
    ("int8", 72, (1, 3)),
    ("fp8-block", 320, (2, 3)),
    ("fp8-tensor", 96, (2,)),
    ("rotated", 96, (1, 2)),
]


@pytest.mark.parametrize(("name", "inner", "sizes"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_ranks_together_are_the_whole(
    tmp_path: Path, name: str, inner: int, sizes: tuple[int, ...], dtype: str
) -> None:
    schema = ROTATED if name == "rotated" else schema_of(name)
    stored = stored_size(inner, schema)
    src, filled = source(tmp_path / "src", inner), source(tmp_path / "filled", inner, stored)
    conversions.run(filled, tmp_path / "whole", schema, dtype=dtype)
    whole = dequantize(tmp_path / "whole", layer=LAYER)
    for tp in sizes:
        out = tmp_path / f"tp{tp}"
        conversions.run(src, out, schema, Grid(tp, split=GROUPS), dtype=dtype)
        conversions.assert_verified(out, src)
        found = dequantize(out, layer=LAYER)
        for role, values in whole.items():
            assert torch.equal(found[role], values[:, :, :inner] if role == "w2" else values[:, :inner]), (tp, role)
        if tp in working_tp_sizes(stored, schema):  # the ranks hold what even ranks of the filled checkpoint hold
            conversions.run(filled, tmp_path / f"even{tp}", schema, Grid(tp), dtype=dtype)
            assert rank_tensors(out, tp) == rank_tensors(tmp_path / f"even{tp}", tp)
