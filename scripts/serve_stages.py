"""One start of vLLM up to its first token, by stages (start_stages.py). `check_serving.py split` runs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.serve_once import watch_loading, write_report
from scripts.serve_timed import started
from scripts.start_stages import StageTimer


def main() -> None:
    """Start, answer with one token, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--words", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    a = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found: dict[str, Any] = {"stages": []}
    timer = StageTimer()

    def stage(owner: str, what: str, function: str, begun: float) -> float:
        now = process_age()
        found["stages"].append({"owner": owner, "what": what, "function": function, "seconds": round(now - begun, 4)})
        return now

    now = stage("Python", "start of the process, argparse", "", 0.0)
    import torch  # noqa: F401 - its time alone

    now = stage("torch", "import", "import torch", now)
    from vllm import LLM  # noqa: F401

    now = stage("vLLM", "import", "from vllm import LLM", now)
    found["not_watched"] = timer.watch_all()
    now = stage("vLLM", "import of worker, layers, Humming", "modules of all stages", now)
    watch_loading(found, with_profile=False)
    llm = started(a.model, a.words)
    found["engine_s"] = (ready := process_age()) - now
    _first_token(llm)
    now = stage("vLLM", "first token", "vllm.entrypoints.llm:LLM.generate", ready)
    found["first_token_s"] = now
    found["stages"] += timer.rows()
    watched = sum(timer.seconds.values())
    found["not_split_s"] = round(found["engine_s"] - watched, 4)
    _first_token(llm)
    found["second_token_s"] = process_age() - now
    write_report(a.report, json.dumps(found))
    os._exit(0)


def _first_token(llm: Any) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 17, 200, 31]}], sampling, use_tqdm=False)


def process_age() -> float:
    """Seconds since this process began, to 10 ms."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
