"""How long looking takes: `inspect` and `convert --dry-run` of checkpoints that are headers in front of holes.

The command is `python scripts/bench.py --headers [--tensors 45000,178000,370000] [--formats bf16,fp8-block]`, and
`[--runs 3]`. Names and config are DeepSeek-V3's, with as many layers of 384 experts as give about that many tensors, in
shards of 5 GB; an expert has three tensors, in fp8-block six. Every figure is of a whole command, less the same command
on a model of a few tensors, which is its start-up: what is left is work for tensors. Of several runs the least of each.
Each model is also planned as an mxfp4 artifact for TP 8, whose headers and manifest are written in front of holes (its
digests are zeros): the last rows are `inspect` and `report` of it, with and without counts of codes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DRY_RUN = ("convert", "--dry-run", "--json", "--device=cpu", "--target=sm90", "-o", "/nowhere/out")
LOOKS: dict[str, list[str]] = {
    "inspect": ["inspect", "--json"],
    "dry-run": [*DRY_RUN, "--schema=mxfp4", "--tp=8"],
    "dry-run, checkpoint layout": [*DRY_RUN, "--schema=int4", "--layout=checkpoint"],
}
ARTIFACT = "inspect, artifact"
REPORTS: dict[str, list[str]] = {"report, artifact": []}
FORMATS = {"bf16": 3, "fp8-block": 6}  # tensors of an expert
EXPERTS, HIDDEN, INNER, LAYER = 384, 7168, 2048, 128
SHARD_BYTES = 5 * 10**9
Entry = tuple[str, str, tuple[int, int]]  # name, dtype, shape


def tensors(layers: int, experts: int, fmt: str) -> Iterator[Entry]:
    """Every tensor, layer by layer."""
    sides = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    yield "model.embed_tokens.weight", "BF16", (1024, HIDDEN)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.mlp.gate.weight", "BF16", (experts, HIDDEN)
        for expert in range(experts):
            for word, (n, k) in sides.items():
                name = f"{at}.mlp.experts.{expert}.{word}.weight"
                if fmt == "bf16":
                    yield name, "BF16", (n, k)
                    continue
                yield name, "F8_E4M3", (n, k)
                yield f"{name}_scale_inv", "F32", (n // LAYER, k // LAYER)


def config(layers: int, experts: int, fmt: str) -> dict[str, Any]:
    """config.json."""
    words: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
    }
    if fmt != "bf16":
        layer = [LAYER, LAYER]
        words["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": layer}
    return words


def make_headers(folder: Path, fmt: str, num_tensors: int, experts: int) -> int:
    """Write a sparse checkpoint of about so many tensors; returns how many it has."""
    layers = max(1, round(num_tensors / (experts * FORMATS[fmt] + 1)))
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    end = SHARD_BYTES + 1
    for name, dtype, (n, k) in tensors(layers, experts, fmt):
        size = n * k * {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        if end + size > SHARD_BYTES:
            shards.append({"__metadata__": {"format": "pt"}})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": [n, k], "data_offsets": [end, end + size]}
        end += size
    weight_map: dict[str, str] = {}
    for number, header in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        del header["__metadata__"]
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
        weight_map |= dict.fromkeys(header, path.name)
    files = {"config.json": config(layers, experts, fmt), "model.safetensors.index.json": {"weight_map": weight_map}}
    for name, words in files.items():
        (folder / name).write_text(json.dumps(words) + "\n", encoding="utf-8")
    return len(weight_map)


def make_artifact(source: Path, out: Path) -> int:
    """Write the planned files of an artifact, headers in front of holes, and its manifest; returns their bytes."""
    from hqconv import plan
    from hqconv.artifact.build import Measured, build_manifest
    from hqconv.artifact.manifest import sealed
    from hqconv.conversion.convert import write_sidecar_files
    from hqconv.io.durable_files import FileRecord
    from hqconv.planning.output_units import MoeLayerPlan
    from hqconv.sources.opening import open_source

    planned = plan(source, schema="mxfp4", target="sm90", device="cpu", tp=8)
    error = {"relative_error": 0.1, "worst_expert": 0, "worst_relative_error": 0.1}
    measured, records = dict[str, Measured](), list[FileRecord]()
    for unit in planned.units:
        is_layer = isinstance(unit, MoeLayerPlan)
        errors = dict.fromkeys(unit.layer.roles, error) if isinstance(unit, MoeLayerPlan) else {}
        sums = {} if is_layer else {"copied": {name: "0" * 16 for file in unit.files for name in file.tensors}}
        measured[unit.name] = Measured(errors, sums)
        for file in unit.files:
            path = out / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.header)
            os.truncate(path, file.size_bytes)
            records.append(FileRecord(file.path, file.size_bytes, "0" * 64))
    with open_source(source) as opened:
        records += write_sidecar_files(opened, planned, out)
        manifest = build_manifest(opened, planned, measured, records, {}, {})
    (out / "hqconv.json").write_bytes(sealed(manifest.to_dict()))
    return planned.num_bytes_out


def look(folder: str, words: list[str]) -> dict[str, float]:
    """One command in a process of its own: its wall and CPU seconds, and the most memory it had."""
    command = [sys.executable, "-m", "hqconv", words[0], folder, *words[1:]]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 4):  # what is only looked at need not fit on this disk
        raise SystemExit(f"failed: {command}")
    return {"wall": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}


def apart(*words: object) -> Any:
    """What this script prints in a small process: one that is started counts its parent's memory as its own peak."""
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, words)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def best(folder: Path, words: list[str], num_runs: int) -> dict[str, float]:
    """The least of several runs, each figure by itself."""
    runs = [apart("look", folder, *words) for _ in range(num_runs)]
    return {key: min(run[key] for run in runs) for key in runs[0]}


