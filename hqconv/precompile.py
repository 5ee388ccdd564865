"""Compile the CPU's loops beforehand, for a wheel or an image: `python -m hqconv.precompile`.

Small models of noise are converted, and what numba compiles meanwhile is kept in the package. A first conversion then
finds its loops; what is not found, such as loops of a rare schema, is compiled as always.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hqconv.conversion.resources import default_threads
from hqconv.jit import COMPILED, HOST, LEVELS, compile_into, settings_of
from hqconv.schemas.weight_schema import PRESETS

_SIZE = 256  # of the models' hidden layers
# Models by the dtype or quantization of their experts, and options of a conversion, in the order of compiling.
_MAIN = ("mxfp4", "int4", "fp8-block", "nvfp4")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("bfloat16", {"schema": schema}) for schema in PRESETS),
    *(("bfloat16", {"schema": schema, "layout": "checkpoint"}) for schema in PRESETS),
    # Ranks with less than a tile of columns, which are padded and permuted after the encoder.
    *(("bfloat16", {"schema": schema, "tp": 4}) for schema in ("mxfp4", "nvfp4", "mxfp8", "fp8", "int8")),
    *(("bfloat16", {"schema": schema, "quantizer": "mse"}) for schema in _MAIN),
    *((model, {"schema": schema}) for model in ("float16", "float32") for schema in _MAIN),
    *(("fp8-block", {"schema": schema}) for schema in ("source", *_MAIN)),
)


def main() -> None:
    """Compile for two levels of x86-64, or as the options say; print where the loops are."""
    usual = list(LEVELS) if platform.machine() == "x86_64" else [HOST]
    parser = argparse.ArgumentParser(prog="python -m hqconv.precompile", description=(__doc__ or "").partition("\n")[0])
    what = f"instructions that the loops may use; {HOST}: all of this processor (default: {' '.join(usual)})"
    parser.add_argument("--level", nargs="+", choices=[*LEVELS, HOST], default=usual, help=what)
    parser.add_argument("--only", type=int, nargs="+", help=argparse.SUPPRESS)  # numbers of cases; one process's part
    options = parser.parse_args()
    if options.only is not None:
        compile_into(COMPILED, *options.level)
        compile_cases(options.only)
        return
    try:
        precompile(options.level)
    except OSError as error:
        raise SystemExit(f"error: The loops cannot be kept.\n  where: {COMPILED}\n  found: {error}") from error
    files = list(COMPILED.glob("*.loop"))
    print(f"{len(files)} loops, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB: {COMPILED}")


def precompile(levels: Sequence[str]) -> None:
    """Compile all cases into an emptied COMPILED, in a process for each processor."""
    shutil.rmtree(COMPILED, ignore_errors=True)
    COMPILED.mkdir()
    count = default_threads()
    parts = [(level, range(start, len(CASES), count)) for level in levels for start in range(min(count, len(CASES)))]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(_run_part, parts))


def _run_part(part: tuple[str, range]) -> None:
    level, cases = part
    command = [sys.executable, "-m", "hqconv.precompile", "--level", level, "--only", *map(str, cases)]
    subprocess.run(command, env={**os.environ, **settings_of(level)}, check=True)


def compile_cases(numbers: list[int]) -> None:
    """Convert the models of these cases, and verify the results."""
    from hqconv import api
    from hqconv.cpu_loops import file_loops

    file_loops.load()  # of transfers that are larger than these models
    with tempfile.TemporaryDirectory(prefix="hqconv-precompile-") as name:
        folder = Path(name)
        for model, options in (CASES[number] for number in numbers):
            source, out = folder / model, folder / "out"
            if not source.exists():
                write_model(source, model)
            common: dict[str, Any] = {"target": "sm90", "device": "cpu", "threads": 1, "overwrite": True}
            api.convert(source, out, **common, **options)
            api.verify(out, source, checks=("files", "weights"), device="cpu", threads=1)


def write_model(folder: Path, kind: str) -> None:
    """Write a Qwen3-MoE of one layer and two experts, in a dtype of torch or in fp8 with blocks of 128 x 128."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    dtype = torch.bfloat16 if kind == "fp8-block" else getattr(torch, kind)
    noise = partial(torch.randn, _SIZE, _SIZE, generator=generator)
    for expert in range(2):
        for role in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.{expert}.{role}.weight"
            tensors[name] = noise().to(dtype)
            if kind == "fp8-block":
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.ones(_SIZE // 128, _SIZE // 128)
    tensors["model.layers.0.mlp.gate.weight"] = noise()[:2].to(dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": _SIZE,
        "moe_intermediate_size": _SIZE,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 1,
    }
    if kind == "fp8-block":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
