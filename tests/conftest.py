"""Rules for every test: errors are sentences, and `make test` runs a sample of the large grids."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hqconv.errors import HqconvError
from hqconv.verification.result import Finding
from tests.make.effort import ALL, REST, sample

# The machine may be busy: no example has to be fast.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

_CONFIG = tempfile.TemporaryDirectory(prefix="hqconv-config-")
SENTENCE = re.compile(r"[^a-z\s].*[.?!]", re.DOTALL)


def pytest_configure() -> None:
    """Prepare the process and its children.

    SIGINT gets its default handler: shells start background jobs with SIGINT ignored. Idle OpenMP threads of torch
    sleep: there are more than processors, as several tests run at once, and a thread that spins takes the time of one
    that works (75 s instead of 150 for tests/evaluation and a test of gptq on two processors).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["XDG_CONFIG_HOME"] = _CONFIG.name  # no key of the user's is made, or read
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `full` tests, and cases beyond a sample of each function, unless all or one case is asked for."""
    if ALL or any("[" in argument for argument in config.args):
        return
    of_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sampled = {item for cases in of_function.values() for item in sample(cases)}
    config.hook.pytest_deselected(items=[item for item in items if (item in sampled) == REST])
    items[:] = [item for item in items if (item in sampled) != REST]


@pytest.fixture(autouse=True)
def errors_are_sentences(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`what` and `remedy` begin with no small letter and end with a full stop; nothing is printed as Python's None."""
    fragments: list[str] = []

    def listen(kind: type) -> None:
        made = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            texts = (self.what, getattr(self, "remedy", ""))
            fragments.extend(text for text in texts if text and not SENTENCE.fullmatch(text))

        monkeypatch.setattr(kind, "__init__", init)

    listen(HqconvError)
    listen(Finding)
    yield
    assert not fragments
