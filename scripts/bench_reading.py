"""Rates of reading rank files into a GPU (or, to try it out, into memory): ours, the machine's limit, other loaders.

`check_serving.py read` and `start` run it. All rates are GB/s of the files' bytes, in one process on one machine: the
page cache is filled or dropped before each reading.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from hqconv.artifact.tensor_filler import LoadTarget, prepare_buffers
from hqconv.io.safetensors_header import read_header
from hqconv.schemas.dtypes import torch_dtype
from hqconv.serving.parameter_loader import READ, ParameterLoader
from hqconv.serving.rank_file import RankFile

THREADS, PIECE = 16, 16 << 20
_NOISE_BYTES = 64 << 20


def write_files(folder: Path, size_gb: float, num_files: int = 24) -> list[Path]:
    """Write rank files of random bytes with the tensors of an mxfp4 layer, so many GB in all, unless they are there."""
    paths = [folder / f"model.layers.{number}.mlp.experts.safetensors" for number in range(num_files)]
    share = int(size_gb * 1e9 / num_files)
    if all(path.is_file() and path.stat().st_size == share for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    noise = os.urandom(min(_NOISE_BYTES, share))

    def write(path: Path) -> None:
        head = _header(path.stem, share)
        with path.open("wb", buffering=0) as file:
            file.write(head)
            left = share - len(head)
            while left:
                left -= file.write(memoryview(noise)[: min(left, len(noise))])
            os.fsync(file.fileno())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, paths))
    return paths


def _header(layer: str, file_bytes: int) -> bytes:
    """Everything before the tensors of a file of so many bytes: weights and scales of two GEMMs."""
    head_bytes, begin, entries = 4072, 0, {}  # a multiple of 8 and of no block, as headers are
    data_bytes = file_bytes - head_bytes
    for name, dtype, share in (
        ("w13_weight", "I32", 0.62),
        ("w13_weight_scale", "U8", 0.04),
        ("w2_weight", "I32", 0.32),
    ):
        size = int(data_bytes * share) // 4 * 4
        shape = [size // 4] if dtype == "I32" else [size]
        entries[f"{layer}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    last = {"dtype": "U8", "shape": [data_bytes - begin], "data_offsets": [begin, data_bytes]}
    entries[f"{layer}.w2_weight_scale"] = last
    text = json.dumps(entries).encode()
    return (head_bytes - 8).to_bytes(8, "little") + text.ljust(head_bytes - 8)


def warm(paths: Sequence[Path]) -> None:
    """Read all files into the page cache."""
    _read_all(paths, lambda _, __: None, is_direct=False)


def drop(paths: Sequence[Path]) -> None:
    """Drop all files from the page cache, as far as the file system lets them go."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Sequence[Path]) -> float:
    """Share of single bytes of the files that are in the page cache; 1 where the file system cannot tell."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for number in range(16):
                try:
                    offset = path.stat().st_size * number // 16
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
                    found.append(1)
                except BlockingIOError:
                    found.append(0)
                except OSError:
                    return 1.0
    return sum(found) / len(found)


# --- the limits: nothing of hqconv's


def _read_all(paths: Sequence[Path], use: Callable[[int, int], object], *, is_direct: bool, copies: Any = None) -> int:
    """Read all files in pieces by THREADS threads into two buffers each; `use(buffer number, bytes)` after each piece.

    Returns the bytes. copies: a `_Copies`, whose memory is then read into.
    """
    queue: SimpleQueue[tuple[Path, int]] = SimpleQueue()
    for path in paths:
        for begin in range(0, path.stat().st_size, PIECE):
            queue.put((path, begin))
    memory = copies.memory if copies is not None else [mmap.mmap(-1, PIECE) for _ in range(2 * THREADS)]
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)

    def work(thread: int) -> int:
        total, turn = 0, 0
        while True:
            try:
                path, begin = queue.get_nowait()
            except Empty:
                return total
            number, turn = 2 * thread + turn, 1 - turn
            if copies is not None:
                copies.wait(number)
            descriptor = os.open(path, flags)
            count = os.preadv(descriptor, [memory[number]], begin)
            os.close(descriptor)
            use(number, count)
            total += count

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(work, range(THREADS)))


class _Copies:
    """Pinned memory of 2 x THREADS buffers, and as many on the GPU, to which they are copied."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        pinned = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=self.is_gpu) for _ in range(2 * THREADS)]
        aligned = all(tensor.data_ptr() % 4096 == 0 for tensor in pinned)
        if not self.is_gpu and not aligned:  # direct reads need it
            pinned = [torch.frombuffer(mmap.mmap(-1, PIECE), dtype=torch.uint8) for _ in range(2 * THREADS)]
        self.pinned = pinned
        self.memory = [tensor.numpy().data for tensor in pinned]
        self.there = [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(2 * THREADS)]
        self._streams = [_stream(device) for _ in range(THREADS)]
        self._events: list[Any] = [None] * (2 * THREADS)

    def copy(self, number: int, count: int) -> None:
        """Begin to copy a buffer."""
        stream = self._streams[number // 2]
        with torch.cuda.stream(stream) if self.is_gpu else nullcontext():
            self.there[number][:count].copy_(self.pinned[number][:count], non_blocking=True)
            if self.is_gpu:
                self._events[number] = stream.record_event()

    def wait(self, number: int) -> None:
        """Wait for a buffer's last copy."""
        event, self._events[number] = self._events[number], None
        if event is not None:
            event.synchronize()


def _stream(device: torch.device) -> Any:
    new: Any = torch.cuda.Stream  # which says nothing of its types
    return new(device) if device.type == "cuda" else None


def limits(paths: Sequence[Path], device: torch.device, *, is_direct: bool) -> dict[str, float]:
    """Rates without tensors: reads alone, copies alone, and each piece read and copied, two buffers a thread."""
    copies = _Copies(device)
    found = {}
    begun = time.perf_counter()
    found["read"] = _read_all(paths, lambda _, __: None, is_direct=is_direct, copies=copies) / 1e9
    found["read"] /= time.perf_counter() - begun
    if is_direct:
        drop(paths)
    begun = time.perf_counter()
    total = _read_all(paths, copies.copy, is_direct=is_direct, copies=copies) / 1e9
    _finish(device)
    found["read_and_copy"] = total / (time.perf_counter() - begun)
    begun = time.perf_counter()
    for turn in range(4 * THREADS):
        copies.copy(turn % (2 * THREADS), PIECE)
    _finish(device)
    found["copy"] = 4 * THREADS * PIECE / 1e9 / (time.perf_counter() - begun)
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the loaders


class _Layer:
    """Parameters of one rank file, as a server's layer has them."""

    def __init__(self, path: Path, device: torch.device) -> None:
        refs = read_header(path)[0]
        self.file = RankFile(path, path.name, path.stem, "", refs, {})
        self.is_filled = False
        self.tensors = {n: torch.empty(r.shape, dtype=torch_dtype(r.dtype), device=device) for n, r in refs.items()}

    def targets(self) -> list[LoadTarget]:
        """The parameters, with their positions in the file."""
        return [LoadTarget(ref, self.tensors[name]) for name, ref in self.file.tensors.items()]


def ours(paths: Sequence[Path], device: torch.device, *, prepares: bool = True) -> float:
    """Rate of the plugin's loader, from the first layer's request to the last byte.

    prepares: buffers are pinned before, as they are while a server creates its model.
    """
    layers = [_Layer(path, device) for path in paths]
    if prepares and device.type == "cuda":
        prepare_buffers(device)
        time.sleep(2)
    loader = ParameterLoader()
    for layer in layers if prepares else ():
        loader.add(layer)
    if not prepares:
        loader._layers = list(layers)
    _finish(device)
    begun = time.perf_counter()
    for layer in layers:
        loader.fill(layer)
    _finish(device)
    seconds = time.perf_counter() - begun
    _compare(layers[-1], paths[-1])
    return sum(path.stat().st_size for path in paths) / 1e9 / seconds


def _compare(layer: _Layer, path: Path) -> None:
    """Compare the last bytes of each tensor with the file's."""
    with path.open("rb") as file:
        for target in layer.targets():
            count = min(target.ref.num_bytes, 1 << 16)
            file.seek(target.ref.offset_bytes + target.ref.num_bytes - count)
            assert bytes(target.as_bytes()[-count:].cpu().numpy()) == file.read(count), target.ref.name


def safetensors(paths: Sequence[Path], device: torch.device) -> float:
    """Rate of the safetensors library, file by file."""
    from safetensors.torch import load_file

    def load() -> object:
        return [load_file(path, str(device)) for path in paths]  # on the CPU it only maps them

    return _rate(paths, device, load)


def fastsafetensors(paths: Sequence[Path], device: torch.device) -> float:
    """Rate of fastsafetensors without GPUDirect, all files in one batch."""
    module = importlib.import_module("fastsafetensors")

    def load() -> object:
        loader = module.SafeTensorsFileLoader(module.SingleGroup(), str(device), nogds=True)
        loader.add_filenames({0: [str(path) for path in paths]})
        buffers = loader.copy_files_to_device()
        tensors = [buffers.get_tensor(name) for name in loader.get_keys()]
        _finish(device)
        return tensors, buffers, loader

    return _rate(paths, device, load)


def instanttensor(paths: Sequence[Path], device: torch.device) -> float:
    """Rate of InstantTensor, which knows GPUs only."""
    module = importlib.import_module("instanttensor")

    def load() -> object:
        with module.safe_open([str(path) for path in paths], framework="pt", device=device) as file:
            return list(file.tensors())

    return _rate(paths, device, load)


def _rate(paths: Sequence[Path], device: torch.device, load: Callable[[], object]) -> float:
    begun = time.perf_counter()
    held = load()
    _finish(device)
    seconds = time.perf_counter() - begun
    del held
    return sum(path.stat().st_size for path in paths) / 1e9 / seconds


def _through_page_cache(paths: Sequence[Path], device: torch.device) -> float:
    os.environ[READ] = "cached"
    try:
        return ours(paths, device)
    finally:
        del os.environ[READ]


Loader = Callable[[Sequence[Path], torch.device], float]
LOADERS: dict[str, Loader] = {
    "ours": ours,
    "ours, buffers not prepared": lambda paths, device: ours(paths, device, prepares=False),
    "ours, through the page cache": _through_page_cache,
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "InstantTensor": instanttensor,
}


def _loaders(device: torch.device, *, is_cold: bool) -> Iterator[tuple[str, Loader]]:
    """Loaders that this machine has, with a difference in this state of the page cache."""
    for name, loader in LOADERS.items():
        module = name.lower()
        if module in ("fastsafetensors", "instanttensor") and importlib.util.find_spec(module) is None:
            continue
        if (name == "InstantTensor" and device.type != "cuda") or (name.endswith("page cache") and not is_cold):
            continue
        yield name, loader


def measure(paths: Sequence[Path], device: torch.device, runs: int, *, is_cold: bool) -> dict[str, Any]:
    """Medians of several rounds, in which limits and loaders take turns; each begins with the same page cache.

    Returns an empty dict if files cannot be dropped from the page cache.
    """
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}

    def prepare() -> bool:
        (drop if is_cold else warm)(paths)
        return not is_cold or cached_share(paths) < 0.1

    for _ in range(runs):
        if not prepare():
            return {}
        for name, rate in limits(paths, device, is_direct=is_cold).items():
            found.setdefault(f"limit: {name}", []).append(rate)
        for name, loader in _loaders(device, is_cold=is_cold):
            prepare()
            try:
                found.setdefault(name, []).append(loader(paths, device))
            except Exception as error:  # noqa: BLE001 - of another library, say
                failed[name] = f"{type(error).__name__}: {error}"
    rates = {name: statistics.median(values) for name, values in found.items() if values}
    limit = rates["limit: read"] if is_cold else rates["limit: read_and_copy"]
    return {"rates": rates, "all": found, "failed": failed, "ours_of_limit": rates.get("ours", 0.0) / limit}


def read(work: Path, size_gb: float, runs: int) -> dict[str, Any]:
    """Report on files of so many GB, in the page cache and cold.

    failed: less than 40 GB/s and 0.9 of the limit from the page cache, or 0.9 of direct reads from a cold disk.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    paths = write_files(work / f"reading-{size_gb:g}", size_gb)
    report: dict[str, Any] = {"device": str(device), "bytes": sum(path.stat().st_size for path in paths)}
    for state in ("cached", "cold"):
        report[state] = measure(paths, device, runs, is_cold=state == "cold")
        print(state, json.dumps({k: v for k, v in report[state].items() if k != "all"}, indent=1), flush=True)
    cached, cold = report["cached"], report["cold"]
    is_fast = cached["rates"].get("ours", 0.0) >= 40 or cached["ours_of_limit"] >= 0.9
    report["failed"] = "ours" in cached["failed"] or not is_fast or (bool(cold) and cold["ours_of_limit"] < 0.9)
    return report