def measure_headers(work: Path, sizes: list[int], formats: list[str], num_runs: int) -> Iterator[dict[str, Any]]:
    """For each format and size, what each look takes; sources are made below `work` and removed."""
    for fmt in formats:
        small = work / f"headers-{fmt}-small"
        num_small = apart("make", small, fmt, 1, 8)
        fixed = {name: best(small, words, num_runs + 2) for name, words in LOOKS.items()}
        for size in sizes:
            folder = work / f"headers-{fmt}-{size}"
            count = apart("make", folder, fmt, size, EXPERTS)
            for name, words in LOOKS.items():
                found = figures(best(folder, words, num_runs), fixed[name], count - num_small)
                yield {"look": name, "format": fmt, "tensors": count, **found}
            artifact = work / f"artifact-{fmt}-{size}"
            num_bytes = apart("artifact", folder, artifact)
            found = figures(best(artifact, LOOKS["inspect"], num_runs), fixed["inspect"], count - num_small)
            yield {"look": ARTIFACT, "format": fmt, "tensors": count, "artifact_bytes": num_bytes, **found}
            page = artifact.with_suffix(".html")
            for name, more in REPORTS.items():
                words = ["report", "-o", str(page), "--overwrite", *more]
                found = figures(best(artifact, words, num_runs), fixed["inspect"], count - num_small)
                yield {"look": name, "format": fmt, "tensors": count, "artifact_bytes": num_bytes, **found}
            page.unlink()
            shutil.rmtree(artifact)
            shutil.rmtree(folder)
        shutil.rmtree(small)


def figures(found: dict[str, float], fixed: dict[str, float], num_more: int) -> dict[str, Any]:
    """What is said of one look: time and memory of each of the tensors that a small model has not."""
    return {
        "wall_seconds": round(found["wall"], 2),
        "cpu_seconds": round(found["cpu"], 2),
        "start_seconds": round(fixed["wall"], 2),
        "wall_us_per_tensor": round((found["wall"] - fixed["wall"]) / num_more * 1e6, 1),
        "cpu_us_per_tensor": round((found["cpu"] - fixed["cpu"]) / num_more * 1e6, 1),
        "peak_mb": round(found["peak"] / 1e6),
        "bytes_per_tensor": round((found["peak"] - fixed["peak"]) / num_more),
    }


if __name__ == "__main__":
    what, folder, *words = sys.argv[1:]
    result: object
    if what == "make":
        result = make_headers(Path(folder), words[0], *map(int, words[1:]))
    elif what == "artifact":
        result = make_artifact(Path(folder), Path(words[0]))
    else:
        result = look(folder, words)
    print(json.dumps(result))
