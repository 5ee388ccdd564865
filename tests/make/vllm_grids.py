"""Every schema in both dtypes on every kind of grid, through the plugin, rank by rank on a machine without a GPU.

Run as a program, `python -m tests.make.vllm_grids OUT`: writes, for each, "" where every rank's layer holds its
rank file and has a kernel, or why not.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.make import vllm_cpu  # isort: skip  - before vLLM
from vllm.model_executor.layers.quantization import get_quantization_config

from hqconv.errors import HqconvError
from hqconv.schemas.grid import Grid
from hqconv.schemas.weight_schema import PRESETS
from hqconv.serving.vllm.plugin import register
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe

LAYER = "model.layers.0.mlp.experts"
SIZES = {"num_experts": 4, "hidden": 256, "inter": 256}
KINDS = ("intN", "intN-g64", "intN-c", "intN-g64-zp", "intN-g64-fpzp")
SCHEMAS = {name: (name,) for name in PRESETS} | {
    kind: tuple(kind.replace("N", str(bits)) for bits in range(1, 9)) for kind in KINDS
}
DTYPES = ("bfloat16", "float16")
GRIDS = {
    "tp 1": Grid(),
    "tp 2": Grid(tp=2),
    "ep 2 linear": Grid(ep=2),
    "ep 2 round_robin": Grid(ep=2, placement="round_robin"),
}
# What vLLM 0.33 has no start for, whatever the schema, and what it would count.
REFUSED = {
    "tp 2 and ep 2": (Grid(tp=2, ep=2), {"ep": 4}),
    "redundant experts without --enable-eplb": (Grid(ep=2, redundant=2), {"ep": 2}),
    "round_robin without expert groups": (Grid(ep=2, placement="round_robin"), {"ep": 2}),
}


def serve(out: Path, dtype: str, grid: Grid, ranks: list[Any], groups: int | None = None) -> str:
    """Build and fill the layer of each rank; returns why not, or "" where all hold their files."""
    words = json.loads((out / "config.json").read_text())["quantization_config"]
    try:
        for rank in ranks:
            config = get_quantization_config("hqconv").from_config(words)
            config.maybe_update_config(str(out))
            place = {"grid": rank, "placement": grid.placement, "expert_groups": groups}
            layer = vllm_cpu.build_layer(config, LAYER, dtype=getattr(torch, dtype), **SIZES, **place)
            layer.quant_method.process_weights_after_loading(layer)
            stored = load_file(layer.quant_method.file.path)
            held = {f"{LAYER}.{name}": tensor for name, tensor in layer.named_parameters()}
            assert layer.quant_method.moe_kernel is not None
            assert held.keys() == stored.keys()
            assert all(torch.equal(held[name], stored[name]) for name in stored)
    except HqconvError as error:
        return error.what
    return ""


def cell(source: Path, schema: str, dtype: str, grid: Grid) -> str:
    """One schema in one dtype on one grid."""
    groups = 2 if grid.placement == "round_robin" else None
    ranks = [
        vllm_cpu.parallel(tp=grid.tp, tp_rank=t, ep=grid.ep, ep_rank=e)
        for t, e in itertools.product(range(grid.tp), range(grid.ep))
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(source, Path(folder) / "out", schema, grid, threads=1, dtype=dtype)
        except HqconvError as error:
            return error.what
        return serve(Path(folder) / "out", dtype, grid, ranks, groups)


def main() -> None:
    """Try all, and write what came of it."""
    torch.set_num_threads(1)
    register()
    with tempfile.TemporaryDirectory() as scratch, vllm_cpu.config():
        sizes = {"hidden_size": SIZES["hidden"], "intermediate_size": SIZES["inter"]}
        source = write_qwen3_moe(Path(scratch) / "source", num_layers=1, num_experts=4, **sizes)
        cells = {
            schema: {
                dtype: {name: cell(source, schema, dtype, grid) for name, grid in GRIDS.items()} for dtype in DTYPES
            }
            for schemas in SCHEMAS.values()
            for schema in schemas
        }
        refused = {}
        for name, (grid, counted) in REFUSED.items():
            out = Path(scratch) / name.replace(" ", "-")
            run(source, out, "int8", grid, threads=1)
            refused[name] = serve(out, "bfloat16", grid, [vllm_cpu.parallel(**counted)])
    Path(sys.argv[1]).write_text(json.dumps({"kinds": SCHEMAS, "cells": cells, "refused": refused}))


if __name__ == "__main__":
    main()
