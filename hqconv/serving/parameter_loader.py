"""Fill tensors from files: pieces in order, several in flight, through small pinned buffers to a GPU.

A file's bytes go once from the page cache into a pinned buffer and from there into the tensor: no other tensor is
created, and the buffers are the only additional memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from hqconv.errors import VerificationError
from hqconv.io.file_access import fill
from hqconv.schemas.tensors import TensorRef
from hqconv.serving.artifact_view import ArtifactView
from hqconv.serving.rank_file import RankFile, check_digest
from hqconv.serving.warm.kernel_store import VARIABLE, folder_beside, kernels_folder, tuning_tables, use_warm_kernels

NUM_THREADS = 16
PIECE_BYTES = 8 << 20  # of a buffer: large enough for a disk and a bus, small enough to be pinned in no time


@dataclass(frozen=True)
class LoadTarget:
    """Destination tensor for the bytes of one tensor of a file; contiguous."""

    ref: TensorRef
    tensor: torch.Tensor

    def as_bytes(self) -> torch.Tensor:
        """Memory of the tensor, uint8 [num_bytes]."""
        return self.tensor.detach().view(-1).view(torch.uint8)


@dataclass
class _Piece:
    """Run of a file's bytes, and the destination parts of tensors, in the order of the file."""

    file: RankFile
    begin: int
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() for part in self.parts)


class Buffers:
    """Pinned buffers for a GPU, each with a stream, created in the background because pinning is slow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: SimpleQueue[tuple[torch.Tensor, Any] | Exception] = SimpleQueue()
        threading.Thread(target=self._make, name="hqconv-pin", daemon=True).start()

    @contextmanager
    def one(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Wait for a free buffer, uint8 [PIECE_BYTES], and its stream. Raises the errors of their creation."""
        found = self._free.get()
        try:
            if isinstance(found, Exception):
                raise found
            yield found
        finally:
            self._free.put(found)

    def _make(self) -> None:
        stream_type: Any = torch.cuda.Stream  # untyped
        try:
            for _ in range(NUM_THREADS):
                pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._free.put((pinned, stream_type(self.device)))
        except Exception as error:  # noqa: BLE001 - raised by `one`
            self._free.put(error)


class ParameterFiller:
    """Fill the tensors of several files in the background, in the order given; `wait` for one owner at a time."""

    def __init__(
        self,
        files: Iterable[tuple[Hashable, RankFile, Sequence[LoadTarget]]],
        *,
        digests: bool = False,
        buffers: Buffers | None = None,
    ) -> None:
        """Begin with (owner, file, tensors), …. With `digests` all files are hashed and compared before that.

        The tensors are on one device; `buffers`: existing ones for this device.
        Raises VerificationError for a file whose digest is not the manifest's.
        """
        jobs = list(files)
        self.begun_s = self.ended_s = time.perf_counter()  # the latter of the last bytes so far
        self.num_bytes = sum(target.ref.num_bytes for _, _, targets in jobs for target in targets)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hqconv-fill")
        self._buffers = buffers
        try:
            if digests:
                list(self._pool.map(check_digest, [file for _, file, _ in jobs]))
            self._prepare({target.tensor.device for _, _, targets in jobs for target in targets})
            self._begun: dict[Hashable, list[Future[None]]] = {
                owner: [self._pool.submit(self._fill, piece) for piece in _pieces(file, targets)]
                for owner, file, targets in jobs
            }
        except BaseException:
            self.stop()
            raise
        self._pool.shutdown(wait=False)  # no more work: the threads end when this is done

    def __contains__(self, owner: Hashable) -> bool:
        """Return whether an owner's tensors are being filled, or full and not waited for."""
        return owner in self._begun

    @property
    def is_done(self) -> bool:
        """True if every owner has been waited for."""
        return not self._begun

    def wait(self, owner: Hashable) -> None:
        """Return when an owner's tensors are full.

        Raises VerificationError if the file ends too early or cannot be read.
        """
        try:
            for future in self._begun.pop(owner):
                future.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel pieces that have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, devices: Collection[torch.device]) -> None:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # copies into this memory must be done before others write
                if self._buffers is None or self._buffers.device != device:
                    self._buffers = Buffers(device)

    def _fill(self, piece: _Piece) -> None:
        if piece.parts[0].device.type != "cuda":
            _read(piece.file, piece.begin, [part.numpy().data for part in piece.parts])
        else:
            assert self._buffers is not None
            with self._buffers.one() as (buffer, stream):
                _read(piece.file, piece.begin, [buffer.numpy().data[: piece.num_bytes]])
                _copy(buffer, piece.parts, stream)
        self.ended_s = time.perf_counter()


def _copy(buffer: torch.Tensor, parts: Iterable[torch.Tensor], stream: Any) -> None:
    """Copy a buffer's bytes into parts of tensors, one after the other, and return when they are there."""
    with torch.cuda.stream(stream):
        begin = 0
        for part in parts:
            part.copy_(buffer[begin : begin + part.numel()], non_blocking=True)
            begin += part.numel()
    stream.synchronize()


def _pieces(file: RankFile, targets: Sequence[LoadTarget]) -> Iterable[_Piece]:
    """Pieces of at most PIECE_BYTES, each of adjoining bytes and for one device."""
    piece: _Piece | None = None
    for target in sorted(targets, key=lambda target: target.ref.offset_bytes):
        data, begin = target.as_bytes(), target.ref.offset_bytes
        if data.numel() != target.ref.num_bytes:
            raise AssertionError(f"{target.ref.name}: {data.numel()} bytes for {target.ref.num_bytes}")
        done = 0
        while done < data.numel():
            follows = piece is not None and piece.begin + piece.num_bytes == begin + done
            if piece is None or not follows or piece.num_bytes == PIECE_BYTES:
                if piece is not None:
                    yield piece
                piece = _Piece(file, begin + done)
            size = min(data.numel() - done, PIECE_BYTES - piece.num_bytes)
            piece.parts.append(data[done : done + size])
            done += size
    if piece is not None:
        yield piece


