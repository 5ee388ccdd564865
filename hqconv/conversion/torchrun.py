"""The environment of processes that torchrun starts.

A module of its own because the command line imports it before everything else: no torch, json or dataclasses here.
"""

from __future__ import annotations

import os


def _is_orphan() -> bool:
    """Return whether torchrun ended before this module was loaded, so that process 1 has taken this process over."""
    if os.getppid() != 1 or not is_distributed():
        return False
    try:
        with open("/proc/1/cmdline", "rb") as file:  # noqa: PTH123 - torchrun itself may be process 1 of a container
            return b"torch" not in file.read()
    except OSError:
        return False


def parent() -> int:
    """Return the process that started this one: torchrun, alive or not. It is asked for when this module is loaded.

    0, which no process is, if torchrun had ended by then.
    """
    return _parent if os.getpid() == _process else os.getppid()  # a fork has another parent


def has_agent_store() -> bool:
    """Return whether torchrun itself holds the store, so that it answers before any process has started."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_distributed() -> bool:
    """Return whether torchrun started this process beside others; schedulers set some of its variables anywhere."""
    needed = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(os.environ.get(name) for name in needed) and os.environ["WORLD_SIZE"] != "1"


def is_rank_zero() -> bool:
    """Return whether this process is the only one, or rank 0 of several."""
    return not is_distributed() or os.environ["RANK"] == "0"


def local_rank() -> tuple[int, int]:
    """Return this process's rank on its machine, and the number of processes there."""
    if not is_distributed():
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def speaks_for_machine() -> bool:
    """Return whether this process shows the messages that every process of its machine would show."""
    return local_rank()[0] == 0


def silence_torch() -> None:
    """Keep torch from printing C++ stacks when the store's connection breaks: hqconv says so in a message.

    Has an effect only before torch is loaded, and none where TORCH_CPP_LOG_LEVEL is set.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


_process, _parent = os.getpid(), 0 if _is_orphan() else os.getppid()
