"""Compares a decoded matrix with the one that should be there, and says how it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hqconv.artifact.expert_reader import Array, ExpertMatrix, Note
from hqconv.artifact.reader import Artifact
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.grid import tp_share

_TENSOR_OF = {
    "codes": "weight",
    "scale": "weight_scale",
    "zero_point": "zero_point",
    "scale_2": "weight_scale_2",
    "bias": "bias",
}


@dataclass(frozen=True)
class GemmPosition:
    """Where one GEMM of one expert lies in the artifact."""

    artifact: Artifact
    block: MoeLayer
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
        if not self.artifact.manifest.is_kernel:
            return f"{self.shards.get(base + tensor, 'no file')}, tensor {base}{tensor}"
        size = self.block.intermediate_size
        share = tp_share(size, self.tp, self.artifact.schema_of(self.block.name))
        # A value's place in its tensor, told in rows or columns of the matrix.
        is_cut = self.axis < len(shape) and shape[self.axis] > 1
        tp_rank = index[self.axis] * size // shape[self.axis] // share if is_cut else 0
        ep_rank, local = self.artifact.grid.homes(self.block.num_experts)[self.expert][0]
        path = names.rank_file(self.block.name, tp_rank, ep_rank)
        return f"{path}, tensor {self.block.name}.{self.gemm}_{tensor}, {role} of expert {self.expert} (local {local})"


def compare(
    found: Mapping[str, ExpertMatrix],
    expected: Mapping[str, ExpertMatrix],
    role: str,
    place: GemmPosition,
    note: Note,
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
        verb = "are" if field == "codes" else "is"
        what = f"The {field.replace('_', ' ')} of the source, quantized, {verb} not in the artifact."
        if left is None or right is None or left.shape != right.shape:
            shapes = [None if x is None else list(x.shape) for x in (right, left)]
            note(place.describe(role, tensor, (1,), (0,)), what, *shapes)
            is_equal = False
            continue
        if _are_same_bytes(left, right):
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


def _are_same_bytes(left: Array, right: Array) -> bool:
    """Whether two arrays of one shape and dtype are equal; quickly, where they lie in one piece."""
    if (
        left.dtype != right.dtype
        or left.nbytes % 8
        or not (left.flags.c_contiguous and right.flags.c_contiguous)
    ):
        return False
    return np.array_equal(left.reshape(-1).view(np.uint64), right.reshape(-1).view(np.uint64))


def diagnose(
    found: Mapping[str, ExpertMatrix],
    expected: Mapping[str, ExpertMatrix],
    role: str,
    field: str,
    place: GemmPosition,
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
        group = place.artifact.schema_of(place.block.name).weight_scale_group_size or 32
        for axis, step in ((0, 1), (0, -1), (1, 1), (1, -1), (1, group), (1, -group)):
            if _is_shifted(left, right, slices[t], axis, step):
                return f": tp rank {t} is shifted by {step:+d} {'columns' if axis else 'rows'}"
    return ""


def _slice(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(begin, end),)


def _is_interleaved(
    found: Mapping[str, ExpertMatrix], expected: Mapping[str, ExpertMatrix], field: str, tp: int
) -> bool:
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


def printed_rows(num_rows: int) -> list[int]:
    """The eight rows of a matrix that its fingerprint is made of."""
    return [int(row) for row in np.linspace(0, num_rows - 1, 8)]


def fingerprint(codes: Array) -> bytes:
    """Eight rows of codes [N, K], hashed: enough to tell one expert's matrix from another's."""
    return hash_of_rows(codes[printed_rows(codes.shape[0])])


def hash_of_rows(rows: Array) -> bytes:
    """The hash of a matrix's printed rows."""
    return hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
