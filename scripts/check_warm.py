"""Serve a layer with kernels that were compiled beforehand, and with none, on a GPU: same bits, and nothing compiled.

    python scripts/check_warm.py [--work FOLDER] [--schemas mxfp4,int4]

For each schema: convert a small model, `hqconv warm` it once for the GPU here and once as on a machine without one,
then run the layer in two fresh processes with empty caches of Humming's, through Humming's own entry with the tuning of
all sizes, as vLLM calls it. Nothing touches this user's cache. Exit 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.serving.warm.gpus import KNOWN, facts_here
from hqconv.serving.warm.kernel_store import MANIFEST, VARIABLE, use_warm_kernels
from scripts.shared import make_source

SIZES = {"hidden": 2048, "intermediate": 768, "layers": 1, "experts": 16, "top_k": 4, "vocab": 512}
LAYER, TOP_K, TOKENS = "model.layers.0.mlp.experts", SIZES["top_k"], (1, 17, 256, 2048)


def check_facts() -> str | None:
    """Compare what we say about this GPU with what Humming's extension says; the name under which we know it."""
    from humming.device import current_device

    here = facts_here()
    made = here.facts()
    wrong = {
        name: (value, getattr(current_device, name))
        for name, value in vars(made).items()
        if name != "index" and getattr(current_device, name) != value
    }
    print(f"{here}\n  derived facts that differ (ours, the device's): {wrong or 'none'}", flush=True)
    known = next((name for name, gpu in KNOWN.items() if gpu.name == here.name), None)
    if known is not None:
        differing = {k: (v, here.to_dict()[k]) for k, v in KNOWN[known].to_dict().items() if here.to_dict()[k] != v}
        print(f"  facts in the table for {known} that differ: {differing or 'none'}", flush=True)
    return known


def run(command: list[str], cache: Path, **environment: str) -> float:
    """Run a command with a cache of Humming's of its own; seconds."""
    env = {**os.environ, "HUMMING_CACHE_DIR": str(cache), "HUMMING_TMP_DIR": f"{cache}-tmp", **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), env.get("PYTHONPATH", "")])
    cache.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], check=True, env=env)
    return time.monotonic() - started


def num_cached() -> int:
    """Kernels in this process's cache of Humming's."""
    return len(list(Path(os.environ["HUMMING_CACHE_DIR"]).glob("*/kernel.cubin")))


def entry_for(tuning: list[Any], rows: int) -> dict[str, Any]:
    """The tuning that covers `rows` routes."""
    return next(dict(config) for low, high, config in tuning if low < rows <= high)


