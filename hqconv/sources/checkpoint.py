"""A source checkpoint: the files of a folder or a Hub repo, their headers, and reads into given buffers.

Which weights count is what transformers decides: `model.safetensors` if it is there, else the shards that
`model.safetensors.index.json` names. The index and the headers must then agree on every tensor, both ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hqconv.errors import InputError, NetworkError, RequestError, first_few
from hqconv.io import checkpoint_files, hub, hub_snapshot
from hqconv.io.file_snapshot import FileSnapshot
from hqconv.io.open_files import Descriptors
from hqconv.io.protocols import SourceFile
from hqconv.io.ranges import adjoining, fill
from hqconv.io.safetensors_header import parse_header, read_header
from hqconv.io.sidecar_files import SidecarFiles
from hqconv.io.source_names import refuse_what_is_no_model
from hqconv.schemas.artifact_names import INDEX, SINGLE
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import open_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_NUM_THREADS = 8  # hides the latency of networks and network file systems; the parsing itself holds the GIL


class Checkpoint:
    """An opened checkpoint; a context manager that closes the files `read_into` opened.

    root: the folder; name: its name or the repo's, without the organisation; repo_id, revision: Hub id and
    commit hash, None for a folder; config: config.json;
    quantization: its quantization_config or what stands for it; files: the weight files sorted by name; tensors: by
    file, then by offset; metadata: each file's `__metadata__`, in the order of files; index_sha256: of the
    index, None without one; loose: the files beside the weights; other_files: those that belong in an artifact
    verbatim, POSIX paths relative to root; total_bytes: of all tensors;
    listing: of a repo whose files are not all here, else None; guard: of all files that are read.
    """

    def __init__(
        self,
        root: Path,
        *,
        name: str,
        repo_id: str | None = None,
        revision: str | None = None,
        listing: hub.Listing | None = None,
    ) -> None:
        """Reads and checks config, index and headers of the folder `root`; see `open`."""
        self.root, self.name, self.repo_id, self.revision = root, name, repo_id, revision
        self.listing, self.guard = listing, FileSnapshot(root)
        checkpoint_files.check_regular(root)
        self.guard.look_if_there(
            name for name in hub_snapshot.WORDS if name != INDEX or not self._has(SINGLE)
        )
        self.config: dict[str, Any] = checkpoint_files.read_config(root)
        self.quantization = checkpoint_files.read_quantization(root, self.config)
        weight_map, self.index_sha256 = checkpoint_files.read_weight_map(root, self._has(SINGLE))
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        if weight_map is not None:
            self._check_present(weight_map)
        self.files, self.tensors, self.metadata = self._read_files(names)
        if weight_map is not None:
            checkpoint_files.check_weight_map(
                weight_map, self.tensors, tuple(file.name for file in self.files)
            )
        self.loose = (
            SidecarFiles.of_folder(root) if listing is None else SidecarFiles.of_listing(listing.sizes, root)
        )
        self.other_files = self.loose.names
        self.guard.look_if_there(self.other_files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())
        self._descriptors = Descriptors(self._open_file)

    @classmethod
    def open(cls, src: str, revision: str | None = None, *, is_lazy: bool = False) -> Self:
        """Opens a local folder, or downloads (into the Hub cache) the repo `org/name` and opens that.

        With `is_lazy` nothing of a repo is downloaded but its words and the headers of its shards: see `fetch`.
        HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token are the Hub library's business.
        Raises RequestError where there is no such folder, repo or revision, or no access to it; InputError where the
        files are broken, missing or contradict each other; NetworkError where the Hub fails.
        """
        path = Path(src)
        with checkpoint_files.readable(src):
            refuse_what_is_no_model(path)
            if src and path.is_dir():  # Path("") is the current folder
                if revision is not None:
                    what, remedy = "A local folder has no revisions.", "Leave the revision out."
                    raise RequestError(what, where=src, found=f"revision {revision}", remedy=remedy)
                return cls(path, name=path.resolve().name)
            if not hub_snapshot.is_repo_id(src):
                raise hub_snapshot.no_repo(src)
            root, listing = (
                hub_snapshot.look(src, revision) if is_lazy else (hub_snapshot.download(src, revision), None)
            )
            return cls(root, name=src.split("/")[1], repo_id=src, revision=root.name, listing=listing)

    # --- headers ---------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        return (self.root / name).is_file() or (self.listing is not None and name in self.listing.sizes)

    def _check_present(self, weight_map: dict[str, str]) -> None:
        tensor_of = {name: tensor for tensor, name in reversed(weight_map.items())}
        missing = sorted(name for name in tensor_of if not self._has(name))
        if missing:
            shown = first_few(missing)
            what = f"{len(missing)} of the {len(tensor_of)} shards the index names are missing: {shown}."
            where = f"{self.root}, tensor {tensor_of[missing[0]]!r} and others"
            raise InputError(what, where=where, remedy="Copy or download the missing files.")

    def _read_files(
        self, names: list[str]
    ) -> tuple[tuple[SourceFile, ...], dict[str, TensorRef], tuple[Mapping[str, str], ...]]:
        """The files, all their tensors, and each file's metadata."""
        with ThreadPoolExecutor(min(_NUM_THREADS, len(names))) as pool:
            read = list(pool.map(self._read_file, range(len(names)), names))
        tensors: dict[str, TensorRef] = {}
        for _, refs, _ in read:
            twice = tensors.keys() & refs.keys()
            if twice:
                name = next(name for name in refs if name in twice)
                both = f"{names[tensors[name].file]} and {names[refs[name].file]}"
                what, where = "A tensor is in two files.", f"tensor {name!r}"
                raise InputError(
                    what, where=where, expected="one", found=both, remedy=checkpoint_files.COPY_AGAIN
                )
            tensors |= refs
        return tuple(file for file, _, _ in read), tensors, tuple(metadata for _, _, metadata in read)

    def _read_file(self, number: int, name: str) -> tuple[SourceFile, dict[str, TensorRef], dict[str, str]]:
        path = self.root / name
        if self.listing is not None and not path.is_file():
            size, where = self._size(name), f"{self.repo_id}/{name}"
            refs, metadata, sha256 = parse_header(where, self.listing.read_head(name), size, number)
            return SourceFile(name, size, sha256, 0), refs, metadata
        status = self.guard.look(name)
        refs, metadata, sha256 = read_header(path, number)
        mtime_ns = status.st_mtime_ns if self.repo_id is None else 0
        return SourceFile(name, status.st_size, sha256, mtime_ns), refs, metadata

    def _size(self, name: str) -> int:
        """Bytes of a file, as the Hub says. Raises InputError where the repo has no such file."""
        assert self.listing is not None
        if name not in self.listing.sizes:
            what, where = "The Hub repo lacks a file.", f"{self.repo_id}, revision {self.revision}"
            raise InputError(what, where=where, expected=name, remedy="Upload the model again, whole.")
        return self.listing.sizes[name]

    # --- a repo's files ----------------------------------------------------------------------------------------

    def is_here(self, name: str) -> bool:
        """Whether a file is on this machine, and is read from there."""
        return self.listing is None or self.guard.has_seen(name)

    def fetch(self, names: Iterable[str], check: Callable[[], None] | None = None) -> None:
        """Bring files of a repo into the Hub cache, those that are not here; any thread may. Nothing for a folder.

        check: as of `hub.fetch_file`. Raises as `open`, and InputError where what came is not what its header was.
        """
        for name in names:
            if self.listing is None or self.is_here(name):
                continue
            path = hub.fetch_file(self.listing.repo_id, self.listing.commit, name, check)
            self._check_fetched(name, path)
            self.guard.look(name)

    def _check_fetched(self, name: str, path: Path) -> None:
        expected, found = self._size(name), path.stat().st_size
        if expected != found:
            what, remedy = "A download has another size than the Hub says.", f"Remove {path} and try again."
            raise NetworkError(
                what, where=f"{self.repo_id}/{name}", expected=expected, found=found, remedy=remedy
            )
        file = next((file for file in self.files if file.name == name), None)
        if file is not None and read_header(path)[2] != file.header_sha256:
            what, remedy = "A download has another header than the Hub sent before.", "Try again."
            raise InputError(what, where=str(path), remedy=remedy)

    def forget(self, name: str) -> None:
        """A file of a repo is read from the Hub again, as it will be removed here; nobody may be reading it."""
        self.guard.forget(name)
        self._descriptors.drop(name)

    # --- bytes -----------------------------------------------------------------------------------------------

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fills all of `buffer` (C-contiguous) with the tensor's bytes from byte `start` on; any thread may.

        Raises ValueError for a range outside the tensor; InputError if the file changed since its header was
        read, ends too early, or cannot be read.
        """
        view = memoryview(buffer)
        if start < 0 or start + view.nbytes > ref.num_bytes:
            raise ValueError(f"{ref.name}: bytes {start} + {view.nbytes} are outside of {ref.num_bytes}")
        if view.nbytes:  # cast() refuses empty views
            self._fill([ref], [view.cast("B")], ref.offset_bytes + start)

    def read_all_into(self, pieces: Iterable[tuple[TensorRef, WriteableBuffer]]) -> None:
        """Fills a buffer with all of each tensor's bytes, as `read_into`; what adjoins is read at once."""
        for run in adjoining(pieces):
            refs, views = zip(*run, strict=True)
            self._fill(refs, views, refs[0].offset_bytes)

    def _fill(self, refs: Sequence[TensorRef], views: Sequence[memoryview], offset: int) -> None:
        name = self.files[refs[0].file].name
        if self.listing is not None and not self.is_here(name):
            data = memoryview(self.listing.read(name, offset, offset + sum(map(len, views))))
            for view in views:
                view[:], data = data[: len(view)], data[len(view) :]
            return
        try:
            with self._descriptors.using(name) as descriptor:
                reached = fill(descriptor, views, offset)
        except OSError as error:
            raise self._read_error(refs[0], "A file of the source cannot be read.", error.strerror) from error
        if reached < offset + sum(map(len, views)):
            ref = next(ref for ref in refs if ref.offset_bytes + ref.num_bytes > reached)
            what = "The file shrank since its header was read."
            raise self._read_error(ref, what, f"end of file at byte {reached}")

    def close(self) -> None:
        """Closes the files; no read may be under way, and none may follow."""
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_file(self, name: str) -> int:
        descriptor, before = open_regular(self.root / name), self.guard.look(name)
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            os.close(descriptor)
            raise InputError(
                "The file changed since its header was read.",
                where=str(self.root / name),
                expected=f"{before.st_size} bytes, mtime {before.st_mtime_ns} ns",
                found=f"{status.st_size} bytes, mtime {status.st_mtime_ns} ns",
                remedy=_KEEP,
            )
        return descriptor

    def _read_error(self, ref: TensorRef, what: str, found: object) -> InputError:
        where = f"{self.root / self.files[ref.file].name}, tensor {ref.name!r}"
        return InputError(what, where=where, found=found, remedy=_KEEP)


_KEEP = "Keep the checkpoint as it is during the conversion, and start again."
