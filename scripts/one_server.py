"""One engine of vLLM for scripts/check_serving.py: starts on a model, does what a job asks, writes a report.

    python scripts/one_server.py JOB.json

JOB: `model`, `engine` (arguments of vLLM's `LLM`), `report` (a path), `begun` (the time when the process was started),
and what to do: `prompts` (token ids; the greedy answers, with log-probabilities; again after each level of sleep where
`sleeps`), `sequences` (token ids; their mean negative log-likelihood), `weights` (files of tensors in kernel format:
answers after each is loaded in place), `speed` (numbers of sequences; tokens per second, once the file `gate` exists,
one engine at a time), `rounds` (of prompts; while EPLB moves experts: answers, and the map of experts after each). The
report has the memory of each rank, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NUM_ANSWERED, NUM_TIMED = 32, 128  # tokens of an answer, and of a measurement
GATE_S = 300.0


def main() -> None:
    """Do a job; the process ends at once, with all that the engine started."""
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    words = {
        "skip_tokenizer_init": True,
        "seed": 0,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2 << 30,
    }
    llm = LLM(job["model"], **words, **job["engine"])
    found: dict[str, Any] = {"started_s": time.time() - job["begun"]}
    prompts = job.get("prompts") or [[1, 2, 3]]
    ask(llm, prompts[:1], num_tokens=1)
    found["first_token_s"] = time.time() - job["begun"]
    found["answers"] = ask(llm, prompts)
    for level in (1, 2) if job.get("sleeps") else ():
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        llm.wake_up(["kv_cache"])
        found[f"sleep {level}"] = ask(llm, prompts)
    if job.get("sequences"):
        found["mean_nll"] = mean_nll(llm, job["sequences"])
    found["reloaded"] = [reloaded(llm, Path(path), prompts) for path in job.get("weights", ())]
    if job.get("speed"):
        found["tokens_per_s"] = timed(llm, job)
    if job.get("rounds"):
        found["maps"] = [llm.collective_rpc(expert_map)]
        for _ in range(job["rounds"]):
            found.setdefault("rounds", []).append(ask(llm, prompts))
            found["maps"].append(llm.collective_rpc(expert_map))
    found["ranks"] = llm.collective_rpc(memory)
    if folder := os.environ.get("HUMMING_CACHE_DIR"):
        found["num_kernels"] = len(
            list(Path(folder).glob("*/kernel.cubin"))
        )  # with those that were put there
    Path(job["report"]).write_text(json.dumps(found))
    os._exit(0)


def ask(llm: Any, prompts: list[list[int]], num_tokens: int = NUM_ANSWERED) -> list[Any]:
    """Answer prompts one at a time: what is computed together would depend on when each one arrives."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, logprobs=5, ignore_eos=True, detokenize=False
    )
    outputs = [
        llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0]
        for p in prompts
    ]
    return [
        [
            [token, likely[token].logprob]
            for token, likely in zip(o.token_ids, o.logprobs, strict=True)
        ]
        for o in outputs
    ]


def mean_nll(llm: Any, sequences: list[list[int]]) -> float:
    """Mean negative log-likelihood of every token but the first of its sequence, in nats."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in sequences], sampling, use_tqdm=False
    )
    found: list[float] = [
        likely[token].logprob
        for ids, output in zip(sequences, outputs, strict=True)
        for token, likely in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return -sum(found) / len(found)


def reloaded(llm: Any, path: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Load a file of parameters, by vLLM's names, in place; how long that took, and the answers."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    begun = time.perf_counter()
    llm.collective_rpc(
        "reload_weights",
        kwargs={"weights_iterator": list(tensors.items()), "is_checkpoint_format": False},
    )
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "answers": ask(llm, prompts)}


def memory(worker: Any) -> dict[str, float]:
    """GB of a rank, in vLLM's worker: weights on the GPU, most on the GPU at a time, most of the host at a time."""
    import resource

    import torch

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = worker.model_runner.model_memory_usage
    sizes = {"weights": weights, "peak GPU": torch.cuda.max_memory_allocated(), "peak host": most}
    return {name: round(size / 1e9, 2) for name, size in sizes.items()}


def expert_map(worker: Any) -> list[list[int]]:
    """The expert in each place of each layer, of one rank's EPLB, in vLLM's worker."""
    (state,) = worker.model_runner.eplb_state.model_states.values()
    places: list[list[int]] = state.physical_to_logical_map.tolist()
    return places


def timed(llm: Any, job: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of whole requests of one prompt token, by number of sequences: the better of two runs."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TIMED, ignore_eos=True, detokenize=False
    )
    gate = Path(job["gate"])
    Path(f"{job['report']}.ready").touch()
    deadline = time.monotonic() + GATE_S
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = {}
        for number in job["speed"]:
            prompts, seconds = [{"prompt_token_ids": [1]}] * number, []
            for _ in range(3):  # the first warms up
                begun = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                seconds.append(time.perf_counter() - begun)
            found[str(number)] = number * NUM_TIMED / min(seconds[1:])
    return found


if __name__ == "__main__":
    main()
