"""The timer of scripts/start_stages.py: own times, which add up."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from scripts.start_stages import STAGES, StageTimer

NOW = [0.0]


def test_times_are_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Spends 1 s itself, and 2 s in each of two loads."""

        def start(self) -> str:
            NOW[0] += 1
            self.load()
            Engine.load()
            return "started"

        @staticmethod
        def load() -> None:
            NOW[0] += 2

    made = types.ModuleType("made")
    made.__dict__["Engine"] = Engine
    monkeypatch.setitem(sys.modules, "made", made)
    timer = StageTimer(lambda: NOW[0])
    for name in ("start", "load"):
        timer.watch(f"made:Engine.{name}")
    assert Engine().start() == "started"
    assert timer.seconds == {"made:Engine.start": 1, "made:Engine.load": 4}
    assert timer.calls == {"made:Engine.start": 1, "made:Engine.load": 2}
    other = threading.Thread(target=Engine.load)
    other.start()
    other.join()
    assert timer.calls["made:Engine.load"] == 2, "another thread's time is beside, not in"


def test_an_exception_ends_a_call() -> None:
    timer = StageTimer(lambda: NOW[0])

    def fail() -> None:
        raise ValueError("why")

    outer = timer.timed("outer", lambda: timer.timed("inner", fail)())
    with pytest.raises(ValueError, match="why"):
        outer()
    assert set(timer.calls) == {"outer", "inner"}


def test_a_function_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError):
        StageTimer().watch("scripts.start_stages:StageTimer.nothing")


def test_no_function_is_listed_twice() -> None:
    assert len({stage.function for stage in STAGES}) == len(STAGES)
