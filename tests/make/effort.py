"""Test effort: `make test` runs a sample of the large grids, `make test-all` (HQCONV_TESTS=all) runs them whole."""

from __future__ import annotations

import os

ALL = os.environ.get("HQCONV_TESTS") == "all"


def num_examples(whole: int) -> int:
    """The number of drawn examples: `whole` in `make test-all`, a fifth of it, but 8 at least, in `make test`."""
    return whole if ALL else max(whole // 5, 8)
