"""One projection of one expert as an artifact holds it, put together from its ranks' slices.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.unlayout import loops
from hqconv.artifact.unlayout.numbers import code_values, to_float32
from hqconv.schemas import artifact as names
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.target import TargetSchema

Array = NDArray[Any]
Note = Callable[[str, str, object, object], None]  # where, what, expected, found
_TENSORS = {"codes": "weight", "scale": "weight_scale", "scale_2": "weight_scale_2"}
_CHUNK_NUMBERS = 1 << 18  # decoded at once: what a caller makes of them stays in the cache


@dataclass(frozen=True, eq=False)
class Matrix:
    """One projection of one expert, or a slice of it, in logical order; floats as unsigned bit patterns.

    codes uint8 [N, K]; scale [N, G], [N, 1] (channel), [N/bn, K/bk] (block) or [1, 1] (tensor), its dtype, and
    what the kernels take it for, float32 (with the second scale multiplied in of e8m0 scales that were adapted to
    float16, or fused into the codes, which then are not the source's any more); zero_point
    [N, G | 1]; scale_2 [1] or [N]; bias [N]; flushed [N, G]: the kernels take this e8m0 scale for zero, and the
    original was at most what `scale` says.
    """

    codes: Array
    scale: Array
    scale_dtype: str
    scale_value: NDArray[np.float32]
    zero_point: Array | None = None
    scale_2: Array | None = None
    bias: Array | None = None
    flushed: NDArray[np.bool_] | None = None


# --- slices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Home:
    """One GEMM of one expert on one EP rank, for findings; `where` says it of a TP rank, and names a tensor."""

    block: str
    gemm: str
    expert: int
    ep_rank: int
    local: int
    note: Note
    num_tp: int

    def path(self, tp_rank: int) -> str:
        """The file of a TP rank."""
        return names.rank_file(self.block, tp_rank, self.ep_rank)

    def where(self, tp_rank: int, tensor: str) -> str:
        """The place of a tensor on a TP rank."""
        tensor = f"{self.block}.{self.gemm}_{tensor}"
        return f"{self.path(tp_rank)}, tensor {tensor}, expert {self.expert} (local {self.local})"


def run_of_rows(matrix: Matrix, part: int, parts: int) -> Matrix:
    """One of `parts` equal runs of rows; what all rows share stays."""

    def cut(array: Any) -> Any:
        if array is None or array.shape[0] == 1:
            return array
        share = array.shape[0] // parts
        return array[part * share : (part + 1) * share]

    fields = ("codes", "scale", "scale_value", "zero_point", "scale_2", "bias", "flushed")
    return replace(matrix, **{field: cut(getattr(matrix, field)) for field in fields})


def join(slices: Sequence[Matrix], axis: int, schema: TargetSchema, home: Home) -> Matrix:
    """Put TP slices together along rows (0) or columns (1); what is not cut must agree on all ranks."""
    is_shared = schema.weight_scale_type == "tensor" or (schema.weight_scale_type == "channel" and axis == 1)
    scale_axis = None if is_shared else axis
    second_axis = 0 if schema.weight_scale_2_type == "channel" and axis == 0 else None
    return Matrix(
        codes=_merge([one.codes for one in slices], axis, "weight", home),
        scale=_merge([one.scale for one in slices], scale_axis, "weight_scale", home),
        scale_dtype=slices[0].scale_dtype,
        scale_value=_merge([one.scale_value for one in slices], scale_axis, "", None),
        zero_point=_merge([one.zero_point for one in slices], scale_axis, "zero_point", home),
        scale_2=_merge([one.scale_2 for one in slices], second_axis, "weight_scale_2", home),
        bias=_merge_bias([one.bias for one in slices], axis, home),
        flushed=_merge([one.flushed for one in slices], scale_axis, "", None),
    )


def trim(matrix: Matrix, axis: int, size: int, home: Home) -> Matrix:
    """Take the last TP rank's padding off along `axis`; it must be zero, and of e8m0 scales the last ones again."""
    total = matrix.codes.shape[axis]
    if total == size:
        return matrix
    is_e8m0 = matrix.scale_dtype == "F8_E8M0"  # has no zero; the codes below are zero anyway
    checked = ("codes", "bias", "zero_point", "scale", "scale_2")

    def cut(field: str) -> Any:
        array = getattr(matrix, field)
        is_along = array is not None and array.ndim > axis and array.shape[axis] > 1
        if not is_along or (field == "bias" and axis == 1):
            return array
        kept = array.shape[axis] * size // total
        inner, rest = np.split(array, [kept], axis)
        if field in checked:
            is_repeated = field == "scale" and is_e8m0
            last = np.take(inner, [-1], axis) if is_repeated else np.zeros((), array.dtype)
            _check_padding(rest != last, field, home, "the last scale" if is_repeated else "zero")
        return inner

    names_ = [one.name for one in fields(matrix) if one.name != "scale_dtype"]
    return replace(matrix, **{name: cut(name) for name in names_})


def _check_padding(wrong: Array, field: str, home: Home, expected: str) -> None:
    if wrong.any():
        tensor = _TENSORS.get(field, field)
        what, found = (
            f"The padding of the last TP rank is not {expected}.",
            f"{np.count_nonzero(wrong)} values",
        )
        home.note(home.where(home.num_tp - 1, tensor), what, expected, found)


def _merge(parts: Sequence[Any], axis: int | None, tensor: str, home: Home | None) -> Any:
    """The ranks' parts along `axis`, or the first one of what every rank must hold alike."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    if axis is not None:
        return np.concatenate(parts, axis=axis)
    for tp_rank, part in enumerate(parts):
        wrong = np.argwhere(part != parts[0])
        if len(wrong) and home is not None:
            place = tuple(int(i) for i in wrong[0])
            found = f"{part[place]:#x} at {list(place)}; {len(wrong)} of {part.size} differ"
            expected, what = f"{parts[0][place]:#x} as on tp rank 0", "TP ranks disagree on what they share."
            home.note(home.where(tp_rank, tensor), what, expected, found)
    return parts[0]


def _merge_bias(parts: Sequence[Any], axis: int, home: Home) -> Any:
    """w13's bias is cut; w2's is on TP rank 0 and zero elsewhere, since ranks are summed."""
    if parts[0] is None or axis == 0:
        return _merge(parts, 0, "bias", home)
    for tp_rank, part in enumerate(parts[1:], start=1):
        if part.any():
            what, found = "The w2 bias is on more than TP rank 0.", f"{np.count_nonzero(part)} values"
            home.note(home.where(tp_rank, "bias"), what, "zero, since ranks are summed", found)
    return parts[0]


# --- values ------------------------------------------------------------------------------------------------


def floats(matrix: Matrix, schema: TargetSchema, param_dtype: str) -> NDArray[np.float32]:
    """The decoded weights [N, K], float32."""
    out = np.empty(matrix.codes.shape, np.float32)
    for begin, decoded in decoded_rows(matrix, schema, param_dtype):
        out[begin : begin + len(decoded)] = decoded
    return out


def decoded_rows(
    matrix: Matrix, schema: TargetSchema, param_dtype: str
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, decoded float32 rows), a few at a time; the array is used again."""
    num_rows, num_columns = matrix.codes.shape
    values = code_table(schema)
    scale = np.repeat(matrix.scale_value, num_rows // matrix.scale_value.shape[0], axis=0)[None]
    zero, scale_2 = np.zeros((1, num_rows, 1), np.float32), np.ones((1, num_rows), np.float32)
    if matrix.zero_point is not None:
        zero_dtype = code_of(param_dtype) if schema.is_fp_zero_point else "codes"
        zero = to_float32(matrix.zero_point, zero_dtype)[None]
    if matrix.scale_2 is not None:
        is_tensor = schema.weight_scale_2_type == "tensor"
        scale_2[:] = to_float32(matrix.scale_2, "F32" if is_tensor else code_of(param_dtype))
    step = max(1, _CHUNK_NUMBERS // num_columns)
    out = np.empty((1, min(step, num_rows), num_columns), np.float32)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        part = out[:, : rows.stop - begin]
        codes = matrix.codes[None, rows]
        loops.decode_codes(codes, values, zero[:, rows], scale[:, rows], scale_2[:, rows], part)
        yield begin, part[0]


def code_table(schema: TargetSchema) -> NDArray[np.float32]:
    """What each of 256 codes of the schema stands for."""
    return code_values(schema.b_dtype, has_zero_point=schema.has_zero_point)
