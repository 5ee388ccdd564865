"""Reads the header of a GGUF file: its metadata, and types, shapes and offsets of its tensors; never the tensor bytes.

A file is magic, version, counts, key-value pairs, tensor infos, padding, then the tensors, all little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The gguf library maps whole files instead, keeps every
token of a tokenizer, and names no tensor when it fails; it is used only for its table of types and its decoders.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hqconv.errors import InputError, RequestError
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import open_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HEADER_BYTES = 256 << 20  # tokenizers of a million words fit many times over
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32 = 4
_MAX_KEPT = 1 << 10  # entries of an array: one per layer is kept, the words of a tokenizer are not
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_DIMS = 4  # GGML_MAX_DIMS
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32
_ANEW = "Convert the original model to GGUF with a current llama.cpp, or convert its safetensors."
# First letters of other files: of llama.cpp in 2023 (ggml, ggmf, ggjt), and of a Git LFS pointer.
_OTHER_FILES = {
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), _ANEW),
    b"vers": "Run `git lfs pull` in the folder: this is a pointer to the file, not the file.",
}
_NEWER = "Use a newer hqconv, or GGUF files that llama.cpp wrote for one of these versions."
_REMEDY = (
    "Download or copy the file again; if it is already the original, whatever wrote it is at fault."
)
COPY_AGAIN = "Copy or download the GGUF files again; they must belong to this model."

Value = str | int | float | bool | list[int | float | bool]
_Info = tuple[
    int, tuple[int, ...], int
]  # the ggml type's number, the shape (rows first), the byte it begins at


def holds_gguf(folder: Path) -> bool:
    """Return True if a folder contains GGUF files."""
    return folder.is_dir() and any(folder.glob("*.gguf"))


def library() -> Any:
    """Import the gguf package. Raises RequestError if it is not installed."""
    try:
        import gguf
        import gguf.quants
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise RequestError(
            "Reading experts from GGUF files needs the gguf library, which is not installed.",
            remedy="Run: pip install 'gguf>=0.17'.",
        ) from None
    return gguf


def wrong_shape(name: str, expected: str, found: tuple[int, ...]) -> InputError:
    """Return the error for a tensor whose size differs from the expected one."""
    what = "A tensor of a GGUF file has the wrong shape."
    return InputError(what, where=name, expected=expected, found=list(found), remedy=COPY_AGAIN)


class Readable(Protocol):
    """A file that is read from its start on."""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        ...


class GgufHeader(NamedTuple):
    """Header of a GGUF file.

    tensors: by name, in header order; a ref is named `<file>.gguf:<tensor>`, its dtype is the name of its ggml type.
    sha256: hex, of everything before the padding. metadata: key → value, without long arrays and arrays of texts.
    """

    tensors: dict[str, TensorRef]
    sha256: str
    metadata: dict[str, Value]


@dataclass(frozen=True)
class StoredModel:
    """A whole model in GGUF files as they hold it: metadata, tensors by their GGUF names, and their bytes.

    read: fill a buffer with a tensor's bytes from byte `start` on. has_config: config.json is the publisher's.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorRef]
    read: Callable[[TensorRef, WriteableBuffer, int], None]
    has_config: bool


def read_header(path: Path, file: int = 0) -> GgufHeader:
    """Read the header of a file, whose number `file` its refs get.

    Raises InputError if the file breaks the format, ends before a tensor does, or cannot be read; RequestError without
    the library.
    """
    try:
        with open(open_regular(path), "rb") as opened:  # noqa: PTH123 - of a descriptor
            return parse_header(
                str(path), path.name, opened, os.fstat(opened.fileno()).st_size, file
            )
    except OSError as error:
        raise InputError(
            "The file cannot be read.",
            where=str(path),
            found=(error.strerror or error),
            remedy=_REMEDY,
        ) from error


def parse_header(
    where: str, name: str, opened: Readable, file_bytes: int, file: int = 0
) -> GgufHeader:
    """Read the header of an opened file of `file_bytes`; its refs' names begin with `name`. Raises as `read_header`."""
    infos, sha256, metadata = _Header(where, opened, file_bytes).read()
    refs = {
        tensor: _ref(f"{name}:{tensor}", info, file, file_bytes) for tensor, info in infos.items()
    }
    return GgufHeader(refs, sha256, metadata)


def metadata_alone(where: str, opened: Readable, file_bytes: int) -> tuple[bytes, str]:
    """Return a GGUF file with the metadata of an opened one and no tensors, and the SHA-256 of the opened one's header.

    Raises InputError as `read_header`.
    """
    header = _Header(where, opened, file_bytes)
    header.kept = bytearray()
    _, sha256, _ = header.read()
    counts = 8  # magic and version; then 8 bytes with the number of tensors
    return bytes(
        header.kept[:counts] + bytes(8) + header.kept[counts + 8 : header.metadata_end]
    ), sha256


def _ref(full: str, info: _Info, file: int, file_bytes: int) -> TensorRef:
    """Build a tensor's byte range, checked against its type and the file's length."""
    gguf, (type_number, shape, offset) = library(), info
    try:
        kind = gguf.GGMLQuantizationType(type_number)
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        what, expected = (
            "A tensor has a type that the gguf library does not know.",
            "a type of ggml",
        )
        found, remedy = (
            f"type {type_number}",
            "Use GGUF files of llama.cpp, or a newer gguf library.",
        )
        raise InputError(what, where=full, expected=expected, found=found, remedy=remedy) from None
    if shape and shape[-1] % block_numbers:
        expected = f"rows of whole {kind.name} blocks, {block_numbers} numbers each"
        raise wrong_shape(full, expected, shape)
    num_bytes = math.prod(shape) // block_numbers * block_bytes
    if offset + num_bytes > file_bytes:
        what, found = (
            "The file is truncated: it ends before the tensor does.",
            f"{file_bytes} bytes",
        )
        expected = f"{offset + num_bytes} bytes"
        raise InputError(what, where=full, expected=expected, found=found, remedy=COPY_AGAIN)
    return TensorRef(full, kind.name, shape, file, offset, num_bytes)


