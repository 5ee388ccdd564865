"""What a machine can do at best: reading, writing, hashing and copying, in GB/s of a source's bytes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 8 << 20


def measure_limits(
    source: Path, work: Path, bytes_out: int, threads: int, device: str, *, cold: bool = False
) -> dict[str, float]:
    """GB/s of the source's bytes at which each part of a conversion could go alone; infinite where it has none.

    read: the source's files, in parallel. write: the output's size to the same folder, flushed. digest: its SHA-256.
    together: these three at once, by as many threads.
    copy_in, copy_out: pinned memory to the GPU and the output back.
    """
    num_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if cold:
        from scripts.bench import forget

        forget(source)
    limits = {
        "read": num_bytes / timed(lambda: read_all(source, max(threads, 2))) / 1e9,
        "write": num_bytes / timed(lambda: write_all(work, bytes_out, max(threads, 2))) / 1e9,
        "digest": num_bytes / timed(lambda: digest(bytes_out, threads)) / 1e9,
        "together": num_bytes / timed(lambda: together(source, work, bytes_out, threads)) / 1e9,
        "copy_in": float("inf"),
        "copy_out": float("inf"),
    }
    if device.startswith("cuda"):
        into, out_of = copies(device)
        limits["copy_in"], limits["copy_out"] = into, out_of * num_bytes / bytes_out
    return limits


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def read_all(folder: Path, threads: int) -> None:
    """Read all weight files, pieces in parallel, into memory that is used again."""
    pieces = [
        (path, start)
        for path in sorted(folder.glob("*.safetensors"))
        for start in range(0, path.stat().st_size, _CHUNK_BYTES * 8)
    ]

    def read(piece: tuple[Path, int]) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        with piece[0].open("rb", buffering=0) as file:
            for offset in range(piece[1], piece[1] + _CHUNK_BYTES * 8, _CHUNK_BYTES):
                os.preadv(file.fileno(), [buffer], offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, pieces))


def write_all(folder: Path, num_bytes: int, threads: int) -> None:
    """Write so many bytes to new files in parallel, flush and remove them."""
    data = os.urandom(_CHUNK_BYTES)
    share = num_bytes // threads

    def write(number: int) -> None:
        path = folder / f"limit-{number}"
        with path.open("wb", buffering=0) as file:
            for start in range(0, share, _CHUNK_BYTES):
                file.write(memoryview(data)[: min(_CHUNK_BYTES, share - start)])
            os.fsync(file.fileno())

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))
    finally:
        for number in range(threads):
            (folder / f"limit-{number}").unlink(missing_ok=True)


def digest(num_bytes: int, threads: int) -> None:
    """SHA-256 of so many bytes, on as many cores."""
    data = bytes(_CHUNK_BYTES)

    def one(_: int) -> None:
        hasher = hashlib.sha256()
        for _ in range(max(1, num_bytes // threads // _CHUNK_BYTES)):
            hasher.update(data)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(threads)))


def together(source: Path, work: Path, bytes_out: int, threads: int) -> None:
    """Read the source, write so many bytes and hash as many, by `threads` threads in all."""
    share = max(1, threads // 3)
    tasks = (
        lambda: read_all(source, max(1, threads - 2 * share)),
        lambda: write_all(work, bytes_out, share),
        lambda: digest(bytes_out, share),
    )
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda task: task(), tasks))


def copies(device: str) -> tuple[float, float]:
    """GB/s from pinned memory to the GPU, and back."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    speeds = []
    for to, source in ((there, host), (host, there)):

        def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        speeds.append((1 << 30) / timed(copy) / 1e9)
    return speeds[0], speeds[1]
