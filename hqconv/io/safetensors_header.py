"""Reads and checks the header of a safetensors file; never the tensor bytes.

A file is 8 bytes (header length N, little-endian), N bytes of JSON, then the tensors without gaps
(https://github.com/huggingface/safetensors#format). Everything accepted here is accepted by the safetensors library
too. Deliberately stricter than the library: a repeated key, a tensor entry with an unknown field and an
entry written as an array are refused, since their meaning is ambiguous.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import stat
from operator import attrgetter
from pathlib import Path
from typing import Any

from hqconv.errors import InputError
from hqconv.schemas.tensors import DTYPES, TensorRef, num_bits

MAX_HEADER_BYTES = 100_000_000  # the library's MAX_HEADER_SIZE
LENGTH_BYTES = 8
_MAX_U64 = 2**64 - 1  # the library counts elements and bits in 64 bits
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_INTEGER = frozenset((int,))
_REMEDY = (
    "Download or copy the file again; if it is already the original, whatever wrote it is at fault."
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxdict = 8


class RepeatedKey:
    """Marker for a JSON object that names the same key twice, so that the caller can name the place in its error."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"an object with the key {_SHORT.repr(self.key)} twice"


def keep_repeats(pairs: list[tuple[str, object]]) -> dict[str, object] | RepeatedKey:
    """`object_pairs_hook` for json that turns an object with a repeated key into a `RepeatedKey`."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return RepeatedKey(key)


def read_header(
    path: str | Path, file: int = 0
) -> tuple[dict[str, TensorRef], dict[str, str], str]:
    """Read and check one header; return (tensors in the order of their bytes, metadata, sha256 of the header).

    `file` is the file number of the returned refs. The sha256 (hex) covers everything before the tensor bytes: the 8
    length bytes and the JSON. Raises InputError, naming the file and the tensor, if the file breaks the format or
    cannot be read.
    """
    path = Path(path)
    head, file_bytes = _read_head(path)
    return parse_header(str(path), head, file_bytes, file)


def parse_header(
    where: str, head: bytes, file_bytes: int, file: int = 0
) -> tuple[dict[str, TensorRef], dict[str, str], str]:
    """Parse the bytes before a file's tensors, `head`, as `read_header` does; `where` names the file in errors."""
    header = _parse(where, head[LENGTH_BYTES:])
    metadata = _check_metadata(where, header.pop("__metadata__", None))
    # checked once, and kept once
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    refs = []
    start = len(head)
    data_bytes = file_bytes - len(head)
    for name, entry in header.items():
        key = _dtype_and_shape(where, name, entry)
        if key not in known:
            known[key] = *key, _num_bytes(where, name, *key)
        dtype, shape, num_bytes = known[key]
        begin, end = _check_offsets(where, name, entry["data_offsets"], data_bytes)
        if end - begin != num_bytes:
            expected = f"{num_bytes} bytes for {_tensor(*key)}"
            found = f"{end - begin} bytes (data_offsets {begin} to {end})"
            raise _fault(
                where, name, "The tensor's shape and byte range disagree.", expected, found
            )
        refs.append(TensorRef(name, dtype, shape, file, start + begin, num_bytes))
    refs.sort(key=attrgetter("offset_bytes", "num_bytes"))
    _check_coverage(where, refs, range(len(head), file_bytes))
    return {ref.name: ref for ref in refs}, metadata, hashlib.sha256(head).hexdigest()


def header_length(where: str, prefix: bytes, file_bytes: int) -> int:
    """Read the number of bytes before the tensors from a file's first eight. Raises InputError if implausible."""
    if len(prefix) < LENGTH_BYTES:
        what = "The file is truncated: it is shorter than its length field."
        raise _fault(where, None, what, f"{LENGTH_BYTES} bytes or more", f"{len(prefix)} bytes")
    # the first of a pointer's few lines
    if prefix[:LENGTH_BYTES] == b"version " and file_bytes < 1024:
        what = "This is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in the folder."
        raise _fault(where, None, what, "a safetensors file", f"{file_bytes} bytes of text")
    header_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        what = "The header length is not plausible: is this a safetensors file?"
        raise _fault(where, None, what, f"1 to {MAX_HEADER_BYTES} bytes", f"{header_bytes} bytes")
    if header_bytes > file_bytes - LENGTH_BYTES:
        what = "The file is truncated: it ends inside its header."
        raise _fault(
            where, None, what, f"{LENGTH_BYTES + header_bytes} bytes or more", f"{file_bytes} bytes"
        )
    return LENGTH_BYTES + header_bytes


def _fault(
    where: str, tensor: str | None, what: str, expected: str = "", found: object = ""
) -> InputError:
    place = where if tensor is None else f"{where}, tensor {tensor!r}"
    return InputError(what, where=place, expected=expected, found=found, remedy=_REMEDY)


