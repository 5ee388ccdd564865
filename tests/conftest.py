"""What holds in every test: an error that is made, wherever and whatever for, speaks in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from hqconv.errors import HqconvError
from hqconv.verification.result import Finding

SENTENCE = re.compile(r"[^a-z\s].*[.?!]", re.DOTALL)


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
