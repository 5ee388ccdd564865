"""What torchrun says to the processes that it starts. No torch is loaded to read it."""

from __future__ import annotations

import os


def is_distributed() -> bool:
    """Whether torchrun started this process beside others; schedulers set some of these variables in any shell."""
    needed = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(os.environ.get(name) for name in needed) and os.environ["WORLD_SIZE"] != "1"


def is_rank_zero() -> bool:
    """Whether this process is alone, or the one that speaks for its team."""
    return not is_distributed() or os.environ["RANK"] == "0"


def local_rank() -> tuple[int, int]:
    """This process's number among those of its team on this machine, and how many these are."""
    if not is_distributed():
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
