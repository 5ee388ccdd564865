"""A corpus of safetensors files: good ones, and the attacks that the library's own authors thought of; and mutations.

The attacks are those of `attacks/` in huggingface/safetensors, in spirit: overlaps, holes, offsets beyond the file,
sizes that overflow, keys twice, headers too long, too deep, or no JSON, and bytes after the end.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from hqconv.schemas.tensors import DTYPES, num_bits

_BYTES = b'0123456789-+.eE"{}[],: \\uFUB\x00\xff\x80'
_WORDS = [
    *b"0 -0 -1 1 2 1.0 1e1 1e999 NaN Infinity -Infinity null true 18446744073709551615".split(),
    *b"18446744073709551616 9223372036854775807 4294967296 [] {} [0,0] ,,, /*x*/".split(),
    *rb'"F4" "F64" "U8" "\ud800" "\u0000" "a" \u0061 "__metadata__":{"a":"b"}, "dtype":"U8",'.split(),
    *b'"shape":[1], "data_offsets":[0,0], \xff \xef\xbb\xbf'.split(),
    *(b"9" * 400, b"9" * 5000, b"[" * 100, b"{" * 70, b'{"a":' * 2000, b" " * 50),
]
_ODD: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    8,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    True,
    None,
    1.0,
    "1",
    [],
    {},
    [0, 0],
)
_LENGTHS = (
    0,
    1,
    2,
    7,
    8,
    1 << 24,
    99_999_999,
    100_000_000,
    100_000_001,
    1 << 31,
    1 << 32,
    1 << 63,
    (1 << 64) - 1,
)


def pack(header: object, data: bytes = b"") -> bytes:
    """A file: the header's length, the header, the tensors' bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def _entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def corpus() -> list[bytes]:
    """Files, good and bad."""
    one, two = _entry("U8", [2], 0, 2), _entry("U8", [2], 2, 4)
    text = json.dumps(one).encode()
    good = [
        pack({"a": one, "b": two}, b"abcd"),
        pack({"__metadata__": {"format": "pt"}, "x.y": _entry("BF16", [2, 2], 0, 8)}, bytes(8)),
        pack({"b": _entry("F32", [1, 3], 4, 16), "a": _entry("I32", [], 0, 4)}, bytes(16)),
        pack({"e": _entry("F64", [0], 0, 0), "f": _entry("F8_E4M3", [4], 0, 4)}, bytes(4)),
        pack({"f4": _entry("F4", [4, 2], 0, 4), "é": _entry("BOOL", [1], 4, 5)}, bytes(5)),
        pack(
            {f"model.layers.{n}.w": _entry("F16", [2], 4 * n, 4 * n + 4) for n in range(12)},
            bytes(48),
        ),
        pack(json.dumps({"a": one}).encode().ljust(96), b"ab"),
        pack({}),
    ]
    bad = [
        pack({"a": one, "b": one}, b"ab"),
        pack({"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [2], 2, 4)}, b"abcd"),
        pack({"a": one, "b": _entry("U8", [2], 3, 5)}, b"abcde"),
        pack({"a": one}, b"ab" + b"payload" * 9),
        pack({"a": _entry("U8", [2**32, 2**32], 0, 0)}),
        pack({"a": _entry("F64", [2**61], 0, 2**64)}),
        pack({"a": _entry("U8", [2], 2**64 - 2, 2**64)}, b"ab"),
        pack({"a": _entry("U8", [2], -2, 0)}, b"ab"),
        pack(b'{"a":' + text + b',"a":' + text + b"}", b"ab"),
        pack(b'{"a":{"dtype":"U8","shape":[2],"shape":[1],"data_offsets":[0,2]}}', b"ab"),
        pack(b"[" * 100_000),
        pack(b'{"a":' * 3000),
        pack(b'{"a":' + text + b"}" + b"\0" * 60, b"ab"),
        pack({"__metadata__": {"x": [1]}, "a": one}, b"ab"),
        (1 << 63).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0",
        b"PK\x03\x04" + bytes(60),
    ]
    return good + bad


def mutant(files: list[bytes], draw: Random) -> bytes:
    """One of the files, or a good one made up, with none to four changes, most of them inside its header."""
    is_made_up = draw.random() < 0.5
    raw = bytearray(_made_up(draw) if is_made_up else files[int(draw.random() * len(files))])
    for _ in range(int(draw.random() ** 2 * 4) + (not is_made_up)):
        raw = _changed(raw, files, draw)
    return bytes(raw)


def _made_up(draw: Random) -> bytes:
    """A file of up to four tensors, in any order, whose numbers may be odd."""
    entries, end = [], 0
    for number in range(draw.randrange(5)):
        dtype, shape = draw.choice([*DTYPES]), [draw.randrange(4) for _ in range(draw.randrange(3))]
        shape = [*shape, 8] if math.prod(shape) * num_bits(dtype) % 8 else shape
        begin, end = end, end + math.prod(shape) * num_bits(dtype) // 8
        entries.append(
            (
                draw.choice(("t", "é", "a.b", "\n", "__metadata", "")) + str(number),
                _entry(dtype, shape, begin, end),
            )
        )
    num_bytes = end
    draw.shuffle(entries)
    if entries and draw.random() < 0.3:
        entry = draw.choice(entries)[1]
        values = entry[draw.choice(("shape", "data_offsets"))] or [0]
        values[int(draw.random() * len(values))] = draw.choice(_ODD)
    header: dict[str, Any] = dict(entries)
    if draw.random() < 0.3:
        header["__metadata__"] = {"format": draw.choice(("pt", "np", ":", "é"))}
    indent = draw.choice((None, None, 0, 1))
    raw = json.dumps(header, ensure_ascii=draw.random() < 0.5, indent=indent).encode()
    return pack(raw + b" " * draw.randrange(3), bytes(num_bytes))


def _changed(raw: bytearray, files: list[bytes], draw: Random) -> bytearray:
    kind = draw.random()
    keeps = draw.random() < 0.9  # the length of the header stays true
    end = min(len(raw), 8 + int.from_bytes(raw[:8], "little"))
    if end <= 9:
        return raw + pack({"a": _entry("U8", [0], 0, 0)})
    head, rest = raw[8:end], raw[end:]
    place = int(draw.random() * len(head))
    if kind < 0.35:
        head[place] = _BYTES[int(draw.random() * len(_BYTES))]
    elif kind < 0.6:
        head[place : _end_of_word(head, place)] = draw.choice(_WORDS)
    elif kind < 0.7:
        head[place:place] = draw.choice(_WORDS)
    elif kind < 0.78:
        del head[place : place + 1 + int(draw.random() * 12)]
    elif kind < 0.86:
        other = draw.choice(files)[8:400]
        start = int(draw.random() * max(1, len(other)))
        head[place:place] = other[start : start + int(draw.random() * 40)]
    elif kind < 0.92:
        rest = rest[: int(draw.random() * (len(rest) + 1))] + bytes(int(draw.random() * 3))
    elif kind < 0.96:
        return bytearray(draw.choice(_LENGTHS).to_bytes(8, "little")) + head + rest
    else:
        return raw[: int(draw.random() * len(raw))]
    length = len(head) if keeps else int.from_bytes(raw[:8], "little")
    return bytearray(length.to_bytes(8, "little")) + head + rest


def _end_of_word(head: bytearray, place: int) -> int:
    """A number or a name ends where the next mark stands."""
    end = place
    while end < len(head) and head[end] not in b',:]}"':
        end += 1
    return max(end, place + 1)
