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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hqconv.errors import InputError
from hqconv.schemas.dtypes import DTYPES, num_bits
from hqconv.schemas.tensors import TensorRef

MAX_HEADER_BYTES = 100_000_000  # the library's MAX_HEADER_SIZE
LENGTH_BYTES = 8
_POINTER, _MAX_POINTER_BYTES = (b"version ", 1024)  # of Git LFS: some lines of text, of which this is the first word
_MAX_U64 = 2**64 - 1  # the library counts elements and bits in 64 bits
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_REMEDY = "Download or copy the file again; if it is already the original, whatever wrote it is at fault."

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
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return RepeatedKey(key)


def read_header(path: str | Path, file: int = 0) -> tuple[dict[str, TensorRef], dict[str, str], str]:
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
    raw = head[LENGTH_BYTES:]
    data = range(len(head), file_bytes)
    refs, metadata = _usual(where, raw, data, file) or _any(where, raw, data, file)
    return {ref.name: ref for ref in refs}, metadata, hashlib.sha256(head).hexdigest()


def _any(where: str, raw: bytes, data: range, file: int) -> tuple[list[TensorRef], dict[str, str]]:
    """Parse a header and check every value separately: slow, with an exact error message."""
    header = _parse(where, raw)
    _check_names(where, header)
    metadata = _check_metadata(where, header.pop("__metadata__", None))
    refs = [_check_entry(where, name, value, data, file) for name, value in header.items()]
    refs.sort(key=lambda ref: (ref.offset_bytes, ref.num_bytes))
    _check_coverage(where, refs, data)
    return refs, metadata


# Triggers of the slow path: escapes hide colons, and true, false and -0 pass for numbers.
_UNUSUAL = (b"\\", b"true", b"false", b"-0")


def _usual(where: str, raw: bytes, data: range, file: int) -> tuple[list[TensorRef], dict[str, str]] | None:
    """Parse a header in the common form, tensors in the order of their bytes; None if anything might be wrong.

    The parser keeps the last of several equal keys. Every key has a colon after it: if the text has no more colons than
    the parsed keys and the texts of these keys, then no key was lost. The three fields of each entry are read by name,
    so that a fourth field would be one colon too many.
    """
    if any(text in raw for text in _UNUSUAL):
        return None
    try:
        header = json.loads(raw.decode("utf-8"), parse_float=_refuse, parse_constant=_refuse)
        num_colons = len(header) + "".join(header).count(":")
        metadata = _check_metadata(where, header.pop("__metadata__", None))
        num_colons += len(metadata) + "".join((*metadata, *metadata.values())).count(":")
        if num_colons + len(_FIELDS) * len(header) != raw.count(b":"):
            return None
        refs = _in_order(where, header, data, file)
    except (AttributeError, TypeError, ValueError, KeyError, RecursionError, InputError):
        return None
    return None if refs is None else (refs, metadata)


def _refuse(text: str) -> object:
    raise ValueError(text)


def _in_order(where: str, header: dict[str, dict[str, Any]], data: range, file: int) -> list[TensorRef] | None:
    """Return tensors that follow one another and fill the file; None for any other layout.

    Each dtype and shape is checked once, which spares time, and kept once, which spares memory.
    """
    refs: list[TensorRef] = []
    known: dict[tuple[object, ...], tuple[str, tuple[int, ...], int]] = {}
    start, position = data.start, 0
    for name, entry in header.items():
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
        if type(shape) is not list or begin != position:
            return None
        key = (entry["dtype"], *shape)
        if key not in known:
            ref = _check_entry(where, name, entry, data, file)
            known[key] = (ref.dtype, ref.shape, ref.num_bytes)
        dtype, dims, num_bytes = known[key]
        if end - begin != num_bytes:
            return None
        refs.append(TensorRef(name, dtype, dims, file, start + begin, num_bytes))
        position = end
    return refs if position == len(data) else None


def _check_names(where: str, names: Iterable[str]) -> None:
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise _fault(where, None, "The name of a tensor is no valid Unicode.") from None


def header_length(where: str, prefix: bytes, file_bytes: int) -> int:
    """Read the number of bytes before the tensors from a file's first eight. Raises InputError if implausible."""
    if len(prefix) < LENGTH_BYTES:
        what = "The file is truncated: it is shorter than its length field."
        raise _fault(where, None, what, f"{LENGTH_BYTES} bytes or more", f"{len(prefix)} bytes")
    if prefix[:LENGTH_BYTES] == b"version " and file_bytes < 1024:
        what = "This is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in the folder."
        raise _fault(where, None, what, "a safetensors file", f"{file_bytes} bytes of text")
    header_bytes = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        what = "The header length is not plausible: is this a safetensors file?"
        raise _fault(where, None, what, f"1 to {MAX_HEADER_BYTES} bytes", f"{header_bytes} bytes")
    if header_bytes > file_bytes - LENGTH_BYTES:
        what = "The file is truncated: it ends inside its header."
        raise _fault(where, None, what, f"{LENGTH_BYTES + header_bytes} bytes or more", f"{file_bytes} bytes")
    return LENGTH_BYTES + header_bytes


def _fault(where: str, tensor: str | None, what: str, expected: str = "", found: object = "") -> InputError:
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
            head = prefix + file.read(head_bytes - LENGTH_BYTES)
    except OSError as error:
        raise _fault(where, None, "The file cannot be read.", found=error.strerror or error) from error
    if len(head) != head_bytes:
        what = "The file shrank while its header was read."
        raise _fault(where, None, what, f"{head_bytes} header bytes", f"{len(head)} bytes")
    return head, file_bytes