def _read_head(path: Path) -> tuple[bytes, int]:
    """Read the bytes before the tensors; return them and the size of the file."""
    where = str(path)
    try:
        # A FIFO would block in open, and a device has no size.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _fault(where, None, "This is not a regular file.", "a safetensors file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(LENGTH_BYTES)
            head_bytes = header_length(where, prefix, file_bytes)
            return prefix + file.read(head_bytes - LENGTH_BYTES), file_bytes
    except OSError as error:
        raise _fault(
            where, None, "The file cannot be read.", found=error.strerror or error
        ) from error


def _parse(where: str, raw: bytes) -> dict[str, Any]:
    try:
        # a call for every number would double the time
        parse_int = _integer if b"-0" in raw else None
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=keep_repeats, parse_int=parse_int
        )
        # only an escape can bring in half a surrogate pair, which no UTF-8 can hold
        if b"\\u" in raw:
            json.dumps(header, ensure_ascii=False, default=repr).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # not UTF-8, not JSON, an endless number, too deep
        raise _fault(where, None, "The header is not valid JSON.", found=error) from error
    if isinstance(header, RepeatedKey):
        tensor = None if header.key == "__metadata__" else header.key
        raise _fault(where, tensor, "The header names the same key twice.", "unique names", header)
    if not isinstance(header, dict):
        raise _fault(
            where,
            None,
            "The header is not a JSON object.",
            "an object of tensors",
            _SHORT.repr(header),
        )
    return header


def _integer(text: str) -> int | float:
    # as the library parses it: no dimension, and no offset
    return -0.0 if text == "-0" else int(text)


def _check_metadata(where: str, raw: object) -> dict[str, str]:
    if raw is None:  # absent, or null as the library's Option allows
        return {}
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        what = "The header's __metadata__ is not a map from text to text."
        raise _fault(where, None, what, "an object of strings", _SHORT.repr(raw))
    return raw


def _dtype_and_shape(where: str, name: str, entry: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        what = "The tensor's header entry is malformed."
        raise _fault(where, name, what, "exactly dtype, shape and data_offsets", _SHORT.repr(entry))
    dtype = entry["dtype"]
    shape = entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _fault(
            where,
            name,
            "The tensor's dtype is unknown.",
            "one of " + ", ".join(DTYPES),
            _SHORT.repr(dtype),
        )
    # By type: JSON's true and false are ints to isinstance.
    if (
        not isinstance(shape, list)
        or not _INTEGER.issuperset(map(type, shape))
        or (shape and min(shape) < 0)
    ):
        what = "The tensor's shape is malformed."
        raise _fault(where, name, what, "a list of non-negative integers", _SHORT.repr(shape))
    return dtype, tuple(shape)


def _num_bytes(where: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    num_elements = 1
    for dim in (*shape, num_bits(dtype)):
        num_elements *= dim
        # Every step is bounded, as in the library: [2**32, 2**32, 0] overflows although its product is 0.
        if dim > _MAX_U64 or num_elements > _MAX_U64:
            what = "The tensor's size overflows 64 bits."
            raise _fault(where, name, what, f"at most {_MAX_U64} bits", _tensor(dtype, shape))
    if num_elements % 8:
        what = "The tensor does not fill whole bytes."
        raise _fault(where, name, what, "a multiple of 8 bits", _tensor(dtype, shape))
    return num_elements // 8


def _tensor(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {_SHORT.repr(list(shape))}"


def _check_offsets(where: str, name: str, raw: Any, data_bytes: int) -> tuple[int, int]:
    """Read the two offsets, counted from the first tensor byte; checked to be ordered and inside the file."""
    if not isinstance(raw, list) or len(raw) != 2 or not _INTEGER.issuperset(map(type, raw)):
        what = "The tensor's data_offsets are malformed."
        raise _fault(where, name, what, "two integers [begin, end]", _SHORT.repr(raw))
    begin, end = raw
    if not 0 <= begin <= end:
        what = "The tensor's data_offsets are out of order."
        raise _fault(where, name, what, "0 <= begin <= end", _SHORT.repr(raw))
    if end > data_bytes:
        what = "The file is truncated: it ends before the tensor does."
        expected = f"{_SHORT.repr(end)} bytes"
        raise _fault(where, name, what, f"{expected} of tensor data or more", f"{data_bytes} bytes")
    return begin, end


def _check_coverage(where: str, refs: list[TensorRef], data: range) -> None:
    """Check that every byte after the header belongs to exactly one tensor; `refs` are sorted by their range."""
    position = data.start
    previous = "the header"
    for ref in refs:
        if ref.offset_bytes != position:
            gap = "overlaps" if ref.offset_bytes < position else "leaves a hole after"
            expected = f"begin {position - data.start}"
            found = f"begin {ref.offset_bytes - data.start}"
            raise _fault(where, ref.name, f"The tensor {gap} {previous}.", expected, found)
        position = ref.offset_bytes + ref.num_bytes
        previous = f"tensor {ref.name!r}"
    if position != data.stop:
        what = f"Bytes after {previous} belong to no tensor."
        expected = f"{position - data.start} bytes of tensor data"
        raise _fault(where, None, what, expected, f"{len(data)} bytes")