def _read(file: RankFile, begin: int, views: list[memoryview]) -> None:
    """Fill views from a byte of a file on."""
    end = begin + sum(len(view) for view in views)
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            reached = fill(descriptor, views, begin)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file, "a readable file", error) from error
    if reached != end:
        raise _unreadable(file, f"{end} bytes or more", f"{reached} bytes")


def _unreadable(file: RankFile, expected: str, found: object) -> VerificationError:
    remedy = "Copy the artifact again from where it is whole, and start the server again."
    what = "A rank file of the artifact was cut off or lost while it was read."
    return VerificationError(what, where=file.name, expected=expected, found=found, remedy=remedy)


VERIFY = "HQCONV_VERIFY"  # 1: hash every file first

logger = logging.getLogger("hqconv.serving")


class Filled(Hashable, Protocol):
    """Layer that takes its parameters from a rank file."""

    file: RankFile
    is_filled: bool

    def targets(self) -> list[LoadTarget]:
        """Current parameters, with their positions in the file."""


class ParameterLoader:
    """Fill layers in the order of their creation, files of later layers while an earlier layer is waited for."""

    def __init__(self, log: logging.Logger = logger) -> None:
        self._log = log  # the engine's, for its handlers to print
        self.claimed: dict[str, str] = {}  # name of an artifact's layer → prefix of vLLM's layer
        self.tuning: dict[str, Any] = {}  # tables of `hqconv warm`
        self._layers: list[Filled] = []
        self._filling: ParameterFiller | None = None
        self._buffers: Buffers | None = None
        self._paths: dict[str, Path] = {}
        self._has_kernels = False

    def add(self, layer: Filled) -> None:
        """Add a layer whose parameters exist; buffers for their GPU are created during the model's creation."""
        self._layers.append(layer)
        device = layer.targets()[0].tensor.device
        if self._buffers is None and device.type == "cuda":
            self._buffers = Buffers(device)

    def path(self, view: ArtifactView, name: str, *, alone: bool, cache_dir: str | None) -> Path:
        """Path of a rank file on this machine; from the Hub all files of its rank are downloaded, or it `alone`.

        Raises the errors of `ArtifactLocation.fetch`.
        """
        if name not in self._paths:
            folder = name.rpartition("/")[0] + "/"
            others = [] if alone or view.location.is_folder else [n for n in view.files if n.startswith(folder)]
            self._paths.update(view.location.fetch_all(others or [name], cache_dir))
        return self._paths[name]

    def forget_paths(self) -> None:
        """Forget paths of rank files, as the model has those of another artifact now."""
        self._paths.clear()

    def fill(self, layer: Filled) -> None:
        """Return when a layer's parameters are full. Raises VerificationError for a file that is damaged."""
        if self._filling is None or layer not in self._filling:
            digests = os.environ.get(VERIFY) == "1"
            self._filling = ParameterFiller(self._due(layer), digests=digests, buffers=self._buffers)
        self._filling.wait(layer)
        layer.is_filled = True
        if self._filling.is_done:
            self._log_rate(self._filling)
            self._filling = self._buffers = None
            # Full tensors belong to the model alone: no reference here keeps them alive.
            self._layers = [one for one in self._layers if not one.is_filled]

    def refill(self, layers: Sequence[Filled]) -> None:
        """Fill layers of the model again, all their files in flight; on an error no thread writes to them any more.

        Files are not hashed. Raises VerificationError for a file that is cut off or unreadable.
        """
        self._layers = []
        jobs = [(layer, layer.file, layer.targets()) for layer in layers]
        filling = ParameterFiller(jobs, buffers=self._buffers)
        for layer in layers:
            filling.wait(layer)
            layer.is_filled = True
        self._log_rate(filling)

    def take_kernels(self, view: ArtifactView) -> None:
        """Let Humming find the kernels of `hqconv warm`, once in a process, if the environment variable is set."""
        if self._has_kernels or not os.environ.get(VARIABLE):
            return
        self._has_kernels = True
        artifact = Path(view.location.name)
        folder = kernels_folder(artifact)
        if folder == folder_beside(artifact) and not view.location.is_folder:
            reason: str | None = f"{VARIABLE} must name a folder: there is none beside a model on the Hub."
        else:
            reason = use_warm_kernels(folder, view.sm_version)
        if reason:
            self._log.warning("Kernels are compiled as they are needed: %s", reason)
        else:
            self.tuning = tuning_tables(folder)
            self._log.info("Kernels that were compiled beforehand are in use")

    def _log_rate(self, filling: ParameterFiller) -> None:
        num_bytes, seconds = filling.num_bytes, filling.ended_s - filling.begun_s
        rate = num_bytes / 1e9 / max(seconds, 1e-9)
        self._log.info("Experts: %.3f GB in %.3f s (%.1f GB/s)", num_bytes / 1e9, seconds, rate)

    def _due(self, first: Filled) -> list[tuple[Filled, RankFile, Sequence[LoadTarget]]]:
        """A layer, and later layers that can be filled with it: on the same device, with parameters that stay there."""
        due: list[tuple[Filled, RankFile, Sequence[LoadTarget]]] = [(first, first.file, first.targets())]
        device = due[0][2][0].tensor.device
        for layer in self._layers:
            targets = layer.targets()
            if layer is not first and not layer.is_filled and all(t.tensor.device == device for t in targets):
                due.append((layer, layer.file, targets))
        return due
