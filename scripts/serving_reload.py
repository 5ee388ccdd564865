"""Live weights on the GPUs of this machine: `check_serving.py reload`.

One engine takes the weights of other artifacts in place, one after the other, and must answer with the bits of an
engine that was started with each; bad artifacts are refused, and the answers stay. Also a delta of two in a hundred
experts on what is served. With eager execution, there also after a deep sleep, and with CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.io.safetensors_header import read_header
from hqconv.schemas import artifact_names as names
from scripts.bench_delta import change_experts, reseal
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
SHARE = 0.02  # of the experts of every layer are changed by the delta
FRESH = ("second", "mse", "changed")  # artifacts that engines start with, to be compared with
DAMAGED = ("header", "cut")
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
        report["steps"][way] = judged = judge(way, steps_of(a, artifacts, way), found)
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
    found["changed"] = changed(found["first"], found["second"], a.work / "reload-changed")
    found["delta"] = a.work / "reload-delta"
    if not found["delta"].exists():
        hqconv.diff(found["first"], found["changed"], found["delta"])
    for kind in DAMAGED:
        found[kind] = damaged(found["second"], a.work / f"reload-{kind}", kind)
    return found


def converted(a: argparse.Namespace, source: Path, name: str, **words: Any) -> Path:
    """One conversion, unless it is there."""
    out: Path = a.work / name
    if not out.exists():
        hqconv.convert(source, out, schema=a.schemas[0], dtype=a.dtype, target="sm90", device=a.device, **words)
    return out


def changed(first: Path, second: Path, out: Path) -> Path:
    """A copy of the first artifact in which some experts of every layer are the second's."""
    if out.exists():
        return out
    shutil.copytree(first, out)
    layers = read_manifest(out).blocks
    for path in (out / names.EXPERTS_FOLDER).rglob("*.safetensors"):
        num_experts = min(ref.shape[0] for ref in read_header(path)[0].values() if ref.shape[0] > 1)
        assert path.stem in layers
        change_experts(path, list(range(max(1, round(num_experts * SHARE)))), second / path.relative_to(out))
    reseal(out)
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
    """What the engine that begins with the first artifact is told, in order.

    wanted: the artifact whose answers must follow. error: words of the refusal, if there must be one.
    """
    steps = [step("second", "second"), step("first again", "first")]
    if a.tp == 1:  # else the disk is another process's
        steps.append(step("delta, the disk dies", "delta", wanted="first", error=AGAIN, fails_after=0))
    steps.append(step("delta", "delta", wanted="changed"))
    if way == "eager":
        steps.append(step("the same after a deep sleep", None, wanted="changed", sleeps=True))
    steps.append(step("first after the delta", "first"))
    steps += [step(kind, kind, wanted="first", error="damaged") for kind in DAMAGED]
    if a.tp == 1:
        steps.append(step("second, the disk dies", "second", wanted="first", error=AGAIN, fails_after=NUM_READS))
    steps.append(step("mse", "mse"))
    if way == "eager":
        steps.append(step("second after a deep sleep", "second", sleeps=True))
    return [{**one, "path": one["path"] and str(artifacts[one["path"]])} for one in steps]


def step(name: str, path: str | None, **words: Any) -> dict[str, Any]:
    """One step; the answers that must follow are those of the artifact itself unless `wanted` says other."""
    return {"name": name, "path": path, "wanted": path, "error": None, **words}


def engines_of(a: argparse.Namespace, artifacts: dict[str, Path], way: str) -> list[Engine]:
    """The engine that is reloaded, and fresh ones to compare it with."""
    words = json.dumps({**WAYS[way], **json.loads(a.words)})
    arguments = ["--tp", str(a.tp), *(["--ep"] if a.ep else []), "--memory", str(a.memory), "--words", words]
    steps = json.dumps(steps_of(a, artifacts, way))
    return [
        Engine(f"{way}, reloaded", artifacts["first"], [*arguments, "--reload", steps], dict(ALONE)),
        *(Engine(f"{way}, {word}", artifacts[word], arguments, dict(ALONE)) for word in FRESH),
    ]


def judge(way: str, steps: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every step, and if it was as it must be; nothing if an engine did not run."""
    if any("failed" in answers for name, answers in found.items() if name.startswith(f"{way},")):
        return {}
    begun = found[f"{way}, reloaded"]
    fresh = {"first": begun, **{word: found[f"{way}, {word}"] for word in FRESH}}
    distinct = {json.dumps(one["answers"]) for one in fresh.values()}
    judged: dict[str, dict[str, Any]] = {"distinct": {"good": len(distinct) == len(fresh)}}
    for told, seen in zip(steps, begun["reloads"], strict=True):
        wanted, error = fresh[told["wanted"]], seen.get("error")
        is_same = seen["answers"] == wanted["answers"] and seen["first"] == wanted["first"]
        is_told = error is None if told["error"] is None else told["error"] in str(error)
        numbers = {key: value for key, value in seen.items() if key not in ("name", "answers", "first")}
        judged[told["name"]] = {"good": is_same and is_told, "same_bits": is_same, **numbers}
    return judged
