"""Tensors of a published model that GGUF files hold in other types and other orders of rows: decoded range by range.

Legend: R rank of MLA's latent, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hqconv.errors import InputError
from hqconv.io.gguf_header import library
from hqconv.schemas.tensors import TensorRef

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import WriteableBuffer

    Array = np.ndarray[Any, Any]

_CHUNK_NUMBERS = 1 << 18  # decoded at a time: the library's temporaries are several times as large

ReadInto = Callable[
    [TensorRef, "WriteableBuffer", int], None
]  # a stored tensor's bytes from byte `start` on


class RowOrder(Enum):
    """Order of the rows of a published tensor in the stored ones."""

    AS_STORED = "as stored"
    ROPE = "rope rows"  # llama.cpp's pairs of rows (2i, 2i + 1) of a head are rows (i, i + D/2) of the published model
    MLA = "mla rows"  # heads of k_b [heads, R, D], transposed, and of v_b [heads, D, R], in turn
    STACKED = "stacked"  # the rows of one tensor after those of another


_OF_HEADS = (RowOrder.ROPE, RowOrder.MLA)


@dataclass(frozen=True)
class DerivedTensor:
    """A tensor of the published model, and the tensors of GGUF files that hold its values.

    ref: name, dtype and shape of the tensor, and the file of its first part; its offset is 0, since no bytes of a file
    are it. heads: of the orders ROPE and MLA.
    """

    ref: TensorRef
    parts: tuple[TensorRef, ...]
    order: RowOrder = RowOrder.AS_STORED
    heads: int = 1

    def read(self, read_stored: ReadInto, view: memoryview, start: int) -> None:
        """Fill `view` with the tensor's bytes from byte `start` on: rows are decoded, a few at a time."""
        if (
            len(self.parts) == 1
            and self.parts[0].dtype == self.ref.dtype
            and self.order not in _OF_HEADS
        ):
            read_stored(self.parts[0], view, start)
            return
        rows = self.ref.shape[0] if len(self.ref.shape) > 1 or self.order in _OF_HEADS else 1
        unit = rows // self.heads if self.order in _OF_HEADS else 1  # heads are decoded whole
        unit_bytes = unit * (self.ref.num_bytes // rows)
        step = max(1, _CHUNK_NUMBERS * 2 // unit_bytes)
        end = start + view.nbytes
        first, last = start // unit_bytes, -(-end // unit_bytes)
        # One read, which is one request on the Hub; decoding needs several times as much memory, and goes in steps.
        stored = {
            span.part.name: (span.begin, span.read(read_stored))
            for span in self._spans(first, last, unit)
        }
        for begin in range(first, last, step):
            until = min(begin + step, last)
            decoded = []
            for span in self._spans(begin, until, unit):
                skip, raw = stored[span.part.name]
                decoded.append(
                    dequantize(raw[span.begin - skip : span.end - skip], span.part.dtype)
                )
            data = memoryview(_encode(self._arranged(decoded, until - begin), self.ref).tobytes())
            offset = begin * unit_bytes
            low, high = max(start, offset), min(end, offset + len(data))
            view[low - start : high - start] = data[low - offset : high - offset]

    def _spans(self, begin: int, end: int, unit: int) -> list[_Span]:
        """Return the stored rows of units (heads of `unit` rows, or rows) `begin` … `end` - 1."""
        if self.order is RowOrder.MLA:
            (heads, rank, _), (_, value, _) = (part.shape for part in self.parts)
            sizes = zip(self.parts, (rank, value), strict=True)
            return [_Span(part, begin * rows, end * rows, heads * rows) for part, rows in sizes]
        if self.order is RowOrder.STACKED:
            first, second = (part.shape[0] for part in self.parts)
            spans = [_Span(self.parts[0], min(begin, first), min(end, first), first)]
            spans.append(_Span(self.parts[1], max(begin - first, 0), max(end - first, 0), second))
            return [span for span in spans if span.begin < span.end]
        rows = self.ref.shape[0] if len(self.ref.shape) > 1 or self.order is RowOrder.ROPE else 1
        return [_Span(self.parts[0], begin * unit, end * unit, rows)]

    def _arranged(self, decoded: Sequence[Array], num_units: int) -> Array:
        """Put the decoded rows of `_spans` in the published model's order."""
        import numpy as np

        if self.order is RowOrder.ROPE:
            (stored,) = decoded
            return stored.reshape(num_units, len(stored) // num_units // 2, 2, -1).swapaxes(1, 2)
        if self.order is RowOrder.MLA:
            (_, rank, nope), (_, value, _) = (part.shape for part in self.parts)
            keys, values = (
                decoded[0].reshape(num_units, rank, nope),
                decoded[1].reshape(num_units, value, rank),
            )
            return np.concatenate((keys.swapaxes(1, 2), values), axis=1)
        return np.concatenate(decoded)


class _Span(NamedTuple):
    """Rows `begin` … `end` - 1 of a tensor of a GGUF file, which has `num_rows`."""

    part: TensorRef
    begin: int
    end: int
    num_rows: int

    def read(self, read_stored: ReadInto) -> Array:
        """Return the bytes of the rows."""
        import numpy as np

        row_bytes = self.part.num_bytes // self.num_rows
        raw = np.empty((self.end - self.begin, row_bytes), np.uint8)
        read_stored(self.part, raw.data, self.begin * row_bytes)
        return raw


# --- ggml types ----------------------------------------------------------------------------------------------


def dequantize(raw: Array, ggml_type: str) -> Array:
    """Decode bytes of whole blocks to float32, along the last dimension."""
    import numpy as np

    gguf = library()
    with np.errstate(all="ignore"):  # NaN and infinity are refused where values are encoded
        floats: Array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[ggml_type])
    return floats


def dequantize_rows(raw: Array, ggml_type: str, num_columns: int) -> Array:
    """Decode rows [N, bytes of a row] to float32 [N, K], a few at a time."""
    import numpy as np

    floats = np.empty((len(raw), num_columns), np.float32)
    step = max(1, _CHUNK_NUMBERS // num_columns)
    for start in range(0, len(raw), step):
        floats[start : start + step] = dequantize(raw[start : start + step], ggml_type)
    return floats


def check_decoder(ref: TensorRef) -> None:
    """Raise InputError for a tensor of a type that the gguf library cannot decode."""
    if not _can_decode(ref.dtype):
        raise InputError(
            "The gguf library cannot decode the type of a tensor.",
            where=ref.name,
            expected="a type for weights",
            found=ref.dtype,
            remedy="Quantize the GGUF file to another type, or try a newer gguf library.",
        )


@cache
def _can_decode(ggml_type: str) -> bool:
    import numpy as np

    gguf = library()
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]][1]
    try:
        dequantize(np.zeros(block_bytes, np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _encode(floats: Array, ref: TensorRef) -> Array:
    """Round float32 numbers to a tensor's dtype, to nearest, ties to even. Raises InputError if float16 overflows."""
    import numpy as np

    floats = np.ascontiguousarray(floats, np.float32)
    if ref.dtype == "F32":
        return floats
    if ref.dtype == "BF16":
        gguf = library()
        return np.asarray(gguf.quants.quantize(floats, gguf.GGMLQuantizationType.BF16))
    with np.errstate(over="ignore"):
        halves = floats.astype(np.float16)
    if np.any(np.isinf(halves) & np.isfinite(floats)):
        raise InputError(
            "A weight is too large for float16.",
            where=ref.name,
            expected="at most 65504",
            found=np.abs(floats).max(),
            remedy="Set torch_dtype to bfloat16 in config.json.",
        )
    return halves
