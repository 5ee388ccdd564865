"""A source checkpoint: the files of a folder or a Hub repo, their headers, and reads into given buffers.

Which weights count is what transformers decides: `model.safetensors` if it is there, else the shards that
`model.safetensors.index.json` names. The index and the headers must then agree on every tensor, both ways.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.checkpoint import hub
from hqconv.checkpoint.safetensors import HeaderEntry, RepeatedKey, keep_repeats, read_header
from hqconv.errors import InputError, RequestError
from hqconv.schemas.artifact import MANIFEST
from hqconv.schemas.families import text_config

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Weights in other formats (or the same ones once more, in original/): neither read, copied nor downloaded.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHT_FOLDERS = ("original", "onnx")
_NUM_THREADS = 8  # hides the latency of network file systems; the parsing itself holds the GIL
_COPY_AGAIN = "copy or download the checkpoint again"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where the bytes of one tensor are: `num_bytes` at `offset_bytes` of `Checkpoint.files[file]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One safetensors file: name relative to the root, and what tells that it is still the same file."""

    name: str
    size_bytes: int
    header_sha256: str
    mtime_ns: int


class Checkpoint:
    """An opened checkpoint; a context manager that closes the descriptors `read_into` opened.

    root: the folder; name: its name or the repo's, without the organisation; repo_id, revision: Hub id and
    commit hash, None for a folder; config: config.json;
    quantization: its quantization_config or what stands for it; files: the weight files sorted by name; tensors: by
    file, then by offset; metadata: each file's `__metadata__`, in the order of files; index_sha256: of the
    index, None without one; other_files: what belongs in an artifact verbatim, POSIX paths relative to root
    (a link to a folder is not followed); total_bytes: of all tensors.
    """

    def __init__(
        self, root: Path, *, name: str, repo_id: str | None = None, revision: str | None = None
    ) -> None:
        """Reads and checks config, index and headers of the folder `root`; see `open`."""
        self.root, self.name, self.repo_id, self.revision = root, name, repo_id, revision
        self.config: dict[str, Any] = _read_config(root)
        self.quantization = _read_quantization(root, self.config)
        weight_map, self.index_sha256 = _read_weight_map(root)
        names = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        self.files, headers, self.metadata = _read_files(root, names)
        self.tensors = _collect_tensors(self.files, headers)
        if weight_map is not None:
            _check_weight_map(weight_map, self.tensors, self.files)
        self.other_files = tuple(sorted(_other_files(root)))
        self.total_bytes = sum(ref.num_bytes for ref in self.tensors.values())
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, src: str, revision: str | None = None) -> Checkpoint:
        """Opens a local folder, or downloads (into the Hub cache) the repo `org/name` and opens that.

        HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the token are the Hub library's business. Raises RequestError
        where there is no such folder, repo or revision, or no access to it; InputError where the files are
        broken, missing or contradict each other.
        """
        path = Path(src)
        try:
            if src and path.is_dir():  # Path("") is the current folder
                if revision is not None:
                    what, remedy = "a local folder has no revisions", "leave the revision out"
                    raise RequestError(what, where=src, found=f"revision {revision}", remedy=remedy)
                return cls(path, name=path.resolve().name)
            if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", src, re.ASCII):
                what, expected = "cannot open the checkpoint", "a model folder or a Hub repo id (org/name)"
                found = "a file" if path.exists() else "no such path"
                raise RequestError(what, where=src, expected=expected, found=found)
            root = _download(src, revision)
            return cls(root, name=src.split("/")[1], repo_id=src, revision=root.name)
        except OSError as error:  # from a look at a folder or a file; reading a file has messages of its own
            what, where = "the checkpoint cannot be read", str(error.filename or src)
            raise InputError(what, where=where, found=error.strerror or error, remedy=_COPY_AGAIN) from error

    def read_into(self, ref: TensorRef, buffer: WriteableBuffer, start: int = 0) -> None:
        """Fills all of `buffer` (C-contiguous) with the tensor's bytes from byte `start` on; any thread may.

        Raises ValueError for a range outside the tensor; InputError if the file changed since its header was
        read, ends too early, or cannot be read.
        """
        view = memoryview(buffer)
        if start < 0 or start + view.nbytes > ref.num_bytes:
            raise ValueError(f"{ref.name}: bytes {start} + {view.nbytes} are outside of {ref.num_bytes}")
        if not view.nbytes:  # cast() refuses empty views
            return
        view = view.cast("B")
        descriptor = self._descriptor(ref)
        offset = ref.offset_bytes + start
        while view:  # one call reads 2 GiB at most, and any call may return less than asked
            try:
                num_read = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise self._read_error(ref, "the file cannot be read", error.strerror) from error
            if not num_read:
                found = f"end of file at byte {offset}"
                raise self._read_error(ref, "the file shrank since its header was read", found)
            view, offset = view[num_read:], offset + num_read

    def close(self) -> None:
        """Closes the files; no read may be under way, and none may follow."""
        with self._lock:
            self._closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self, ref: TensorRef) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("read from a closed checkpoint")
            if ref.file not in self._descriptors:
                self._descriptors[ref.file] = self._open_file(ref)
            return self._descriptors[ref.file]

    def _open_file(self, ref: TensorRef) -> int:
        file = self.files[ref.file]
        try:
            descriptor = os.open(self.root / file.name, os.O_RDONLY | os.O_CLOEXEC)
            status = os.fstat(descriptor)
        except OSError as error:
            raise self._read_error(ref, "the file cannot be opened", error.strerror) from error
        if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            os.close(descriptor)
            found = f"{status.st_size} bytes, mtime {status.st_mtime_ns} ns"
            expected = f"{file.size_bytes} bytes, mtime {file.mtime_ns} ns"
            raise self._read_error(ref, "the file changed since its header was read", found, expected)
        return descriptor

    def _read_error(self, ref: TensorRef, what: str, found: object, expected: object = "") -> InputError:
        where = f"{self.root / self.files[ref.file].name}, tensor {ref.name!r}"
        remedy = "keep the checkpoint as it is during the conversion, and start again"
        return InputError(what, where=where, expected=expected, found=found, remedy=remedy)


