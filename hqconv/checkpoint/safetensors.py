"""Reads and checks the header of a safetensors file; never the tensor bytes.

A file is 8 bytes (header length N, little-endian), N bytes of JSON, then the tensors without gaps
(https://github.com/huggingface/safetensors#format). What is accepted here the safetensors library accepts
too. Deliberately stricter than the library: a repeated key, a tensor entry with an unknown field and an
entry written as an array are refused, since what they mean is a guess.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import NamedTuple

from hqconv.errors import InputError
from hqconv.schemas.dtypes import DTYPE_NUM_BITS

MAX_HEADER_BYTES = 100_000_000  # the library's MAX_HEADER_SIZE
_LENGTH_BYTES = 8
_MAX_U64 = 2**64 - 1  # the library counts elements and bits in 64 bits
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_REMEDY = "download or copy the file again; if it is already the original, whatever wrote it is at fault"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxdict = 8


class HeaderEntry(NamedTuple):
    """One tensor: safetensors dtype code, shape, and its absolute byte range `[begin, end)` in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class RepeatedKey:
    """Stands for a JSON object that names the same key twice, so that the caller can say where it was."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"an object with the key {_SHORT.repr(self.key)} twice"


def keep_repeats(pairs: list[tuple[str, object]]) -> dict[str, object] | RepeatedKey:
    """`object_pairs_hook` for json that turns an object with a repeated key into a `RepeatedKey`."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return RepeatedKey(key)


def read_header(path: str | Path) -> tuple[dict[str, HeaderEntry], dict[str, str], str]:
    """Reads and checks one header: (tensors in the order of their bytes, metadata, sha256 of the header).

    The sha256 (hex) covers everything before the tensor bytes: the 8 length bytes and the JSON.
    Raises InputError, naming the file and the tensor, where the file breaks the format or cannot be read.
    """
    path = Path(path)
    prefix, raw, file_bytes = _read_raw(path)
    header = _parse(path, raw)
    metadata = _check_metadata(path, header.pop("__metadata__", None))
    data_begin = len(prefix) + len(raw)
    data_bytes = file_bytes - data_begin
    entries = [(name, _check_entry(path, name, value, data_bytes)) for name, value in header.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].end))
    _check_coverage(path, entries, data_bytes)
    # Up to here offsets count from the first tensor byte, as they do in the header.
    tensors = {
        name: HeaderEntry(dtype, shape, data_begin + begin, data_begin + end)
        for name, (dtype, shape, begin, end) in entries
    }
    return tensors, metadata, hashlib.sha256(prefix + raw).hexdigest()


def _fault(path: Path, tensor: str | None, what: str, expected: str = "", found: object = "") -> InputError:
    where = str(path) if tensor is None else f"{path}, tensor {tensor!r}"
    return InputError(what, where=where, expected=expected, found=found, remedy=_REMEDY)


def _read_raw(path: Path) -> tuple[bytes, bytes, int]:
    """The length bytes, the JSON bytes and the size of the file."""
    try:
        # A FIFO would block in open, and a device has no size.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _fault(path, None, "not a regular file", "a safetensors file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                what = "the file is truncated: shorter than its length field"
                raise _fault(path, None, what, f"{_LENGTH_BYTES} bytes or more", f"{len(prefix)} bytes")
            header_bytes = int.from_bytes(prefix, "little")
            _check_header_length(path, header_bytes, file_bytes)
            raw = file.read(header_bytes)
    except OSError as error:
        raise _fault(path, None, "the file cannot be read", found=error.strerror or error) from error
    if len(raw) != header_bytes:
        what = "the file shrank while its header was read"
        raise _fault(path, None, what, f"{header_bytes} header bytes", f"{len(raw)} bytes")
    return prefix, raw, file_bytes


def _check_header_length(path: Path, header_bytes: int, file_bytes: int) -> None:
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        what = "the header length is not plausible: is this a safetensors file?"
        raise _fault(path, None, what, f"1 to {MAX_HEADER_BYTES} bytes", f"{header_bytes} bytes")
    if header_bytes > file_bytes - _LENGTH_BYTES:
        what = "the file is truncated: it ends inside its header"
        raise _fault(path, None, what, f"{_LENGTH_BYTES + header_bytes} bytes or more", f"{file_bytes} bytes")


def _integer(text: str) -> int | float:
    # The library takes -0 for a float, so it is no dimension and no offset.
    return -0.0 if text == "-0" else int(text)


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=keep_repeats, parse_int=_integer)
        if b"\\u" in raw:  # only an escape can bring in half a surrogate pair, which no UTF-8 can hold
            json.dumps(header, ensure_ascii=False, default=repr).encode("utf-8")
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an endless number, too deep
        raise _fault(path, None, "the header is not valid JSON", found=error) from error
    if isinstance(header, RepeatedKey):
        tensor = None if header.key == "__metadata__" else header.key
        raise _fault(path, tensor, "the header names the same key twice", "unique names", header)
    if not isinstance(header, dict):
        what = "the header is not a JSON object"
        raise _fault(path, None, what, "an object of tensors", _SHORT.repr(header))
    return header


