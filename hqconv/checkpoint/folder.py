"""A source checkpoint: the files of a folder or a Hub repo, their headers, and reads into given buffers.

Which weights count is what transformers decides: `model.safetensors` if it is there, else the shards that
`model.safetensors.index.json` names. The index and the headers must then agree on every tensor, both ways.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hqconv.checkpoint import hub, index
from hqconv.checkpoint.descriptors import Descriptors
from hqconv.checkpoint.guard import Guard
from hqconv.checkpoint.loose import WEIGHT_FOLDERS, WEIGHT_SUFFIXES, Loose
from hqconv.checkpoint.naming import refuse_what_is_no_model
from hqconv.checkpoint.reading import adjoining, fill
from hqconv.checkpoint.safetensors import parse_header, read_header
from hqconv.errors import InputError, RequestError, first_few
from hqconv.schemas.artifact import CARD, CONFIG, INDEX, MANIFEST, SINGLE
from hqconv.schemas.regular import MAX_LIST_BYTES, open_regular
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_NUM_THREADS = 8  # hides the latency of networks and network file systems; the parsing itself holds the GIL
# All that is needed besides headers to look at a repo.
_WORDS = (CONFIG, *index.QUANTIZATION_FILES, INDEX, MANIFEST)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file: name relative to the root, and what tells that it is still the same file."""

    name: str
    size_bytes: int
    header_sha256: str
    mtime_ns: int


