"""The trace of a conversion: every batch in its slot, every task on its thread, every step on its GPU stream."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hqconv
from hqconv.conversion import convert, executor, resources, trace
from hqconv.conversion.devices import CudaLane, GpuClock
from hqconv.errors import OutputError
from tests.make.qwen import write_qwen3_moe
from tests.make.tensors import snapshot

OPTIONS: dict[str, Any] = {"schema": "mxfp4", "target": "sm90", "device": "cpu", "threads": 2}
PHASES = ["read queue", "read", "encode queue", "encode", "collect queue", "collect", "write queue", "files", "write"]
NOT_HERE = {"collect queue"}  # of a GPU
SLACK_US = 0.21  # two rounded figures

Span = dict[str, Any]


def tracks(path: Path) -> dict[str, dict[str, list[Span]]]:
    """Group and track → spans by begin."""
    events = json.loads(path.read_text())
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[str, list[Span]]] = {group: defaultdict(list) for group in trace.GROUPS}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        found[groups[event["pid"]]][names[event["pid"], event["tid"]]].append(event)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("trace") / "model", num_layers=3)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches, and several reads and writes of each."""
    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1 << 17)
    monkeypatch.setattr(executor, "_CHUNK_BYTES", 1 << 14)


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    """The artifact of a conversion without a trace."""
    return hqconv.convert(model, model.with_name("plain"), **OPTIONS).out


def test_every_batch_goes_through_the_phases_of_its_slot(model: Path, plain: Path, tmp_path: Path) -> None:
    report = hqconv.convert(model, tmp_path / "out", **OPTIONS, trace=tmp_path / "trace.json")
    assert snapshot(tmp_path / "out") == snapshot(plain)
    slots = tracks(tmp_path / "trace.json")[trace.SLOTS]
    assert 0 < len(slots) <= report.profile["staging"]["num_slots"]
    batches = list[str]()
    assert len(slots) > 1
    seconds = Counter[str]()
    for spans in slots.values():
        end = 0.0
        for span in spans:
            assert span["ts"] >= end - SLACK_US  # a slot holds one batch
            if span["name"] in ("read queue", "encode queue") and span["args"]["of"] not in batches:
                batches.append(span["args"]["of"])
            else:  # no gap within a batch
                assert span["ts"] == pytest.approx(end, abs=SLACK_US)
                assert span["args"]["of"] == batches[-1]
            end = span["ts"] + span["dur"]
            seconds[span["name"]] += span["dur"] / 1e6
    for of in batches:
        phases = [span["name"] for spans in slots.values() for span in spans if span["args"]["of"] == of]
        wanted = [p for p in PHASES if p not in NOT_HERE]
        assert phases == (wanted if "experts" in of else [p for p in wanted if "encode" not in p and p != "collect"])
    layers = report.plan.layers
    of_experts = {of for of in batches if of.startswith(tuple(layer.name for layer in layers))}
    assert {of.partition(": ")[0] for of in of_experts} == {layer.name for layer in layers}
    assert len(of_experts) > 2 * len(layers)
    assert seconds == pytest.approx(report.profile["slot_seconds"], abs=2e-3)