def _check_metadata(path: Path, raw: object) -> dict[str, str]:
    if raw is None:  # absent, or null as the library's Option allows
        return {}
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        what = "the header's __metadata__ is not a map from text to text"
        raise _fault(path, None, what, "an object of strings", _SHORT.repr(raw))
    return raw


def _check_entry(path: Path, name: str, raw: object, data_bytes: int) -> HeaderEntry:
    if not isinstance(raw, dict) or raw.keys() != _FIELDS:
        what = "the tensor's header entry is malformed"
        raise _fault(path, name, what, "exactly dtype, shape and data_offsets", _SHORT.repr(raw))
    dtype, shape = raw["dtype"], raw["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_NUM_BITS:
        what = "the tensor's dtype is unknown"
        raise _fault(path, name, what, "one of " + ", ".join(DTYPE_NUM_BITS), _SHORT.repr(dtype))
    # `type(x) is int`: JSON's true and false are ints to isinstance.
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        what = "the tensor's shape is malformed"
        raise _fault(path, name, what, "a list of non-negative integers", _SHORT.repr(shape))
    num_bytes = _num_bytes(path, name, dtype, shape)
    begin, end = _check_offsets(path, name, raw["data_offsets"], data_bytes)
    if end - begin != num_bytes:
        what, expected = "the tensor's shape and byte range disagree", f"{dtype} {_SHORT.repr(shape)}"
        found = f"{end - begin} bytes (data_offsets {begin} to {end})"
        raise _fault(path, name, what, f"{num_bytes} bytes for {expected}", found)
    return HeaderEntry(dtype, tuple(shape), begin, end)


def _num_bytes(path: Path, name: str, dtype: str, shape: list[int]) -> int:
    num_elements = 1
    for dim in shape:
        num_elements *= dim
        # Every step is bounded, as in the library: [2**32, 2**32, 0] overflows although its product is 0.
        if dim > _MAX_U64 or num_elements > _MAX_U64:
            raise _overflow(path, name, dtype, shape)
    num_bits = num_elements * DTYPE_NUM_BITS[dtype]
    if num_bits > _MAX_U64:
        raise _overflow(path, name, dtype, shape)
    if num_bits % 8:
        what, found = "the tensor does not fill whole bytes", f"{dtype} {_SHORT.repr(shape)}"
        raise _fault(path, name, what, "a multiple of 8 bits", found)
    return num_bits // 8


def _overflow(path: Path, name: str, dtype: str, shape: list[int]) -> InputError:
    what, found = "the tensor's size overflows 64 bits", f"{dtype} {_SHORT.repr(shape)}"
    return _fault(path, name, what, f"at most {_MAX_U64} bits", found)


def _check_offsets(path: Path, name: str, raw: object, data_bytes: int) -> tuple[int, int]:
    """The two offsets, counted from the first tensor byte, known to be ordered and inside the file."""
    if not isinstance(raw, list) or len(raw) != 2 or not all(type(offset) is int for offset in raw):
        what = "the tensor's data_offsets are malformed"
        raise _fault(path, name, what, "two integers [begin, end]", _SHORT.repr(raw))
    begin, end = raw
    if not 0 <= begin <= end:
        what = "the tensor's data_offsets are out of order"
        raise _fault(path, name, what, "0 <= begin <= end", _SHORT.repr(raw))
    if end > data_bytes:
        what, found = "the file is truncated: it ends before the tensor does", f"{data_bytes} bytes"
        raise _fault(path, name, what, f"{_SHORT.repr(end)} bytes of tensor data or more", found)
    return begin, end


def _check_coverage(path: Path, entries: list[tuple[str, HeaderEntry]], data_bytes: int) -> None:
    """Every byte after the header belongs to exactly one tensor; `entries` are sorted by their range."""
    position, previous = 0, "the header"
    for name, entry in entries:
        if entry.begin != position:
            gap = "overlaps" if entry.begin < position else "leaves a hole after"
            raise _fault(
                path, name, f"the tensor {gap} {previous}", f"begin {position}", f"begin {entry.begin}"
            )
        position, previous = entry.end, f"tensor {name!r}"
    if position != data_bytes:
        what, found = f"bytes after {previous} belong to no tensor", f"{data_bytes} bytes"
        raise _fault(path, None, what, f"{position} bytes of tensor data", found)
