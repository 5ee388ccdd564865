"""Check at the start that all processes of a conversion share its output folder, and wait for files of other machines.

A network file system must show a file with its size and content, under its new name after a rename, to the machines
that did not write it, within `_VISIBLE_S`; and a lock (flock) of one machine must keep out the others. A folder of the
same name on each machine's own disk is the usual mistake.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hqconv.conversion.journal import NO_LOCKS
from hqconv.errors import OutputError
from hqconv.io.durable_files import FileRecord, output_errors, partial, size_of, sync_folder, write_whole
from hqconv.schemas.artifact_names import JOURNAL, folder_check

if TYPE_CHECKING:
    from hqconv.conversion.distributed import ProcessGroup

_VISIBLE_S = 75.0  # NFS clients keep the answer that a file is missing for up to 60 s
_POLL_S = 0.1
_REMEDY = "Give all processes the same folder with -o, on a file system that all machines share (docs/usage.md)."


def check_shared_folder(processes: ProcessGroup, root: Path) -> None:
    """Compare the folder `root`, which rank 0 has locked, as all processes see it; rank 0 waits for all others.

    Raises OutputError in the process that finds a fault, and PeerError in the others.
    """
    if processes.rank == 0:
        _check_as_first(processes, root)
    else:
        _check_as_other(processes, root)


def _check_as_first(processes: ProcessGroup, root: Path) -> None:
    nonce, others = secrets.token_hex(8), range(1, processes.world_size)
    try:
        write_whole(root, folder_check(0), _content(nonce, 0))
        processes.send("check", {"nonce": nonce, "host": socket.gethostname()})
        for rank in others:
            processes.receive(f"check/{rank}")
            _wait_for_content(root, rank, nonce, processes.name_of(rank))
    finally:
        with suppress(OSError):
            for rank in range(processes.world_size):
                (root / folder_check(rank)).unlink(missing_ok=True)
            sync_folder(root)
    processes.send("checked", True)


def _check_as_other(processes: ProcessGroup, root: Path) -> None:
    first = processes.receive("check")
    _wait_for_content(root, 0, first["nonce"], processes.name_of(0))
    _check_lock(root, processes.name_of(0), is_alone=first["host"] == socket.gethostname())
    write_whole(root, folder_check(processes.rank), _content(first["nonce"], processes.rank))
    processes.send(f"check/{processes.rank}", True)
    processes.receive("checked")


def _content(nonce: str, rank: int) -> bytes:
    return f"{nonce} {rank}\n".encode() * 500


def _wait_for_content(root: Path, rank: int, nonce: str, name: str) -> None:
    """Wait until this machine sees another rank's file, which was written under a temporary name and renamed."""
    path, expected = root / folder_check(rank), _content(nonce, rank)
    found = "no such file"

    def is_seen() -> bool:
        nonlocal found
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            found = "no such file" if root.is_dir() else "no such folder"
            return False
        found = "another file" if content != expected else "also the file of its temporary name"
        return content == expected and not partial(path).exists()

    with output_errors(path, _REMEDY):
        if _wait_until(is_seen, root):
            return
    raise OutputError(
        "The processes of this conversion do not share the output folder.",
        where=f"{root} on {socket.gethostname()}",
        expected=f"{path.name}, {len(expected)} bytes, which {name} wrote",
        found=found,
        remedy=_REMEDY,
    )


def _check_lock(root: Path, name: str, *, is_alone: bool) -> None:
    """Ask for the lock that rank 0 holds. is_alone: on one machine a file system without locks is only warned of."""
    with output_errors(root / JOURNAL, _REMEDY):
        descriptor = os.open(root / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = "the lock was given to this process, too: locks are of one machine only"
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            if is_alone:
                return
            found = f"no locks ({error.strerror})"
        finally:
            os.close(descriptor)
    raise OutputError(
        "The file system of the output folder does not lock files for all machines.",
        where=f"{root / JOURNAL} on {socket.gethostname()}",
        expected=f"a lock (flock) that {name} holds and this process is refused",
        found=found,
        remedy="Mount it with locks that all machines share (NFS without local_lock, Lustre with flock), choose "
        "another place with -o, or convert on one machine.",
    )


def wait_for_files(root: Path, records: Iterable[FileRecord], name: str) -> None:
    """Wait until this machine sees the files that another process finished. Raises OutputError for a missing file."""
    for record in records:
        _wait_for_file(root / record.path, record.size_bytes, name)


def _wait_for_file(path: Path, size_bytes: int, name: str) -> None:
    with output_errors(path):
        if _wait_until(lambda: size_of(path) == size_bytes, path.parent):
            return
        found = size_of(path)
    raise OutputError(
        "A finished file is not seen by the process that completes the artifact.",
        where=f"{path} on {socket.gethostname()}",
        expected=f"{size_bytes} bytes, which {name} wrote",
        found="no such file" if found is None else f"{found} bytes",
        remedy="See whether it was removed; then run the same command with --resume.",
    )


def _wait_until(is_so: Callable[[], bool], folder: Path) -> bool:
    """Wait for up to `_VISIBLE_S`. Folders are listed between looks, so that a network file system asks its server."""
    end = time.monotonic() + _VISIBLE_S
    while not is_so():
        if time.monotonic() > end:
            return False
        for each in (folder.parent, folder):
            with suppress(OSError):
                os.listdir(each)  # noqa: PTH208
        time.sleep(_POLL_S)
    return True
