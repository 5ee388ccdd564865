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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hqconv.errors import InputError, RequestError
from hqconv.io.durable_files import source_errors
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import open_regular

MAX_HEADER_BYTES = 256 << 20  # tokenizers of a million words fit many times over
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ENTRIES = 1 << 10  # of an array: one per layer is returned, the words of a tokenizer are not
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_DIMS = 4  # GGML_MAX_DIMS
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_GIT_LFS = b"vers"  # first letters of a pointer that Git LFS leaves in place of a file
_REMEDY = (
    "Download or copy the file again; if it is already the original, whatever wrote it is at fault."
)
COPY_AGAIN = "Copy or download the GGUF files again; they must belong to this model."

Value = str | int | float | bool | list[int | float | bool]


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
    return InputError(
        "A tensor of a GGUF file has the wrong shape.",
        where=name,
        expected=expected,
        found=list(found),
        remedy=COPY_AGAIN,
    )


class Readable(Protocol):
    """A file that is read from its start on."""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; fewer at the end of the file."""


class GgufHeader(NamedTuple):
    """Header of a GGUF file.

    tensors: by name, in header order; a ref is named `<file>.gguf:<tensor>`, its dtype is the name of its ggml type.
    sha256: hex, of everything before the padding. metadata: key → value, without long arrays and arrays of texts.
    metadata_file: a GGUF file of all the metadata, without tensors.
    """

    tensors: dict[str, TensorRef]
    sha256: str
    metadata: dict[str, Value]
    metadata_file: bytes


def read_header(path: Path, file: int = 0) -> GgufHeader:
    """Read the header of a file, whose number `file` its refs get.

    Raises InputError if the file breaks the format, ends before a tensor does, or cannot be read; RequestError without
    the library.
    """
    with source_errors(path), open(open_regular(path), "rb") as opened:  # noqa: PTH123 - of a descriptor
        file_bytes = os.fstat(opened.fileno()).st_size
        return parse_header(str(path), path.name, opened, file_bytes, file)


def parse_header(
    where: str, name: str, opened: Readable, file_bytes: int, file: int = 0
) -> GgufHeader:
    """Read the header of an opened file of `file_bytes`; its refs' names begin with `name`. Raises as `read_header`."""
    reader = _HeaderReader(where, opened, file_bytes)
    num_tensors, num_pairs = reader.counts()
    metadata = reader.metadata(num_pairs)
    counts_at = len(_MAGIC) + 4
    metadata_file = reader.raw[:counts_at] + bytes(8) + reader.raw[counts_at + 8 :]
    infos = reader.infos(num_tensors)
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.fault("The file's alignment is not usable.", "a power of two", alignment)
    begin = -(-len(reader.raw) // alignment) * alignment
    tensors = {}
    for tensor, info in infos.items():
        full = f"{name}:{tensor}"
        dtype, num_bytes = _stored_form(full, info)
        offset = begin + info.offset_bytes
        if offset + num_bytes > file_bytes:
            raise InputError(
                "The file is truncated: it ends before the tensor does.",
                where=full,
                expected=f"{offset + num_bytes} bytes",
                found=f"{file_bytes} bytes",
                remedy=COPY_AGAIN,
            )
        tensors[tensor] = TensorRef(full, dtype, info.shape, file, offset, num_bytes)
    sha256 = hashlib.sha256(reader.raw).hexdigest()
    return GgufHeader(tensors, sha256, metadata, bytes(metadata_file))


class _TensorInfo(NamedTuple):
    """A tensor in a header. type_number: of ggml. shape: rows first. offset_bytes: from the end of the padding."""

    type_number: int
    shape: tuple[int, ...]
    offset_bytes: int


def _stored_form(full: str, info: _TensorInfo) -> tuple[str, int]:
    """Return the name of a tensor's ggml type and the tensor's size in bytes."""
    gguf = library()
    try:
        ggml_type = gguf.GGMLQuantizationType(info.type_number)
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        raise InputError(
            "A tensor has a type that the gguf library does not know.",
            where=full,
            expected="a type of ggml",
            found=f"type {info.type_number}",
            remedy="Use GGUF files of llama.cpp, or a newer gguf library.",
        ) from None
    if info.shape and info.shape[-1] % block_numbers:
        expected = f"rows of whole {ggml_type.name} blocks, {block_numbers} numbers each"
        raise wrong_shape(full, expected, info.shape)
    return ggml_type.name, math.prod(info.shape) // block_numbers * block_bytes


class _HeaderReader:
    """Reads a header from its start on. Every length is checked against the file's size before it is used.

    raw: the bytes that were read.
    """

    def __init__(self, where: str, file: Readable, file_bytes: int) -> None:
        self.raw = bytearray()
        self._where = where
        self._file = file
        self._end = min(file_bytes, MAX_HEADER_BYTES)

    def counts(self) -> tuple[int, int]:
        """Read magic and version; return the numbers of tensors and of key-value pairs."""
        magic = self._take(len(_MAGIC))
        if magic != _MAGIC:
            is_pointer = magic == _GIT_LFS
            remedy = "Run `git lfs pull` in the folder: it has pointers to files, not the files."
            raise self.fault(
                "This is not a GGUF file.",
                "the letters GGUF at its start",
                repr(magic),
                remedy if is_pointer else _REMEDY,
            )
        version = self._number(4)
        if version not in _VERSIONS:
            raise self.fault(
                "The GGUF version is not known.",
                "version 2 or 3, little-endian",
                version,
                "Convert the original model with a current llama.cpp, or use a newer hqconv.",
            )
        return self._number(8), self._number(8)

    def metadata(self, num_pairs: int) -> dict[str, Value]:
        """Read the key-value pairs; return those with short values."""
        values = {}
        for _ in range(num_pairs):
            key = self._text()
            value = self._value(self._number(4), 0)
            if value is not None:
                values[key] = value
        return values

    def infos(self, num_tensors: int) -> dict[str, _TensorInfo]:
        """Read type, shape and offset of every tensor, by name."""
        infos: dict[str, _TensorInfo] = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in infos:
                raise self.fault("The header names a tensor twice.", "unique names", name)
            num_dims = self._number(4)
            if num_dims > _MAX_DIMS:
                raise self.fault(
                    f"The tensor {name!r} has too many dimensions.",
                    f"at most {_MAX_DIMS}",
                    num_dims,
                )
            sizes = [self._number(8) for _ in range(num_dims)]
            infos[name] = _TensorInfo(self._number(4), tuple(reversed(sizes)), self._number(8))
        return infos

    def _value(self, kind: int, depth: int) -> Value | None:
        """Read a value; None for a long array and an array of texts or arrays."""
        if kind in _CODES:
            value: Value = self._scalars(_CODES[kind])[0]
            return value
        if kind == _STRING:
            return self._take(self._number(8)).decode("utf-8", "replace")
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self.fault("The header holds a value of an unknown type.", "types 0 to 12", kind)
        entry_kind = self._number(4)
        count = self._number(8)
        if entry_kind in _CODES and count <= _MAX_ENTRIES:
            return self._scalars(f"{count}{_CODES[entry_kind]}")
        if entry_kind in _CODES:
            self._take(struct.calcsize(f"<{_CODES[entry_kind]}") * count)
            return None
        for _ in range(count):
            if entry_kind == _STRING:
                self._take(self._number(8))
            else:
                self._value(entry_kind, depth + 1)
        return None

    def _scalars(self, codes: str) -> list[Any]:
        """Read values with the codes of `struct`."""
        return list(struct.unpack(f"<{codes}", self._take(struct.calcsize(f"<{codes}"))))

    def _text(self) -> str:
        raw = self._take(self._number(8))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault("A name in the header is not text.", "UTF-8", error) from None

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _take(self, num_bytes: int) -> bytes:
        """Read the next bytes; none before their number is known to be plausible."""
        reached = len(self.raw) + num_bytes
        if reached > self._end:
            found = f"{self._end} bytes that may be header"
            raise self.fault(
                "The file ends inside its header, or the header is not plausible.",
                f"{reached} bytes or more",
                found,
            )
        data = self._file.read(num_bytes)
        self.raw += data
        if len(data) != num_bytes:
            raise self.fault(
                "The file shrank while its header was read.", f"{num_bytes} bytes", len(data)
            )
        return data

    def fault(
        self, what: str, expected: object, found: object, remedy: str = _REMEDY
    ) -> InputError:
        """Return the error for a header that cannot be read."""
        return InputError(what, where=self._where, expected=expected, found=found, remedy=remedy)
