"""Fill tensors from files in the background: threads take pieces of all files from one queue.

To a GPU each thread reads a piece into one of its two pinned buffers while the piece before it is copied from the
other. The bytes go once into a buffer and from there into the tensor: the buffers are the only additional memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hqconv.artifact.rank_file import RankFile, check_sha256
from hqconv.errors import VerificationError
from hqconv.io.file_access import fill
from hqconv.io.pipeline import host_buffer, pipeline
from hqconv.schemas.tensors import TensorRef, torch_dtype

# Measured on an H200 with 16 processors: 8 threads read 21 GB/s, 16 threads 40, 32 threads 33; pieces of 4 MB 17,
# of 16 MB 40, of 64 MB 39.
NUM_THREADS = 16
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class LoadTarget:
    """Destination tensor for the bytes of one tensor of a file; contiguous."""

    ref: TensorRef
    tensor: torch.Tensor

    def as_bytes(self) -> torch.Tensor:
        """Memory of the tensor, uint8 [num_bytes]."""
        return self.tensor.detach().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class _Piece:
    """Run of a tensor's bytes: where they lie in a file, and their destination, uint8."""

    owner: Hashable
    file: RankFile
    offset_bytes: int
    destination: torch.Tensor

    def read_into(self, memory: torch.Tensor) -> None:
        """Read the bytes into memory of the CPU, uint8. Raises VerificationError if the file lacks them."""
        end = self.offset_bytes + memory.numel()
        expected = f"{end} bytes or more"
        try:
            with self.file.path.open("rb", buffering=0) as file:
                reached = fill(file.fileno(), [memory.numpy().data], self.offset_bytes)
            if reached == end:
                return
            found = f"{reached} bytes"
        except OSError as error:
            expected = "a readable file"
            found = str(error)
        raise VerificationError(
            "A rank file of the artifact was cut off or lost while it was read.",
            where=self.file.name,
            expected=expected,
            found=found,
            remedy="Copy the artifact again from where it is whole, and start again.",
        )


class TensorFiller:
    """Fill the tensors of several files in the background, in the order given; `wait` for one owner at a time."""

    def __init__(self, files: Iterable[tuple[Hashable, RankFile, Sequence[LoadTarget]]]) -> None:
        """Begin with (owner, file, tensors), …; the tensors are on one device."""
        pieces: list[_Piece] = []
        self._num_left: dict[Hashable, int] = {}  # owner → pieces that have not arrived
        for owner, file, targets in files:
            num_before = len(pieces)
            for target in sorted(targets, key=lambda target: target.ref.offset_bytes):
                pieces += _pieces(owner, file, target)
            self._num_left[owner] = len(pieces) - num_before
        sizes = [piece.destination.numel() for piece in pieces]
        self.num_bytes = sum(sizes)
        self._max_piece_bytes = max(sizes, default=0)
        self._device = pieces[0].destination.device if pieces else torch.device("cpu")
        if self._device.type == "cuda":
            # copies into this memory must be done before others write
            torch.cuda.synchronize(self._device)
        self.begun_s = self.ended_s = time.perf_counter()  # the latter of the last bytes so far
        self._pieces = iter(pieces)
        self._condition = threading.Condition()
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._num_running = min(NUM_THREADS, len(pieces))
        self._threads = [
            threading.Thread(target=self._run, name=f"hqconv-fill-{number}")
            for number in range(self._num_running)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    def __contains__(self, owner: Hashable) -> bool:
        """Return whether an owner's tensors are being filled, or full and not waited for."""
        return owner in self._num_left

    @property
    def is_done(self) -> bool:
        """True if every owner has been waited for."""
        return not self._num_left

    def wait(self, owner: Hashable) -> None:
        """Return when an owner's tensors are full.

        Raises VerificationError if a file ends too early or cannot be read, and ends all work then.
        """
        try:
            with self._condition:
                self._condition.wait_for(lambda: not self._num_left[owner] or not self._num_running)
            if self._num_left[owner]:
                raise self._failure or RuntimeError(
                    "The work was stopped before this tensor was full."
                )
        except BaseException:
            self.stop()
            raise
        del self._num_left[owner]

    def stop(self) -> None:
        """Give up pieces that have not begun, and return when all threads have ended."""
        self._is_stopped = True
        for thread in self._threads:
            if thread.ident is not None:  # else it ends at once, if it begins at all
                thread.join()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                self._fill_gpu()
            else:
                self._fill_cpu()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._failure = self._failure or error
            self._is_stopped = True
        with self._condition:
            self._num_running -= 1
            self._condition.notify_all()

    def _fill_cpu(self) -> None:
        while (piece := self._claim()) is not None:
            piece.read_into(piece.destination)
            self._arrived(piece)

    def _fill_gpu(self) -> None:
        """Read each piece into one of two buffers while the piece before it is copied from the other."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffers = [self._pinned_buffer() for _ in range(2)]
        copied: _Piece | None = None  # or on its way
        try:
            for buffer in itertools.cycle(buffers):
                piece = self._claim()
                if piece is None:
                    break
                memory = buffer[: piece.destination.numel()]
                piece.read_into(memory)
                stream.synchronize()
                if copied is not None:
                    self._arrived(copied)
                copied = piece
                with torch.cuda.stream(stream):
                    piece.destination.copy_(memory, non_blocking=True)
        finally:
            stream.synchronize()
        if copied is not None:
            self._arrived(copied)

    def _pinned_buffer(self) -> torch.Tensor:
        try:
            return host_buffer(self._max_piece_bytes, self._device, may_be_copied=False)
        except RuntimeError:  # CUDA refuses to pin more: copies are slower
            return torch.empty(self._max_piece_bytes, dtype=torch.uint8)

    def _claim(self) -> _Piece | None:
        """Return the next piece; None after the last one, or if the work was stopped or the program ends."""
        if self._is_stopped or not threading.main_thread().is_alive():
            return None
        with self._condition:
            return next(self._pieces, None)

    def _arrived(self, piece: _Piece) -> None:
        with self._condition:
            self.ended_s = time.perf_counter()
            self._num_left[piece.owner] -= 1
            self._condition.notify_all()


def _pieces(owner: Hashable, file: RankFile, target: LoadTarget) -> Iterator[_Piece]:
    """Cut a tensor into pieces of at most PIECE_BYTES."""
    data = target.as_bytes()
    num_bytes = target.ref.num_bytes
    assert data.numel() == num_bytes, f"{target.ref.name}: {data.numel()} bytes for {num_bytes}"
    for begin in range(0, num_bytes, PIECE_BYTES):
        destination = data[begin : begin + PIECE_BYTES]
        yield _Piece(owner, file, target.ref.offset_bytes + begin, destination)


def read_tensors(
    file: RankFile, refs: Mapping[str, TensorRef], device: torch.device
) -> dict[str, torch.Tensor]:
    """Read tensors of one file into new tensors on `device`, of their dtypes and shapes.

    Raises VerificationError for a file that ends too early or cannot be read.
    """
    tensors = {
        name: torch.empty(ref.shape, dtype=torch_dtype(ref.dtype), device=device)
        for name, ref in refs.items()
    }
    targets = [LoadTarget(ref, tensors[name]) for name, ref in refs.items()]
    TensorFiller([(file.name, file, targets)]).wait(file.name)
    return tensors


def check_digests(files: Iterable[RankFile]) -> None:
    """Hash whole files in threads. Raises VerificationError for a digest that is not the manifest's."""
    for _ in pipeline(files, check_sha256, NUM_THREADS, NUM_THREADS, name="hqconv-hash"):
        pass