class _Header:
    """Reading position in a header. Every length is checked against the file's size before it is used."""

    def __init__(self, where: str, file: Readable, file_bytes: int) -> None:
        self.where, self.file = where, file
        self.file_bytes = file_bytes
        self.end = min(self.file_bytes, MAX_HEADER_BYTES)
        self.position = 0
        self.tensor = ""
        self.digest = hashlib.sha256()
        self.kept: bytearray | None = None  # all bytes that were read, if wanted
        self.metadata_end = 0

    def read(self) -> tuple[dict[str, _Info], str, dict[str, Value]]:
        """Read every tensor's info, the sha256 of the whole header, and the metadata."""
        if (magic := self._take(len(_MAGIC))) != _MAGIC:
            remedy = _OTHER_FILES.get(magic, _REMEDY)
            raise self._fault(
                "This is not a GGUF file.", "the letters GGUF at its start", repr(magic), remedy
            )
        version = self._number(4)
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
            raise self._fault(
                "The GGUF file is big-endian.",
                "a little-endian file",
                "a file for s390x or another big-endian machine",
                "Run `gguf-convert-endian FILE little` of the gguf package on a copy, or take a little-endian file.",
            )
        if version not in _VERSIONS:
            expected = "version " + " or ".join(map(str, _VERSIONS))
            raise self._fault(
                "The GGUF version is not known.",
                expected,
                version,
                _ANEW if version == 1 else _NEWER,
            )
        num_tensors, num_pairs = self._number(8), self._number(8)
        alignment = _DEFAULT_ALIGNMENT
        metadata: dict[str, Value] = {}
        for _ in range(num_pairs):
            key, kind = self._text(), self._number(4)
            value = self._value(kind, 0)
            if key == _ALIGNMENT_KEY:
                alignment = self._alignment(kind, value)
            if value is not None:
                metadata[key] = value
        self.metadata_end = self.position
        infos: dict[str, _Info] = {}
        for _ in range(num_tensors):
            name, info = self._info()
            if name in infos:
                raise self._fault("The header names a tensor twice.", "unique names", name)
            infos[name] = info
        begin = -(-self.position // alignment) * alignment
        tensors = {
            name: (kind, shape, begin + offset) for name, (kind, shape, offset) in infos.items()
        }
        return tensors, self.digest.hexdigest(), metadata

    def _alignment(self, kind: int, value: Value | None) -> int:
        number = value if kind == _UINT32 and isinstance(value, int) else 0
        if number < 1 or number & (number - 1):
            raise self._fault(
                "The file's alignment is not usable.", "a power of two as uint32", number
            )
        return number

    def _value(self, kind: int, depth: int) -> Value | None:
        """Read a value; None for an array that is not kept."""
        if kind in _SCALAR_BYTES:
            raw = self._take(_SCALAR_BYTES[kind])
            return bool(raw[0]) if kind == _BOOL else struct.unpack(f"<{_CODES[kind]}", raw)[0]
        if kind == _STRING:
            return self._take(self._number(8)).decode("utf-8", "replace")
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self._fault("The header holds a value of an unknown type.", "types 0 to 12", kind)
        of, count = self._number(4), self._number(8)
        if of in _SCALAR_BYTES:
            raw = self._take(_SCALAR_BYTES[of] * count)
            return list(struct.unpack(f"<{count}{_CODES[of]}", raw)) if count <= _MAX_KEPT else None
        for _ in range(count):
            if of == _STRING:
                self._take(self._number(8))
            else:
                self._value(of, depth + 1)
        return None

    def _info(self) -> tuple[str, _Info]:
        self.tensor = self._text()
        num_dims = self._number(4)
        if num_dims > _MAX_DIMS:
            raise self._fault(
                "The tensor has too many dimensions.", f"at most {_MAX_DIMS}", num_dims
            )
        sizes = [self._number(8) for _ in range(num_dims)]
        info = self._number(4), tuple(reversed(sizes)), self._number(8)
        name, self.tensor = self.tensor, ""
        return name, info

    def _text(self) -> str:
        raw = self._take(self._number(8))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault("A name in the header is not text.", "UTF-8", error) from None

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self.end - self.position:
            what = "The file ends inside its header, or the header is not plausible."
            found = f"{self.end} bytes that may be header"
            raise self._fault(what, f"{self.position + num_bytes} bytes or more", found)
        raw = self.file.read(num_bytes)
        self.position += num_bytes
        self.digest.update(raw)
        if self.kept is not None:
            self.kept += raw
        if len(raw) != num_bytes:
            raise self._fault(
                "The file shrank while its header was read.", f"{num_bytes} bytes", len(raw)
            )
        return raw

    def _fault(
        self, what: str, expected: object, found: object, remedy: str = _REMEDY
    ) -> InputError:
        where = f"{self.where}, tensor {self.tensor!r}" if self.tensor else self.where
        return InputError(what, where=where, expected=expected, found=found, remedy=remedy)
