"""The releases of vLLM that hqconv was tested with. Imports no vLLM."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version

TESTED = ((0, 33), (0, 34))  # from, up to but not; pyproject's extra `vllm` says the same
logger = logging.getLogger("vllm.hqconv")


def warn_of_untested() -> None:
    """Log a warning if hqconv was not tested with the installed vLLM."""
    release = version("vllm")
    found = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if not TESTED[0] <= found < TESTED[1]:
        tested = ", ".join(".".join(map(str, numbers)) for numbers in TESTED)
        logger.warning(
            "hqconv's layers were tested with vLLM from %s up to, not including, %s; this is %s. "
            "Check a few answers before you rely on it: `hqconv verify` judges the artifact, not the server.",
            *tested.split(", "),
            release,
        )
