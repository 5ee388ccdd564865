"""Compares a decoded matrix with the one that should be there, says how it differs, and measures its error."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hqconv.artifact.matrices import Array, Matrix, Note
from hqconv.artifact.opened import Artifact
from hqconv.artifact.unlayout.form import code_values, read_config, to_float32
from hqconv.backends.quantize import Cost
from hqconv.experts.block import ExpertBlock
from hqconv.schemas import artifact as names
from hqconv.schemas.grid import tp_share
from hqconv.schemas.target import TargetSchema

_CHUNK_NUMBERS = 1 << 16  # decoded at once: its float64 temporaries stay in the cache
_TENSOR_OF = {
    "codes": "weight",
    "scale": "weight_scale",
    "zero_point": "zero_point",
    "scale_2": "weight_scale_2",
    "bias": "bias",
}
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16"}


# --- bits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where one GEMM of one expert lies in the artifact."""

    artifact: Artifact
    block: ExpertBlock
    gemm: str
    expert: int
    shards: Mapping[str, str]

    @property
    def tp(self) -> int:
        return self.artifact.grid.tp

    @property
    def axis(self) -> int:
        """The dimension that TP cuts."""
        return 1 if self.gemm == "w2" else 0

    def describe(self, role: str, tensor: str, shape: Sequence[int], index: Sequence[int]) -> str:
        """File, tensor and expert of one value of the whole matrix."""
        base = self.block.module(self.expert, role) + "."
        if self.artifact.manifest["layout"] == names.CHECKPOINT:
            return f"{self.shards.get(base + tensor, 'no file')}, tensor {base}{tensor}"
        size = self.block.intermediate_size
        share = tp_share(size, self.tp, self.artifact.schema)
        # A value's place in its tensor, told in rows or columns of the matrix.
        is_cut = self.axis < len(shape) and shape[self.axis] > 1
        tp_rank = index[self.axis] * size // shape[self.axis] // share if is_cut else 0
        ep_rank, local = self.artifact.grid.homes(self.block.num_experts)[self.expert][0]
        path = names.rank_file(self.block.name, tp_rank, ep_rank)
        return f"{path}, tensor {self.block.name}.{self.gemm}_{tensor}, {role} of expert {self.expert} (local {local})"


def compare(
    found: Mapping[str, Matrix], expected: Mapping[str, Matrix], role: str, place: Place, note: Note
) -> bool:
    """Note every kind of value in which a projection differs from the expected one; True if none does."""
    ours, theirs = found[role], expected[role]
    is_equal = True
    if ours.scale_dtype != theirs.scale_dtype:
        where = place.describe(role, "weight_scale", (1,), (0,))
        note(where, "Scales are of another dtype than the schema's.", theirs.scale_dtype, ours.scale_dtype)
        is_equal = False
    for field, tensor in _TENSOR_OF.items():
        left, right = getattr(ours, field), getattr(theirs, field)
        if left is None and right is None:
            continue
        what = f"{field.replace('_', ' ')} of the source, quantized, are not in the artifact."
        if left is None or right is None or left.shape != right.shape:
            shapes = [None if x is None else list(x.shape) for x in (right, left)]
            note(place.describe(role, tensor, (1,), (0,)), what, *shapes)
            is_equal = False
            continue
        wrong = left != right
        if field == "scale" and ours.flushed is not None:
            wrong = np.where(ours.flushed, right > left, wrong)
        if not wrong.any():
            continue
        is_equal = False
        first = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
        because = diagnose(found, expected, role, field, place)
        found_text = f"{int(left[first]):#x}; {np.count_nonzero(wrong)} of {wrong.size} differ{because}"
        note(
            place.describe(role, tensor, left.shape, first),
            what,
            f"{int(right[first]):#x} at {list(first)}",
            found_text,
        )
    return is_equal


