"""What may lie in the place of a file, and calls that must not wait for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def _socket(path: Path) -> None:
    here = os.getcwd()  # the name of a socket is short  # noqa: PTH109
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NODES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a folder": Path.mkdir,
}


def in_time(call: Callable[[], T]) -> T:
    """What a call gives or raises; AssertionError where it takes longer. A call that waits for ever is left behind."""
    given: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    if raised:
        raise raised[0]
    assert given, "not done in 20 s"
    return given[0]
