"""One vLLM engine from a model folder: what it answers, and what its start took. `check_serving.py` runs it.

Writes one JSON document. In-process engines (one rank) also tell of the load itself.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


PROMPTS = [[5, 17, 200, 31, 99, 404, 12, 8], list(range(3, 103)), [7] * 33, [1, 900, 2, 800, 3]]
TOKENS = 12
Answers = list[list[list[float]]]  # [prompts][tokens] of [token, log-probability]
COUNTERS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


def main() -> None:
    """Start, answer, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path, help="file to write")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="expert parallelism over the --tp ranks")
    parser.add_argument("--sleep", action="store_true", help="ask again after sleeping, lightly and deeply")
    parser.add_argument("--eplb-rounds", type=int, default=0, help="ask so often again while EPLB moves experts")
    parser.add_argument("--profile", action="store_true", help="print what loading spends its time on")
    parser.add_argument("--memory", type=float, default=0.15, help="gpu_memory_utilization")
    parser.add_argument("--words", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    a = parser.parse_args()
    begun_s = time.time() - time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    if a.tp == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found: dict[str, Any] = {}
    if a.tp == 1:
        watch_loading(found, a.profile)
    from vllm import LLM, SamplingParams

    found["imported_s"] = time.time() - begun_s
    words: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "seed": 0,
        "enable_prefix_caching": False,  # which would make the second answers another computation
        "kv_cache_memory_bytes": 2 << 30,  # not by what is free: engines start beside each other
        "gpu_memory_utilization": a.memory,
        "tensor_parallel_size": a.tp,
        "enable_expert_parallel": a.ep,
        "enable_sleep_mode": a.sleep,
    }
    llm = LLM(str(a.model), **{**words, **a.words})
    found["engine_s"] = time.time() - begun_s
    if "loaded_at" in found:
        found["loaded_s"] = found.pop("loaded_at") - begun_s
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=20, ignore_eos=True, detokenize=False)

    def ask() -> Answers:
        # One at a time: what is computed together, and so how, would depend on when each one arrives.
        outputs = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0] for p in PROMPTS]
        likeliest = [output.outputs[0].logprobs[0] for output in outputs]
        found["first"] = [{token: one.logprob for token, one in words.items()} for words in likeliest]
        return [_answer(output.outputs[0]) for output in outputs]

    found |= {"answers": ask(), "again": ask()}
    if "speculative_config" in a.words:  # how many tokens a draft proposed, and how many were right
        found["drafts"] = {one.name: one.value for one in llm.get_metrics() if one.name in COUNTERS}
    if a.sleep:
        found |= sleep_and_ask(llm, ask)
    if a.eplb_rounds:
        found |= ask_while_experts_move(llm, ask, a.eplb_rounds)
    found["answered_s"] = time.time() - begun_s
    write_report(a.report, json.dumps(found))
    os._exit(0)  # engines take seconds to end; who started this ends its children


def sleep_and_ask(llm: Any, ask: Callable[[], Answers]) -> dict[str, Answers]:
    """The answers after a light sleep and after a deep one."""
    found = {}
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:  # which forgets all weights
            llm.collective_rpc("reload_weights")
        llm.wake_up(["kv_cache"])
        found[f"after_sleep_{level}"] = ask()
    return found


def ask_while_experts_move(llm: Any, ask: Callable[[], Answers], rounds: int) -> dict[str, Any]:
    """The answers of each round, and EPLB's maps before the first one and after each."""
    maps, answers = [llm.collective_rpc(expert_map)], []
    for _ in range(rounds):
        answers.append(ask())
        maps.append(llm.collective_rpc(expert_map))
    return {"maps": maps, "rounds": answers}


def expert_map(worker: Any) -> list[list[int]]:
    """One rank's map of EPLB: the expert in each place, [layers][places]; runs in vLLM's worker."""
    (state,) = worker.model_runner.eplb_state.model_states.values()
    places: list[list[int]] = state.physical_to_logical_map.tolist()
    return places


def write_report(path: Path, text: str) -> None:
    """At once: who waits for the file finds it whole."""
    path.with_name(f"{path.name}.part").write_text(text, encoding="utf-8")
    path.with_name(f"{path.name}.part").replace(path)


def _answer(output: Any) -> list[list[float]]:
    """[token, log-probability] of every token."""
    return [[t, lp[t].logprob] for t, lp in zip(output.token_ids, output.logprobs, strict=True)]


def watch_loading(found: dict[str, Any], with_profile: bool) -> None:
    """Note when the model was loaded, how long it took, and the memory that this took."""
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader

    def watched(load: Any, self: Any, *args: Any, **words: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        host, read, begun = _host_bytes(), _read_bytes(), time.perf_counter()
        profile = cProfile.Profile()
        model = profile.runcall(load, self, *args, **words) if with_profile else load(self, *args, **words)
        torch.cuda.synchronize()
        if with_profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        found["load_s"] = time.perf_counter() - begun
        found["loaded_at"] = time.time()
        found["read_bytes"] = _read_bytes() - read
        found["gpu_bytes"] = torch.cuda.memory_allocated()
        found["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - host
        return model

    for kind in (BaseModelLoader, IpcModelLoader):
        setattr(kind, "load_model", partialmethod(_called, watched, kind.load_model))  # noqa: B010


def _called(self: Any, watched: Any, load: Any, *args: Any, **words: Any) -> Any:
    return watched(load, self, *args, **words)


def _read_bytes() -> int:
    """Bytes that this process has asked to read so far, mapped files aside."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _host_bytes() -> int:
    """What this process has of its own now, files that are mapped aside."""
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