def _integer(text: str) -> int | float:
    # The library parses -0 as a float, so it is no dimension and no offset.
    return -0.0 if text == "-0" else int(text)


def _parse(where: str, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=keep_repeats, parse_int=_integer)
        if b"\\u" in raw:  # only an escape can bring in half a surrogate pair, which no UTF-8 can hold
            json.dumps(header, ensure_ascii=False, default=repr).encode("utf-8")
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an endless number, too deep
        raise _fault(where, None, "The header is not valid JSON.", found=error) from error
    if isinstance(header, RepeatedKey):
        tensor = None if header.key == "__metadata__" else header.key
        raise _fault(where, tensor, "The header names the same key twice.", "unique names", header)
    if not isinstance(header, dict):
        what = "The header is not a JSON object."
        raise _fault(where, None, what, "an object of tensors", _SHORT.repr(header))
    return header


def _check_metadata(where: str, raw: object) -> dict[str, str]:
    if raw is None:  # absent, or null as the library's Option allows
        return {}
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        what = "The header's __metadata__ is not a map from text to text."
        raise _fault(where, None, what, "an object of strings", _SHORT.repr(raw))
    return raw


def _check_entry(where: str, name: str, raw: object, data: range, file: int) -> TensorRef:
    if not isinstance(raw, dict) or raw.keys() != _FIELDS:
        what = "The tensor's header entry is malformed."
        raise _fault(where, name, what, "exactly dtype, shape and data_offsets", _SHORT.repr(raw))
    dtype, shape = raw["dtype"], raw["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        what = "The tensor's dtype is unknown."
        raise _fault(where, name, what, "one of " + ", ".join(DTYPES), _SHORT.repr(dtype))
    # `type(x) is int`: JSON's true and false are ints to isinstance.
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        what = "The tensor's shape is malformed."
        raise _fault(where, name, what, "a list of non-negative integers", _SHORT.repr(shape))
    num_bytes = _num_bytes(where, name, dtype, shape)
    begin, end = _check_offsets(where, name, raw["data_offsets"], len(data))
    if end - begin != num_bytes:
        what, expected = "The tensor's shape and byte range disagree.", f"{dtype} {_SHORT.repr(shape)}"
        found = f"{end - begin} bytes (data_offsets {begin} to {end})"
        raise _fault(where, name, what, f"{num_bytes} bytes for {expected}", found)
    return TensorRef(name, dtype, tuple(shape), file, data.start + begin, num_bytes)


def _num_bytes(where: str, name: str, dtype: str, shape: list[int]) -> int:
    num_elements = 1
    for dim in shape:
        num_elements *= dim
        # Every step is bounded, as in the library: [2**32, 2**32, 0] overflows although its product is 0.
        if dim > _MAX_U64 or num_elements > _MAX_U64:
            raise _overflow(where, name, dtype, shape)
    total_bits = num_elements * num_bits(dtype)
    if total_bits > _MAX_U64:
        raise _overflow(where, name, dtype, shape)
    if total_bits % 8:
        raise _fault(
            where,
            name,
            "The tensor does not fill whole bytes.",
            "a multiple of 8 bits",
            f"{dtype} {_SHORT.repr(shape)}",
        )
    return total_bits // 8


def _overflow(where: str, name: str, dtype: str, shape: list[int]) -> InputError:
    return _fault(
        where, name, "The tensor's size overflows 64 bits.", f"at most {_MAX_U64} bits", f"{dtype} {_SHORT.repr(shape)}"
    )


def _check_offsets(where: str, name: str, raw: object, data_bytes: int) -> tuple[int, int]:
    """Read the two offsets, counted from the first tensor byte; checked to be ordered and inside the file."""
    if not isinstance(raw, list) or len(raw) != 2 or not all(type(offset) is int for offset in raw):
        what = "The tensor's data_offsets are malformed."
        raise _fault(where, name, what, "two integers [begin, end]", _SHORT.repr(raw))
    begin, end = raw
    if not 0 <= begin <= end:
        what = "The tensor's data_offsets are out of order."
        raise _fault(where, name, what, "0 <= begin <= end", _SHORT.repr(raw))
    if end > data_bytes:
        raise _fault(
            where,
            name,
            "The file is truncated: it ends before the tensor does.",
            f"{_SHORT.repr(end)} bytes of tensor data or more",
            f"{data_bytes} bytes",
        )
    return begin, end


def _check_coverage(where: str, refs: list[TensorRef], data: range) -> None:
    """Check that every byte after the header belongs to exactly one tensor; `refs` are sorted by their range."""
    position, previous = data.start, "the header"
    for ref in refs:
        if ref.offset_bytes != position:
            gap = "overlaps" if ref.offset_bytes < position else "leaves a hole after"
            raise _fault(
                where,
                ref.name,
                f"The tensor {gap} {previous}.",
                f"begin {position - data.start}",
                f"begin {(ref.offset_bytes - data.start)}",
            )
        position, previous = ref.offset_bytes + ref.num_bytes, f"tensor {ref.name!r}"
    if position != data.stop:
        raise _fault(
            where,
            None,
            f"Bytes after {previous} belong to no tensor.",
            f"{position - data.start} bytes of tensor data",
            f"{len(data)} bytes",
        )
