"""One vLLM engine that is timed: it starts, waits for its turn, measures and ends. `bench_serving.py` runs it.

Writes DIR/ready when all kernels are compiled and all graphs captured, then waits for DIR/go, then writes the report.
CUDA graphs are captured for decoding 1 and 64 sequences; torch.compile is off, so that a start is short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import few_kernels
from scripts.engines import GO, READY
from scripts.serve_once import watch_loading, write_report

PREFILL_TOKENS, PROMPT = 8192, 512  # tokens of a batch, and of each of its prompts
DECODING = (1, 64)  # sequences at once
SHORT = 64  # tokens of a prompt whose answer is timed
STEPS = {1: 64, 64: 32}  # decoded tokens of each sequence
REPETITIONS = 5
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(DECODING)}
TOP_K = 8  # of the model
# Rows of the measured GEMMs, counted in tokens or in tokens of experts.
ROWS = tuple(count * by for count in (*DECODING, PREFILL_TOKENS) for by in (1, TOP_K))
WAIT_S = 600.0  # for the turn


def main() -> None:
    """Start, wait, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path, help="file to write; its folder is DIR")
    parser.add_argument("--words", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--all-kernels", action="store_true", help="compile for all numbers of rows, as a server does")
    a = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}  # one graph for a step
    begun = time.perf_counter()
    found: dict[str, Any] = {}
    watch_loading(found, with_profile=False)
    timer = GpuTimer()
    if not a.all_kernels:
        few_kernels.keep(ROWS)
    llm = started(a.model, a.words)
    timer.watch(llm)
    found |= {"vllm": version("vllm"), "humming": _version("humming-kernels"), "started_s": time.perf_counter() - begun}
    for measure in measurements(llm):  # compiles and tunes all that is left
        measure()
    folder = a.report.parent
    (folder / READY).touch()
    _wait(folder / GO)
    for name, measure in zip(("prefill", *(f"decode_{count}" for count in DECODING)), measurements(llm), strict=True):
        found[name] = timed(measure, timer, "eager" if name == "prefill" else "graphs")
    write_report(a.report, json.dumps(found))
    os._exit(0)


def started(model: Path, words: dict[str, Any]) -> Any:
    """The engine, with CUDA graphs."""
    from vllm import LLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": max(DECODING),
        "max_num_batched_tokens": PREFILL_TOKENS,
        "seed": 0,
        "enable_prefix_caching": False,  # or only the first repetition would compute
        "kv_cache_memory_bytes": 1 << 30,  # not by what is free: engines start beside each other
        "gpu_memory_utilization": 0.02,
        "compilation_config": GRAPHS,
    }
    return LLM(str(model), **{**options, **words})


def measurements(llm: Any) -> list[Callable[[], tuple[float, int]]]:
    """Functions that each run one repetition; they return seconds by the clock, and tokens in that time."""
    return [partial(_prefill, llm), *(partial(_decode, llm, count) for count in DECODING)]


def _prefill(llm: Any) -> tuple[float, int]:
    count = PREFILL_TOKENS // PROMPT
    return _generate(llm, count, PROMPT, 1), PREFILL_TOKENS


def _decode(llm: Any, count: int) -> tuple[float, int]:
    """All steps but the first, which computes the prompts."""
    steps = STEPS[count]
    return _generate(llm, count, SHORT, steps + 1) - _generate(llm, count, SHORT, 1), steps * count


def _generate(llm: Any, count: int, length: int, tokens: int) -> float:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [3 + (37 * n + 101 * i) % 2000 for i in range(length)]} for n in range(count)]
    begun = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begun


def timed(measure: Callable[[], tuple[float, int]], timer: GpuTimer, kind: str) -> dict[str, Any]:
    """Medians of the repetitions, after one that only wakes the GPU's clock.

    kind: of a step, eager or graphs. gpu_ms: of the model's layers in one step, on the GPU. wall_tokens_per_s: by the
    clock, with all of vLLM's own work.
    """
    measure()
    rates: list[float] = []
    steps: list[float] = []
    for _ in range(REPETITIONS):
        timer.clear()
        seconds, tokens = measure()
        rates.append(tokens / max(seconds, 1e-9))
        steps += timer.milliseconds()[kind]
    figures = {"gpu_ms": median(steps), "gpu_ms_range": [min(steps), max(steps)]} if steps else {"gpu_ms": None}
    return {"wall_tokens_per_s": median(rates), **figures, "steps": len(steps)}


class GpuTimer:
    """Times of the model's layers on the GPU by CUDA events: of graphs that are replayed, and of eager forwards."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self.clear()

    def watch(self, llm: Any) -> None:
        """From now on, every step of this engine; its graphs were captured before."""
        import torch

        graphs: Any = torch.cuda.CUDAGraph
        replay = graphs.replay

        def watched(graph: Any) -> None:
            begin = self._event()
            replay(graph)
            self._events["graphs"].append((begin, self._event()))

        graphs.replay = watched

        def hook(model: Any) -> None:
            model.register_forward_pre_hook(lambda *_: self._open.append(self._event()))
            model.register_forward_hook(lambda *_: self._events["eager"].append((self._open.pop(), self._event())))

        llm.apply_model(hook)

    def clear(self) -> None:
        """Forget all times."""
        self._events: dict[str, list[tuple[Any, Any]]] = {"graphs": [], "eager": []}

    def milliseconds(self) -> dict[str, list[float]]:
        """Of each step since `clear`, by kind."""
        import torch

        torch.cuda.synchronize()
        return {kind: [a.elapsed_time(b) for a, b in pairs] for kind, pairs in self._events.items()}

    def _event(self) -> Any:
        import torch

        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True)
        event.record()
        return event


def _wait(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


if __name__ == "__main__":
    main()