def diagnose(
    found: Mapping[str, Matrix], expected: Mapping[str, Matrix], role: str, field: str, place: Place
) -> str:
    """What happened to a matrix that is not as expected, where that is certain; starts with a colon."""
    left, right = getattr(found[role], field), getattr(expected[role], field)
    if left.ndim < 2 or left.size == 1:
        return ""
    gated = {"w1": "w3", "w3": "w1"}.get(role, "")
    if gated in expected and np.array_equal(left, getattr(expected[gated], field)):
        return ": gate and up are swapped"
    if gated in found and _is_interleaved(found, expected, field, place.tp):
        return ": gate and up rows are interleaved instead of stacked"
    size = left.shape[place.axis]
    if size % place.tp or place.block.intermediate_size % place.tp:
        return ""
    slices = [_slice(place.axis, t * size // place.tp, (t + 1) * size // place.tp) for t in range(place.tp)]
    wrong = [t for t, part in enumerate(slices) if not np.array_equal(left[part], right[part])]
    for t in wrong:
        for other, part in enumerate(slices):
            if other != t and np.array_equal(left[slices[t]], right[part]):
                return f": tp rank {t} holds the slice of tp rank {other}"
        group = place.artifact.schema.weight_scale_group_size or 32
        for axis, step in ((0, 1), (0, -1), (1, 1), (1, -1), (1, group), (1, -group)):
            if _is_shifted(left, right, slices[t], axis, step):
                return f": tp rank {t} is shifted by {step:+d} {'columns' if axis else 'rows'}"
    return ""


def _slice(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(begin, end),)


def _is_interleaved(found: Mapping[str, Matrix], expected: Mapping[str, Matrix], field: str, tp: int) -> bool:
    gate, up, gate_right, up_right = (
        getattr(side[role], field) for side in (found, expected) for role in ("w1", "w3")
    )
    if gate.shape[0] % tp:
        return False
    share = gate.shape[0] // tp
    for begin in range(0, gate.shape[0], share):
        stacked = np.concatenate([gate[begin : begin + share], up[begin : begin + share]])
        parts = ((stacked[0::2], gate_right), (stacked[1::2], up_right))
        if not all(np.array_equal(part, right[begin : begin + share]) for part, right in parts):
            return False
    return True


def _is_shifted(left: Array, right: Array, part: tuple[slice, ...], axis: int, step: int) -> bool:
    """Whether a slice holds the values `step` further on, as far as both lie in the slice."""
    ours, theirs = left[part], right[part]
    size = ours.shape[axis] - abs(step)
    if size <= 0:
        return False
    ahead, behind = _slice(axis, abs(step), abs(step) + size), _slice(axis, 0, size)
    if step < 0:
        ahead, behind = behind, ahead
    return np.array_equal(ours[behind], theirs[ahead])


def fingerprint(matrix: Matrix) -> bytes:
    """Eight rows of codes, hashed: enough to tell one expert's matrix from another's."""
    rows = np.linspace(0, matrix.codes.shape[0] - 1, 8).astype(int)
    return hashlib.blake2b(matrix.codes[rows].tobytes(), digest_size=16).digest()


# --- figures -----------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Sums over one matrix in float64: w the source, d the decoded weights; the first four without one are 0.

    error (w - d)**2, power w**2, dot w * d, worst (relative error of a group, row, group); decoded_power d**2.
    quantizer: the cost as the conversion measures it.
    """

    error: float = 0.0
    power: float = 0.0
    dot: float = 0.0
    worst: tuple[float, int, int] = (0.0, 0, 0)
    decoded_power: float = 0.0
    num_zero_scales: int = 0
    num_scales: int = 0
    num_flushed: int = 0
    has_source: bool = False
    quantizer: Cost | None = None

    def recorded_sums(self) -> tuple[float, float]:
        """Error and power as the manifest records them: before float16 flushes the smallest e8m0 scales."""
        if self.num_flushed and self.quantizer:
            return self.quantizer.error, self.quantizer.power
        return self.error, self.power

    def recorded_error(self) -> float:
        """The relative error as the manifest records it."""
        return _relative(*self.recorded_sums())


def measure(matrix: Matrix, source: torch.Tensor | None, schema: TargetSchema, param_dtype: str) -> Figures:
    """Decode a matrix and sum up its error against `source` [N, K]; works on some rows at a time."""
    flushed = 0 if matrix.flushed is None else int(np.count_nonzero(matrix.flushed))
    zero_scales = int(np.count_nonzero(matrix.scale_value == 0))
    figures = Figures(num_zero_scales=zero_scales, num_scales=matrix.scale.size, num_flushed=flushed)
    num_groups = matrix.codes.shape[1] // (schema.weight_scale_group_size or matrix.codes.shape[1])
    sums = []
    for begin, decoded in _decoded_rows(matrix, schema, param_dtype):
        values = decoded.astype(np.float64).reshape(decoded.shape[0], num_groups, -1)
        decoded_power = float(np.einsum("ngk,ngk->", values, values))
        if source is None:
            sums.append((0.0, 0.0, 0.0, decoded_power))
            continue
        weights = source[begin : begin + len(decoded)].double().numpy().reshape(values.shape)
        dot = float(np.einsum("ngk,ngk->", weights, values))
        values -= weights
        error_NG = np.einsum("ngk,ngk->ng", values, values)
        power_NG = np.einsum("ngk,ngk->ng", weights, weights)
        sums.append((float(error_NG.sum()), float(power_NG.sum()), dot, decoded_power))
        _keep_worst(figures, error_NG, power_NG, begin)
    totals = [math.fsum(column) for column in zip(*sums, strict=True)]
    figures.error, figures.power, figures.dot, figures.decoded_power = totals
    figures.has_source = source is not None
    return figures


def _keep_worst(figures: Figures, error_NG: Array, power_NG: Array, begin: int) -> None:
    ratio = np.divide(error_NG, power_NG, out=np.zeros_like(error_NG), where=power_NG > 0)
    row, group = np.unravel_index(int(ratio.argmax()), ratio.shape)
    worst = math.sqrt(ratio[row, group])
    if worst > figures.worst[0]:
        figures.worst = worst, begin + int(row), int(group)


def _decoded_rows(
    matrix: Matrix, schema: TargetSchema, param_dtype: str
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, decoded float32 rows), a few at a time; the array is used again."""
    from hqconv.artifact.unlayout import loops

    num_rows, num_columns = matrix.codes.shape
    values = code_table(schema, param_dtype)
    scale = np.repeat(matrix.scale_value, num_rows // matrix.scale_value.shape[0], axis=0)[None]
    zero, scale_2 = np.zeros((1, num_rows, 1), np.float32), np.ones((1, num_rows), np.float32)
    if matrix.zero_point is not None:
        zero_dtype = _SAFETENSORS[param_dtype] if schema.is_fp_zero_point else "codes"
        zero = to_float32(matrix.zero_point, zero_dtype)[None]
    if matrix.scale_2 is not None:
        is_tensor = schema.weight_scale_2_type == "tensor"
        scale_2[:] = to_float32(matrix.scale_2, "F32" if is_tensor else _SAFETENSORS[param_dtype])
    step = max(1, _CHUNK_NUMBERS // num_columns)
    out = np.empty((1, min(step, num_rows), num_columns), np.float32)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        part = out[:, : rows.stop - begin]
        codes = matrix.codes[None, rows]
        loops.decode_codes(codes, values, zero[:, rows], scale[:, rows], scale_2[:, rows], part)
        yield begin, part[0]


def code_table(schema: TargetSchema, param_dtype: str) -> NDArray[np.float32]:
    """What each of 256 codes of the schema stands for."""
    words = {**schema.humming_fields(), "a_dtype": param_dtype, "c_dtype": param_dtype, "has_bias": False}
    n, k = max(64, schema.weight_scale_group_size_n), max(64, schema.weight_scale_group_size)
    sizes = {"shape_n": n, "shape_k": k, "pad_shape_n": 0, "pad_shape_k": 0, "sm_version": 90}
    return code_values(read_config({**words, **sizes}, {}))


def summarize(of_role: Sequence[Figures], *, as_recorded: bool = False) -> dict[str, Any]:
    """One projection's figures over all experts, as JSON words; None for what is no number.

    relative_error: Frobenius norm of w - d over that of w; sqnr_db: 10 log10 of power over error; cosine between
    w and d; the worst expert, and the worst scale group (or row) of all.
    """
    words: dict[str, Any] = {
        "zero_scale_share": sum(f.num_zero_scales for f in of_role) / sum(f.num_scales for f in of_role)
    }
    if num_flushed := sum(f.num_flushed for f in of_role):
        words["num_flushed_scales"] = num_flushed
    decoded = math.fsum(f.decoded_power for f in of_role)
    if not all(f.has_source for f in of_role):
        return {"is_finite": math.isfinite(decoded), **words}
    sums = [f.recorded_sums() if as_recorded else (f.error, f.power) for f in of_role]
    error, power = (math.fsum(s[i] for s in sums) for i in (0, 1))
    each = [_relative(*s) for s in sums]
    worst_expert = max(range(len(each)), key=each.__getitem__)
    group_expert = max(range(len(each)), key=lambda e: of_role[e].worst[0])
    relative, row, group = of_role[group_expert].worst
    norm = math.sqrt(power * decoded) if decoded >= 0 else math.nan
    return {
        "relative_error": _number(_relative(error, power)),
        "sqnr_db": _number(10 * math.log10(power / error)) if error > 0 and power > 0 else None,
        "cosine": _number(math.fsum(f.dot for f in of_role) / norm) if norm > 0 else None,
        "worst_expert": worst_expert,
        "worst_relative_error": _number(each[worst_expert]),
        "worst_group": {"expert": group_expert, "row": row, "group": group, "relative_error": relative},
        **words,
    }


def _relative(error: float, power: float) -> float:
    return math.sqrt(error / power) if power else 0.0


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
