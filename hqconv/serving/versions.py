"""Which versions of vLLM hqconv's layers were tested with."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version

TESTED = ((0, 33), (0, 34))  # from, up to but not; pyproject's extra `vllm` says the same

logger = logging.getLogger("vllm.hqconv")


def warn_of_untested() -> None:
    """Say so where this vLLM is none that hqconv was tested with."""
    words = version("vllm")
    found = tuple(map(int, re.findall(r"\d+", words)[:2]))
    if not TESTED[0] <= found < TESTED[1]:
        tested = ", ".join(".".join(map(str, numbers)) for numbers in TESTED)
        logger.warning(
            "hqconv's layers were tested with vLLM from %s up to, not including, %s; this is %s. "
            "Check a few answers before you rely on it: `hqconv verify` judges the artifact, not the server.",
            *tested.split(", "),
            words,
        )