class Served:
    """A layer's GEMMs with tuning and compute config as vLLM's `HummingExpertsBase.init_humming_moe` makes them."""

    def __init__(self, out: Path) -> None:
        """Load rank 0's layer."""
        from humming.config import GemmType
        from humming.tune import get_heuristics_config

        gemms = hqconv.load(out, layer=LAYER, device="cuda:0")
        self.tensors = {name: gemm.tensors for name, gemm in gemms.items()}
        self.configs = {name: gemm.layer_config() for name, gemm in gemms.items()}
        self.compute = json.dumps(
            {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": GemmType.INDEXED.value}
        )
        options = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": GemmType.INDEXED}
        self.tuning = {
            name: get_heuristics_config(layer_config=config, **options) for name, config in self.configs.items()
        }
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(num_sms * 8, dtype=torch.int32, device="cuda")

    def gemm(self, name: str, x: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
        """One GEMM on routed rows."""
        from humming.forward import humming_forward

        from hqconv.kernel_layout.fused_moe import align

        config, tuning = self.configs[name], self.tuning[name]
        rows = ids.numel()
        width = config.shape_n - config.pad_shape_n
        result: torch.Tensor = humming_forward(
            config,
            inputs=x,
            outputs=x.new_zeros(rows, width),
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=rows,
            compute_config=self.compute,
            tuning_config=json.dumps(tuning),
            **self.tensors[name],
            **align(ids, config.num_experts, entry_for(tuning, rows)["block_shape"][0]),
        )
        return result

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Every route's output, [T * k, H]."""
        from humming.forward import may_process_input

        from hqconv.schemas.activation import Activation
        from hqconv.serving.vllm.kernel_requests import kernel_activation

        wide = self.gemm("w13", x, ids, TOP_K)
        buffer = wide.new_empty(wide.size(0), wide.size(1) // 2)
        words: dict[str, Any] = kernel_activation(Activation("silu"), gated=True) or {}
        hidden, _, _ = may_process_input(self.configs["w2"], inputs=wide, outputs=buffer, **words)
        return self.gemm("w2", hidden, ids, 1)


def serve(out: Path, result: Path) -> None:
    """What a server does at its start: take the kernels, if the environment has it so, and run the layer."""
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    import humming.kernel.humming  # noqa: F401 - its import is no part of what is measured

    started = time.monotonic()
    reason = use_warm_kernels(out, 90).reason
    took_s, installed = time.monotonic() - started, num_cached()
    started = time.monotonic()
    layer, outputs = Served(out), []
    for tokens in TOKENS:
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, SIZES["hidden"], generator=generator, device="cuda").bfloat16()
        scores = torch.rand(tokens, SIZES["experts"], generator=generator, device="cuda")
        outputs.append(layer.forward(x, scores.topk(TOP_K).indices))
    torch.cuda.synchronize()
    words = {"reason": reason, "took_s": took_s, "installed": installed, "compiled": num_cached() - installed}
    words |= {"first_forwards_s": time.monotonic() - started}
    torch.save({"words": words, "outputs": [o.cpu() for o in outputs]}, result)


def check(work: Path, schema: str, known: str | None) -> bool:
    """One schema; whether all is as promised."""
    out, passed = work / schema, True
    hqconv.convert(work / "source", out, schema=schema, target="sm90", overwrite=out.exists())
    folders = {"here": work / f"{schema}-here"}
    seconds = run(["-m", "hqconv", "warm", str(out), "--kernels", str(folders["here"])], work / f"{schema}-scratch")
    print(f"{schema}: warmed in {seconds:.1f} s", flush=True)
    if known is not None:  # as on a machine without a GPU
        folders["elsewhere"] = work / f"{schema}-elsewhere"
        command = ["-m", "hqconv", "warm", str(out), "--gpu", known, "--kernels", str(folders["elsewhere"])]
        run(command, work / f"{schema}-scratch", CUDA_VISIBLE_DEVICES="")
        lists = [json.loads((folder / MANIFEST).read_text()) for folder in folders.values()]
        passed = lists[0] == lists[1]
        print(f"  the same kernels without the GPU, to the byte: {passed}", flush=True)
    found = {}
    for name, wanted in (("warm", str([*folders.values()][-1])), ("cold", "0")):
        result = work / f"{schema}-{name}.pt"
        command = [__file__, "--serve", str(out), "--result", str(result)]
        run(command, Path(tempfile.mkdtemp(dir=work)) / "cache", **{VARIABLE: wanted})
        found[name] = torch.load(result)
        print(f"  {name}: {found[name]['words']}", flush=True)
    words = found["warm"]["words"]
    passed = passed and words["reason"] is None and words["installed"] > 0 and words["compiled"] == 0
    equal = [torch.equal(a, b) for a, b in zip(*(found[n]["outputs"] for n in found), strict=True)]
    finite = all(bool(o.isfinite().all()) and bool(o.any()) for o in found["warm"]["outputs"])
    print(f"  bit-equal for {TOKENS} tokens: {equal}; finite: {finite}", flush=True)
    return passed and all(equal) and finite


def main() -> None:
    """Check everything, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--schemas", default="mxfp4,int4")
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.result)
        return
    work = args.work or Path(tempfile.mkdtemp())
    os.environ["HUMMING_CACHE_DIR"] = str(work / "own")  # before Humming is first imported
    make_source(work / "source", **SIZES, shard_size="1GB")
    known = check_facts()
    done = [check(work, schema, known) for schema in args.schemas.split(",")]
    print("PASS" if all(done) else "FAIL")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