def test_every_task_is_on_the_track_of_its_thread(model: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    report = hqconv.convert(model, tmp_path / "out", **OPTIONS, trace=tmp_path / "trace.json")
    seconds = time.monotonic() - begun
    threads = tracks(tmp_path / "trace.json")[trace.THREADS]
    stages = report.profile["stages"]
    found = Counter(span["name"] for spans in threads.values() for span in spans if "args" in span)
    assert found == {name: stage["tasks"] for name, stage in stages.items() if stage["tasks"]}
    for name, spans in threads.items():
        ends = [0.0]
        for span in spans:
            stage = span["name"]
            assert name.startswith(f"{stage}_") or stage.startswith("waits for ")
            while span["ts"] >= ends[-1] - SLACK_US and len(ends) > 1:
                ends.pop()
            assert len(ends) == 1 or span["ts"] + span["dur"] <= ends[-1] + SLACK_US  # nested, or behind
            ends.append(span["ts"] + span["dur"])
        assert max(span["ts"] + span["dur"] for span in spans) / 1e6 <= seconds
    spans = [span for of_thread in threads.values() for span in of_thread]
    sizes = {span["args"]["of"]: span["args"]["bytes"] for span in spans if span["name"] == "finish"}
    assert sum(sizes.values()) == sum(file.size_bytes for unit in report.plan.units for file in unit.files)


# --- a GPU, whose events are times of this machine


class Event:
    """An event of a stream that is never behind."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.has_time, self.at = enable_timing, -1.0

    def record(self, _: object) -> None:
        self.at = time.monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        assert (self.has_time, end.has_time) == (True, True)
        assert min(self.at, end.at) >= 0
        return 1e3 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes of a GPU, in memory of the CPU: results go through `slot.out` and the stage `collect`."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    plan_staging = convert.plan_staging

    def with_out(*args: Any, **options: Any) -> Any:
        staging = plan_staging(*args, **options)
        return replace(staging, out_bytes=staging.slot_bytes)

    def lane(number: int, device: torch.device, *_: object) -> CudaLane:
        return CudaLane(number, device, GpuClock(device))

    monkeypatch.setattr(convert, "plan_staging", with_out)
    monkeypatch.setattr(executor, "make_lane", lane)


@pytest.mark.usefixtures("gpu")
def test_the_steps_of_a_gpu_are_on_the_tracks_of_its_streams(model: Path, plain: Path, tmp_path: Path) -> None:
    report = hqconv.convert(model, tmp_path / "out", **OPTIONS, trace=tmp_path / "trace.json")
    found = tracks(tmp_path / "trace.json")
    batches: dict[str, list[Span]] = defaultdict(list)
    for spans in found[trace.STREAMS].values():
        for span in spans:
            batches[span["args"]["of"]].append(span)
    assert len(batches) == report.profile["stages"]["encode"]["tasks"] == report.profile["stages"]["collect"]["tasks"]
    encoding = {
        span["args"]["of"]: span for spans in found[trace.SLOTS].values() for span in spans if span["name"] == "encode"
    }
    for of, steps in batches.items():
        assert [step["name"] for step in steps] == ["copy in", "kernels", "copy out"]
        begin, end = encoding[of]["ts"], encoding[of]["ts"] + encoding[of]["dur"]
        assert all(begin - 2e3 <= step["ts"] <= step["ts"] + step["dur"] <= end + 2e3 for step in steps)  # one clock
    assert report.profile["gpu_seconds"].keys() == {"copy in", "kernels", "copy out"}
    assert report.profile["gpu_seconds"]["kernels"] > 0
    phases = {span["name"] for spans in found[trace.SLOTS].values() for span in spans}
    assert phases == set(PHASES)
    assert snapshot(tmp_path / "out") == snapshot(plain)


def test_times_between_marks_come_from_neighbouring_events() -> None:
    clock = GpuClock.__new__(GpuClock)
    at = {"reference": 0.0, "begin": 2.0, "copy in": 2.5, "kernels": 4.0}

    class Of(Event):
        def __init__(self, name: str) -> None:
            super().__init__(enable_timing=True)
            self.at = at[name]

    clock._event, clock._event_s = Of("reference"), 100.0  # type: ignore[assignment]
    marks: Any = [(name, Of(name)) for name in ("begin", "copy in", "kernels")]
    assert clock.steps(marks) == [("copy in", 102.0, 102.5), ("kernels", 102.5, 104.0)]
    assert clock.steps(marks[:1]) == clock.steps([]) == []


# --- the file


def test_spans_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_BUFFERED", 10)
    path = tmp_path / "trace.json"
    with trace.Trace(path) as spans:
        for number in range(25):
            now = spans.started_s + number
            spans.add(trace.SLOTS, "slot 1", "read", now, now + 0.5, of=number)
        assert len(spans._buffer) < 10
        unfinished = json.loads(path.read_text() + "]")  # as the viewers complete it
        assert len(unfinished) == 20
    (track,) = tracks(path)[trace.SLOTS].values()
    assert [(span["ts"], span["dur"]) for span in track] == [(1e6 * number, 5e5) for number in range(25)]


def test_a_trace_that_cannot_be_written_is_told_after_the_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="disk is full") as caught:
        hqconv.convert(model, tmp_path / "out", **OPTIONS, trace="/dev/full")
    assert caught.value.where == "/dev/full"
    assert hqconv.verify(tmp_path / "out", checks=["files"]).passed
    with pytest.raises(KeyError), trace.Trace(Path("/dev/full")):
        raise KeyError
    with pytest.raises(OutputError):
        hqconv.convert(model, tmp_path / "none", **OPTIONS, trace=tmp_path / "missing" / "trace.json")
    assert not (tmp_path / "none").exists()