def _read_json(path: Path, hook: Any = None) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a file, and the file's bytes."""
    found: object
    try:
        raw = path.read_bytes()
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
    except OSError as error:
        what, found = "a file of the checkpoint cannot be read", error.strerror
        raise InputError(what, where=str(path), found=found, remedy=_COPY_AGAIN) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too deep
        what = "a file of the checkpoint is not valid JSON"
        raise InputError(what, where=str(path), found=error, remedy=_COPY_AGAIN) from error
    if not isinstance(value, dict):
        found = value if isinstance(value, RepeatedKey) else type(value).__name__
        what, expected = "a file of the checkpoint is not a JSON object", "an object with unique keys"
        raise InputError(what, where=str(path), expected=expected, found=found, remedy=_COPY_AGAIN)
    return value, raw


def _read_config(root: Path) -> dict[str, Any]:
    if not (root / CONFIG_NAME).is_file():
        what, remedy = f"the checkpoint has no {CONFIG_NAME}", "give the folder of a transformers model"
        raise InputError(what, where=str(root), found=_listing(root), remedy=remedy)
    return _read_json(root / CONFIG_NAME)[0]


def _read_quantization(root: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The config's quantization_config, else ModelOpt's file of its own; None where there is neither."""
    for words in (config, text_config(config)):
        found = words.get("quantization_config")
        if isinstance(found, dict):
            return dict(found)
        if found is not None:
            what, where = "the checkpoint's quantization config is not an object", "quantization_config"
            remedy = f"restore it in {CONFIG_NAME}; leave it out where nothing is quantized"
            raise InputError(
                what, where=where, expected="an object or null", found=repr(found), remedy=remedy
            )
    path = root / HF_QUANT_CONFIG_NAME
    return _read_json(path)[0] if path.is_file() else None


def _listing(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    return (
        ", ".join(names[:20]) + (f", … {len(names)} in all" if len(names) > 20 else "") or "an empty folder"
    )


def _read_weight_map(root: Path) -> tuple[dict[str, str] | None, str | None]:
    """The index's weight map, checked in itself, and the index's sha256; two None without an index in use."""
    if (root / SINGLE_NAME).is_file():  # before the index: transformers' _get_resolved_checkpoint_files
        return None, None
    path = root / INDEX_NAME
    if not path.is_file():
        what, expected = "the folder holds no safetensors checkpoint", f"{SINGLE_NAME} or {INDEX_NAME}"
        remedy = "convert other weight formats to safetensors first"
        raise InputError(what, where=str(root), expected=expected, found=_listing(root), remedy=remedy)
    index, raw = _read_json(path, keep_repeats)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what, expected = "the index has no usable weight_map", "an object of tensor names with unique keys"
        found = repr(weight_map) if isinstance(weight_map, RepeatedKey) else type(weight_map).__name__
        raise InputError(what, where=str(path), expected=expected, found=found, remedy=_COPY_AGAIN)
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            where, expected = f"{path}, tensor {tensor!r}", "a .safetensors file inside the folder"
            what = "the index names a file that cannot be a shard"
            raise InputError(what, where=where, expected=expected, found=repr(name), remedy=_COPY_AGAIN)
    _check_present(root, weight_map)
    return weight_map, hashlib.sha256(raw).hexdigest()


def _is_plain_name(name: object) -> bool:
    """A path downwards in its one spelling, so that no file is read twice or from outside the folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable():
        return False
    return "\\" not in name and not {"", ".", ".."}.intersection(name.split("/"))


def _check_present(root: Path, weight_map: dict[str, str]) -> None:
    tensor_of = {name: tensor for tensor, name in reversed(weight_map.items())}
    missing = sorted(name for name in tensor_of if not (root / name).is_file())
    if missing:
        what = f"{len(missing)} of the {len(tensor_of)} shards the index names are missing: {_some(missing)}"
        where = f"{root}, tensor {tensor_of[missing[0]]!r} and others"
        raise InputError(what, where=where, remedy="copy or download the missing files")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … {len(names)} in all" if len(names) > 5 else "")


_Headers = tuple[dict[str, HeaderEntry], ...]


def _read_files(
    root: Path, names: list[str]
) -> tuple[tuple[SourceFile, ...], _Headers, tuple[dict[str, str], ...]]:
    def read(name: str) -> tuple[SourceFile, dict[str, HeaderEntry], dict[str, str]]:
        path = root / name
        status = path.stat()
        header, metadata, sha256 = read_header(path)
        return SourceFile(name, status.st_size, sha256, status.st_mtime_ns), header, metadata

    with ThreadPoolExecutor(min(_NUM_THREADS, len(names))) as pool:
        files, headers, metadata = zip(*pool.map(read, names), strict=True)
    return files, headers, metadata


def _collect_tensors(files: tuple[SourceFile, ...], headers: _Headers) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for number, header in enumerate(headers):
        for name, (dtype, shape, begin, end) in header.items():
            if name in tensors:
                both = f"{files[tensors[name].file].name} and {files[number].name}"
                what = "a tensor is in two files"
                raise InputError(
                    what, where=f"tensor {name!r}", expected="one", found=both, remedy=_COPY_AGAIN
                )
            tensors[name] = TensorRef(name, dtype, shape, number, begin, end - begin)
    return tensors


def _check_weight_map(
    weight_map: dict[str, str], tensors: dict[str, TensorRef], files: tuple[SourceFile, ...]
) -> None:
    """The index and the headers name the same tensors in the same files."""
    for name, file in weight_map.items():
        ref = tensors.get(name)
        if ref is None or files[ref.file].name != file:
            what, found = (
                "a tensor is not where the index says",
                files[ref.file].name if ref else "in no file",
            )
            where = f"{INDEX_NAME}, tensor {name!r}"
            raise InputError(what, where=where, expected=file, found=found, remedy=_COPY_AGAIN)
    if len(tensors) > len(weight_map):
        lost = [f"{name} ({files[ref.file].name})" for name, ref in tensors.items() if name not in weight_map]
        what = f"{len(lost)} tensors are in the files but not in the index"
        raise InputError(what, where=INDEX_NAME, found=_some(lost), remedy=_COPY_AGAIN)


def _other_files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(
        root, onerror=_raise
    ):  # by itself it passes over what it cannot read
        relative = Path(folder).relative_to(root)
        top = relative == Path()
        folders[:] = [name for name in folders if name[0] != "." and not (top and name in WEIGHT_FOLDERS)]
        for name in names:
            skipped = name[0] == "." or name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
            if skipped or (top and name in (CONFIG_NAME, MANIFEST)):  # an artifact may be a source
                continue
            if not (root / relative / name).is_file():
                what, where = "not a file, or a link to nothing", str(root / relative / name)
                raise InputError(what, where=where, remedy=_COPY_AGAIN)
            yield (relative / name).as_posix()


def _raise(error: OSError) -> None:
    raise error


def _download(repo_id: str, revision: str | None) -> Path:
    """Brings what is needed into the Hub cache, in two steps: all but weights, then the weights by name."""
    other_weights = [suffix for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"]
    ignored = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES] + [
        f"*{suffix}.index.json" for suffix in other_weights
    ]
    ignored += [f"{folder}/*" for folder in WEIGHT_FOLDERS] + [".*", "*/.*"]
    root = hub.fetch(repo_id, revision, ignore_patterns=ignored)
    # Asked for along with the shards, as only the download tells whether it exists.
    names = {SINGLE_NAME}
    if (root / INDEX_NAME).is_file():
        weight_map = _read_json(root / INDEX_NAME)[0].get("weight_map")
        names.update(filter(_is_plain_name, weight_map.values() if isinstance(weight_map, dict) else ()))
    # Escaped, as these are names and not patterns; by commit, as the branch may move between the steps.
    hub.fetch(repo_id, root.name, allow_patterns=[glob.escape(name) for name in sorted(names)])
    return root
