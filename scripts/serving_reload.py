"""Live weights on the GPUs of this machine: `check_serving.py reload`.

One engine takes the weights of other artifacts in place, one after the other, and must answer with the bits of an
engine that was started with each; bad artifacts are refused, and the answers stay. With eager execution, there also
after a deep sleep, and with CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hqconv
from hqconv.schemas import artifact_names as names
from scripts.engines import Engine, run_all
from scripts.serving_answers import write
from scripts.shared import make_source

WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enable_sleep_mode": True},
    "graphs": {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
}
SIZES = ("hidden", "intermediate", "layers", "experts", "dtype")
ALONE = {"VLLM_DISABLE_COMPILE_CACHE": "1"}  # engines start beside each other
NUM_READS = 2  # of a file, before the disk "dies"
REFUSED = ("header", "cut", "dies")
AGAIN = "weights of before again"  # words of the error after the old weights were read again


def check(a: argparse.Namespace) -> dict[str, Any]:
    """Run all engines, and judge every step."""
    artifacts = make_artifacts(a)
    report: dict[str, Any] = {"failed": False, "engines": {}, "steps": {}}
    report["rank_bytes"] = rank_bytes(artifacts["first"])
    engines = [engine for way in a.ways for engine in engines_of(a, artifacts, way)]
    found = report["engines"]
    for engine, answers in run_all(engines, a.jobs):
        found[engine.name] = answers
        print(engine.name, *answers.get("failed", [f"{answers.get('process_s', 0):.0f} s"]), sep="\n    ", flush=True)
    for way in a.ways:
        report["steps"][way] = judged = judge(way, found)
        report["failed"] |= not (judged and all(step["good"] for step in judged.values()))
        load = {key: found[f"{way}, reloaded"].get(key) for key in LOADED}
        print(way, "the first load:", load, flush=True)
        for name, step in judged.items():
            print(way, name, json.dumps(step), flush=True)
    if a.out:
        write(a.out, report)
    return report


LOADED = ("load_s", "gpu_bytes", "gpu_peak_bytes", "host_peak_bytes", "said")


def make_artifacts(a: argparse.Namespace) -> dict[str, Path]:
    """Artifacts of two sources of the same shapes, one of another quantizer, a delta, and bad ones."""
    grid: Any = {"tp": 1, "ep": a.tp} if a.ep else {"tp": a.tp, "ep": 1}
    found: dict[str, Path] = {}
    for seed, word in enumerate(("first", "second")):
        source = a.work / f"reload-source-{seed}"
        if not source.exists():
            make_source(source, **{key: getattr(a, key) for key in SIZES}, seed=seed, distinct_layers=2)
        found[word] = converted(a, source, f"reload-{word}", **grid)
    found["mse"] = converted(a, a.work / "reload-source-0", "reload-mse", quantizer="mse", **grid)
    for kind in REFUSED[:2]:
        found[kind] = damaged(found["second"], a.work / f"reload-{kind}", kind)
    return found


def converted(a: argparse.Namespace, source: Path, name: str, **words: Any) -> Path:
    """One conversion, unless it is there."""
    out: Path = a.work / name
    if not out.exists():
        hqconv.convert(source, out, schema=a.schemas[0], dtype=a.dtype, target="sm90", device=a.device, **words)
    return out


def damaged(artifact: Path, out: Path, kind: str) -> Path:
    """A copy by hard links, in which the last rank file has another header, or lacks its last byte."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(artifact, out, copy_function=os.link)
    file = max((out / names.EXPERTS_FOLDER).rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    file.unlink()
    if kind == "header":
        data[8:12] = b"    "
    file.write_bytes(data if kind == "header" else data[:-1])
    return out


def rank_bytes(artifact: Path) -> int:
    """Bytes of all rank files."""
    return sum(path.stat().st_size for path in (artifact / names.EXPERTS_FOLDER).rglob("*.safetensors"))


def steps_of(a: argparse.Namespace, artifacts: dict[str, Path], way: str) -> list[dict[str, Any]]:
    """What the engine that begins with the first artifact is told, in order."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [("second", "second", {}), ("first again", "first", {})]
    kinds += [(kind, kind, {}) for kind in REFUSED[:2]]
    if a.tp == 1:  # else the disk is another process's
        kinds.append(("dies", "second", {"fails_after": NUM_READS}))
    kinds.append(("mse", "mse", {}))
    if way == "eager":
        kinds.append(("second after a deep sleep", "second", {"sleeps": True}))
    return [{"name": name, "path": str(artifacts[which]), **words} for name, which, words in kinds]


def engines_of(a: argparse.Namespace, artifacts: dict[str, Path], way: str) -> list[Engine]:
    """The engine that is reloaded, and fresh ones to compare it with."""
    words = json.dumps({**WAYS[way], **json.loads(a.words)})
    arguments = ["--tp", str(a.tp), *(["--ep"] if a.ep else []), "--memory", str(a.memory), "--words", words]
    steps = json.dumps(steps_of(a, artifacts, way))
    return [
        Engine(f"{way}, reloaded", artifacts["first"], [*arguments, "--reload", steps], dict(ALONE)),
        *(Engine(f"{way}, {word}", artifacts[word], arguments, dict(ALONE)) for word in ("second", "mse")),
    ]


def judge(way: str, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every step, and if it was as it must be; nothing if an engine did not run."""
    if any("failed" in answers for name, answers in found.items() if name.startswith(f"{way},")):
        return {}
    begun = found[f"{way}, reloaded"]
    fresh = {"first": begun, "second": found[f"{way}, second"], "mse": found[f"{way}, mse"]}
    distinct = {json.dumps(one["answers"]) for one in fresh.values()}
    judged: dict[str, dict[str, Any]] = {"distinct": {"good": len(distinct) == len(fresh)}}
    for step in begun["reloads"]:
        name, error = step["name"], step.get("error")
        wanted = fresh["first" if name in REFUSED else name.split()[0]]
        is_same = step["answers"] == wanted["answers"] and step["first"] == wanted["first"]
        is_told = (error is None) if name not in REFUSED else _is_refused(name, str(error))
        numbers = {key: value for key, value in step.items() if key not in ("name", "answers", "first")}
        judged[name] = {"good": is_same and is_told, "same_bits": is_same, **numbers}
    return judged


def _is_refused(name: str, error: str) -> bool:
    """With the words for it, whichever process raised it."""
    words: Sequence[str] = (AGAIN,) if name == "dies" else ("damaged",)
    return all(word in error for word in words)
