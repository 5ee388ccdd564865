"""scripts/serving_reload.py: the steps of an engine, and the judge of what it answers after each."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from hqconv.artifact.tensor_filler import read_tensors
from hqconv.errors import VerificationError
from hqconv.io.safetensors_header import read_header
from scripts import reload_steps, serving_reload
from tests.make.conversions import run
from tests.make.qwen import write_qwen3_moe


def answers_of(number: int) -> dict[str, Any]:
    return {"answers": [[[number, -0.5]]], "first": [{"1": -0.5 * number}]}


NAMES = ("first", "second", "mse", "changed")
ARTIFACTS = {name: Path(name) for name in (*NAMES, "delta", "header", "cut")}
STEPS = serving_reload.steps_of(Namespace(tp=1), ARTIFACTS, "eager")


def good() -> dict[str, dict[str, Any]]:
    """What engines report where all is as it must be."""
    answers = {name: answers_of(number) for number, name in enumerate(NAMES)}
    found: dict[str, dict[str, Any]] = {f"eager, {name}": answers[name] for name in NAMES[1:]}
    errors = [{"error": f"RequestError: {step['error']}"} if step["error"] else {} for step in STEPS]
    reloads = [{"seconds": 1.0, **answers[s["wanted"]], **error} for s, error in zip(STEPS, errors, strict=True)]
    found["eager, reloaded"] = {**answers["first"], "reloads": reloads}
    return found


def judged(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return serving_reload.judge("eager", STEPS, found)


def test_all_as_it_must_be() -> None:
    steps = judged(good())
    assert list(steps) == ["distinct", *(step["name"] for step in STEPS)]
    assert all(step["good"] for step in steps.values())


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        ("second", answers_of(0)),
        ("second", {"error": "no"}),
        ("first again", {"first": [{"1": -0.1}]}),
        ("delta", answers_of(0)),
        ("cut", {"error": None}),
        ("cut", answers_of(1)),
        ("second, the disk dies", {"error": "must not serve any more"}),
        ("second after a deep sleep", answers_of(3)),
    ],
)
def test_one_wrong_step_is_seen(step: str, changes: dict[str, Any]) -> None:
    found = copy.deepcopy(good())
    number = [one["name"] for one in STEPS].index(step)
    found["eager, reloaded"]["reloads"][number].update(changes)
    assert [name for name, one in judged(found).items() if not one["good"]] == [step]


def test_artifacts_that_answer_alike_prove_nothing() -> None:
    found = good()
    found["eager, mse"] = answers_of(2) | found["eager, second"]
    assert not judged(found)["distinct"]["good"]
    assert judged({**found, "eager, second": {"failed": ["why"]}}) == {}


class Engine:
    """What the steps call of vllm.LLM: a "reload" reads the rank files of the artifact."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((name, kwargs))
        for path in sorted(Path(kwargs["weights_path"]).rglob("tp0-ep0/*")):
            refs, _, _ = read_header(path)
            read_tensors(Namespace(path=path, name=path.name), refs, torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.calls.append((name, *words))


def test_steps_reload_and_ask_and_the_disk_dies_once(tmp_path: Path) -> None:
    run(write_qwen3_moe(tmp_path / "m", hidden_size=256, intermediate_size=256, num_experts=4), tmp_path / "a", "mxfp4")
    bad = serving_reload.damaged(tmp_path / "a", tmp_path / "bad", "header")
    paths = {"good": tmp_path / "a", "dies": tmp_path / "a", "good again": tmp_path / "a", "bad": bad}
    steps = [{"name": name, "path": str(path)} for name, path in paths.items()]
    steps[1]["fails_after"] = 1  # type: ignore[assignment]
    steps[2]["sleeps"] = True  # type: ignore[assignment]
    engine = Engine()
    found = reload_steps.run(engine, steps, lambda: ([[[1, 2.0]]], []), in_process=False)
    assert ["error" in step for step in found] == [False, True, False, True]
    assert VerificationError.__name__ in found[1]["error"]
    assert [call[0] for call in engine.calls].count("reset_prefix_cache") == 4
    assert [call[1:] for call in engine.calls if call[0] == "sleep"] == [(2,)]
    json.dumps(found)


@pytest.mark.parametrize("kind", ["header", "cut"])
def test_damaged_copies_leave_the_original_alone(tmp_path: Path, kind: str) -> None:
    run(write_qwen3_moe(tmp_path / "m", hidden_size=256, intermediate_size=256, num_experts=4), tmp_path / "a", "mxfp4")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    out = serving_reload.damaged(tmp_path / "a", tmp_path / "bad", kind)
    assert before == {path: path.read_bytes() for path in before}
    changed = [path for path in before if (out / path.relative_to(tmp_path / "a")).read_bytes() != before[path]]
    assert len(changed) == 1