class Checkpoint:
    """An opened checkpoint; a context manager that closes the files `read_into` opened.

    root: the folder; name: its name or the repo's, without the organisation; repo_id, revision: Hub id and
    commit hash, None for a folder; config: config.json;
    quantization: its quantization_config or what stands for it; files: the weight files sorted by name; tensors: by
    file, then by offset; metadata: each file's `__metadata__`, in the order of files; index_sha256: of the
    index, None without one; loose: the files beside the weights; other_files: those that belong in an artifact
    verbatim, POSIX paths relative to root; total_bytes: of all tensors;
    listing: of a repo of which only the headers were read, else None; guard: of all files that are read.
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
        self.listing, self.guard = listing, Guard(root)
        index.check_regular(root)
        self.guard.look_if_there(name for name in _WORDS if name != INDEX or not self._has(SINGLE))
        self.config: dict[str, Any] = index.read_config(root)
        self.quantization = index.read_quantization(root, self.config)
        weight_map, self.index_sha256 = index.read_weight_map(root, self._has(SINGLE))
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        if weight_map is not None:
            self._check_present(weight_map)
        self.files, self.tensors, self.metadata = self._read_files(names)
        if weight_map is not None:
            index.check_weight_map(weight_map, self.tensors, tuple(file.name for file in self.files))
        self.guard.look_if_there([CARD])
        self.loose = Loose.of_folder(root) if listing is None else Loose.of_listing(listing.sizes)
        self.other_files = self.loose.names
        self.guard.look_if_there(self.other_files)
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())
        self._descriptors = Descriptors(self._open_file)

    @classmethod
    def open(cls, src: str, revision: str | None = None, *, headers_only: bool = False) -> Self:
        """Opens a local folder, or downloads (into the Hub cache) the repo `org/name` and opens that.

        With `headers_only` nothing of a repo is downloaded but its config, its index and the headers of its shards;
        `read_into` then refuses. HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token are the Hub library's business.
        Raises RequestError where there is no such folder, repo or revision, or no access to it; InputError where the
        files are broken, missing or contradict each other; NetworkError where the Hub fails.
        """
        path = Path(src)
        try:
            refuse_what_is_no_model(path)
            if src and path.is_dir():  # Path("") is the current folder
                if revision is not None:
                    what, remedy = "A local folder has no revisions.", "Leave the revision out."
                    raise RequestError(what, where=src, found=f"revision {revision}", remedy=remedy)
                return cls(path, name=path.resolve().name)
            if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", src, re.ASCII):
                what, expected = (
                    "The checkpoint cannot be opened.",
                    "a model folder or a Hub repo id (org/name)",
                )
                found = "neither a file nor a folder" if path.exists() else "no such path"
                raise RequestError(what, where=src, expected=expected, found=found)
            if headers_only:
                root, listing = _fetch_words(src, revision)
            else:
                root, listing = _download(src, revision), None
            return cls(root, name=src.split("/")[1], repo_id=src, revision=root.name, listing=listing)
        except OSError as error:  # from a look at a folder or a file; reading a file has messages of its own
            what, where = "The checkpoint cannot be read.", str(error.filename or src)
            raise InputError(
                what, where=where, found=error.strerror or error, remedy=index.COPY_AGAIN
            ) from error

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
                raise InputError(what, where=where, expected="one", found=both, remedy=index.COPY_AGAIN)
            tensors |= refs
        return tuple(file for file, _, _ in read), tensors, tuple(metadata for _, _, metadata in read)

    def _read_file(self, number: int, name: str) -> tuple[SourceFile, dict[str, TensorRef], dict[str, str]]:
        path = self.root / name
        if self.listing is not None and not path.is_file():
            size = self.listing.sizes[name]
            where, head = f"{self.repo_id}/{name}", self.listing.read_head(name)
            refs, metadata, sha256 = parse_header(where, head, size, number)
            return SourceFile(name, size, sha256, 0), refs, metadata
        status = self.guard.look(name)
        refs, metadata, sha256 = read_header(path, number)
        return SourceFile(name, status.st_size, sha256, status.st_mtime_ns), refs, metadata

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
        try:
            with self._descriptors.using(self.files[refs[0].file].name) as descriptor:
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
        file = next(file for file in self.files if file.name == name)
        if self.listing is not None and not (self.root / name).is_file():
            what, remedy = "Only the headers of this repo were read.", "Open it without `headers_only`."
            raise RequestError(what, where=f"{self.repo_id}/{name}", remedy=remedy)
        descriptor = open_regular(self.root / name)
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            os.close(descriptor)
            raise InputError(
                "The file changed since its header was read.",
                where=str(self.root / name),
                expected=f"{file.size_bytes} bytes, mtime {file.mtime_ns} ns",
                found=f"{status.st_size} bytes, mtime {status.st_mtime_ns} ns",
                remedy=_KEEP,
            )
        return descriptor

    def _read_error(self, ref: TensorRef, what: str, found: object) -> InputError:
        where = f"{self.root / self.files[ref.file].name}, tensor {ref.name!r}"
        return InputError(what, where=where, found=found, remedy=_KEEP)


_KEEP = "Keep the checkpoint as it is during the conversion, and start again."


# --- repos of the Hub ---------------------------------------------------------------------------------------


def _download(repo_id: str, revision: str | None) -> Path:
    """Brings what is needed into the Hub cache, in two steps: all but weights, then the weights by name."""
    other_weights = [suffix for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"]
    ignored = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES] + [
        f"*{suffix}.index.json" for suffix in other_weights
    ]
    ignored += [f"{folder}/*" for folder in WEIGHT_FOLDERS] + [".*", "*/.*"]
    root = hub.fetch(repo_id, revision, ignore_patterns=ignored)
    # Asked for along with the shards, as only the download tells whether it exists.
    names = {SINGLE, *_shards(root)}
    # By commit, as the branch may move between the steps.
    hub.fetch(repo_id, root.name, allow_patterns=_patterns(names))
    return root


def _shards(root: Path) -> Iterator[str]:
    """The shards that the index names, if there is one that names any."""
    if (root / INDEX).is_file():
        weight_map = index.read_json(root / INDEX, max_bytes=MAX_LIST_BYTES)[0].get("weight_map")
        yield from filter(index.is_plain_name, weight_map.values() if isinstance(weight_map, dict) else ())


def _patterns(names: Iterable[str]) -> list[str]:
    """Names as patterns that match nothing else."""
    return [glob.escape(name) for name in sorted(names)]


def _fetch_words(repo_id: str, revision: str | None) -> tuple[Path, hub.Listing | None]:
    """The JSON files of a repo in the Hub cache, and what else the repo holds; None where all its shards are cached."""
    root = hub.fetch(repo_id, revision, allow_patterns=_patterns(_WORDS))
    shards = set(_shards(root)) or {SINGLE}
    if all((root / name).is_file() for name in shards):
        return root, None
    return root, hub.Listing.of(repo_id, root.name)
