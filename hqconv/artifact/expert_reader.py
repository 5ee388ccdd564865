"""One projection of one expert as an artifact holds it, put together from its ranks' slices.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.reader import Artifact, Tensors
from hqconv.errors import HqconvError
from hqconv.humming_layout.gemm_forms import layout_entries
from hqconv.layout_decoder import loops
from hqconv.layout_decoder.layout_form import LayoutForm, read_config
from hqconv.layout_decoder.numbers import code_values, to_float32
from hqconv.layout_decoder.read import ADAPTED, DecodedStack, e8m0_exponents, second_scale, unlayout
from hqconv.layout_decoder.tensors import expected_tensors
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.output_units import gemm_shapes
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import code_of
from hqconv.schemas.weight_schema import WeightSchema

Array = NDArray[Any]
Note = Callable[[str, str, object, object], None]  # where, what, expected, found
_TENSORS = {"codes": "weight", "scale": "weight_scale", "scale_2": "weight_scale_2"}
_CHUNK_NUMBERS = 1 << 18  # decoded at once: what a caller makes of them stays in the cache


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
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
class GemmLocation:
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


def run_of_rows(matrix: ExpertMatrix, part: int, parts: int) -> ExpertMatrix:
    """One of `parts` equal runs of rows; what all rows share stays."""

    def cut(array: Any) -> Any:
        if array is None or array.shape[0] == 1:
            return array
        share = array.shape[0] // parts
        return array[part * share : (part + 1) * share]

    fields = ("codes", "scale", "scale_value", "zero_point", "scale_2", "bias", "flushed")
    return replace(matrix, **{field: cut(getattr(matrix, field)) for field in fields})


def join(slices: Sequence[ExpertMatrix], axis: int, schema: WeightSchema, home: GemmLocation) -> ExpertMatrix:
    """Put TP slices together along rows (0) or columns (1); what is not cut must agree on all ranks."""
    is_shared = schema.weight_scale_type == "tensor" or (schema.weight_scale_type == "channel" and axis == 1)
    scale_axis = None if is_shared else axis
    second_axis = 0 if schema.weight_scale_2_type == "channel" and axis == 0 else None
    return ExpertMatrix(
        codes=_merge([one.codes for one in slices], axis, "weight", home),
        scale=_merge([one.scale for one in slices], scale_axis, "weight_scale", home),
        scale_dtype=slices[0].scale_dtype,
        scale_value=_merge([one.scale_value for one in slices], scale_axis, "", None),
        zero_point=_merge([one.zero_point for one in slices], scale_axis, "zero_point", home),
        scale_2=_merge([one.scale_2 for one in slices], second_axis, "weight_scale_2", home),
        bias=_merge_bias([one.bias for one in slices], axis, home),
        flushed=_merge([one.flushed for one in slices], scale_axis, "", None),
    )


def trim(matrix: ExpertMatrix, axis: int, size: int, home: GemmLocation) -> ExpertMatrix:
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


def _check_padding(wrong: Array, field: str, home: GemmLocation, expected: str) -> None:
    if wrong.any():
        tensor = _TENSORS.get(field, field)
        what, found = (
            f"The padding of the last TP rank is not {expected}.",
            f"{np.count_nonzero(wrong)} values",
        )
        home.note(home.where(home.num_tp - 1, tensor), what, expected, found)


def _merge(parts: Sequence[Any], axis: int | None, tensor: str, home: GemmLocation | None) -> Any:
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


def _merge_bias(parts: Sequence[Any], axis: int, home: GemmLocation) -> Any:
    """w13's bias is cut; w2's is on TP rank 0 and zero elsewhere, since ranks are summed."""
    if parts[0] is None or axis == 0:
        return _merge(parts, 0, "bias", home)
    for tp_rank, part in enumerate(parts[1:], start=1):
        if part.any():
            what, found = "The w2 bias is on more than TP rank 0.", f"{np.count_nonzero(part)} values"
            home.note(home.where(tp_rank, "bias"), what, "zero, since ranks are summed", found)
    return parts[0]


# --- values ------------------------------------------------------------------------------------------------


def floats(matrix: ExpertMatrix, schema: WeightSchema, param_dtype: str) -> NDArray[np.float32]:
    """The decoded weights [N, K], float32."""
    out = np.empty(matrix.codes.shape, np.float32)
    for begin, decoded in decoded_rows(matrix, schema, param_dtype):
        out[begin : begin + len(decoded)] = decoded
    return out


def decoded_rows(
    matrix: ExpertMatrix, schema: WeightSchema, param_dtype: str
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


def code_table(schema: WeightSchema) -> NDArray[np.float32]:
    """What each of 256 codes of the schema stands for."""
    return code_values(schema.b_dtype, has_zero_point=schema.has_zero_point)


Good = set[tuple[str, int, int]]  # GEMM, TP rank, EP rank


def check_rank_headers(
    artifact: Artifact, block: MoeLayer, note: Note, ranks: Iterable[tuple[int, int]] | None = None
) -> Good:
    """The (GEMM, TP rank, EP rank) whose LayerConfig and dtypes are those of the manifest's schema; of all `ranks`."""
    good: Good = set()
    for tp_rank, ep_rank in artifact.grid.ranks if ranks is None else ranks:
        path = names.rank_file(block.name, tp_rank, ep_rank)
        num_local = len(artifact.grid.local_experts(block.num_experts, ep_rank))
        for gemm, shape in gemm_shapes(block, artifact.grid.tp, artifact.schema_of(block.name)).items():
            try:
                config = artifact.layer_config(block.name, gemm, tp_rank, ep_rank)
                found, expected = _forms(
                    artifact, block.name, config, artifact.flags(block.name, gemm), shape
                )
                for name, (dtype, _) in expected_tensors(expected).items():
                    _check_entry(artifact, path, f"{block.name}.{gemm}_{name}", dtype, num_local, note)
            except (HqconvError, OSError) as error:
                note_error(f"{path}, {gemm}", error, note)
                continue
            wrong = [f.name for f in fields(found) if getattr(found, f.name) != getattr(expected, f.name)]
            if wrong:
                what = "A layer config describes another format than the manifest."
                texts = [
                    ", ".join(f"{name} {getattr(form, name)}" for name in wrong) for form in (expected, found)
                ]
                note(f"{path}, metadata {gemm}", what, *texts)
            else:
                good.add((gemm, tp_rank, ep_rank))
    return good


def _forms(
    artifact: Artifact,
    block: str,
    config: Mapping[str, Any],
    flags: Mapping[str, Any],
    shape: tuple[int, int],
) -> tuple[LayoutForm, LayoutForm]:
    """The layouts that a stored layer config describes and that the manifest implies; padding is the config's."""
    kind = artifact.kernel_spec_of(block)
    layer = layout_entries(kind)
    sizes = {
        key: config[key]
        for key in ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k", "has_bias")
        if key in config
    }
    found = read_config(config, flags)
    return found, replace(read_config({**layer, **sizes}, layer), shape=shape)


def _check_entry(artifact: Artifact, path: str, name: str, dtype: str, num_local: int, note: Note) -> None:
    """A tensor's dtype, without which its bits mean something else, and its number of experts."""
    entry = artifact.header(path)[0].get(name)
    where = f"{path}, tensor {name}"
    if entry is None:
        note(where, "A rank's tensor is missing.", dtype, "absent")
    elif entry.dtype != dtype:
        what = "A tensor's bits are labelled with another dtype: a loader would reinterpret them."
        note(where, what, dtype, entry.dtype)
    elif entry.shape[:1] != (num_local,):
        note(where, "A rank file holds another number of experts.", num_local, list(entry.shape[:1]))


def note_error(where: str, error: HqconvError | OSError, note: Note) -> None:
    """Note what keeps weights from being read or decoded."""
    if isinstance(error, HqconvError):
        inside = f"{where}: {error.where}" if error.where and error.where not in where else where
        note(inside, f"Weights cannot be decoded: {error.what}", error.expected, error.found)
    else:
        note(where, "Weights cannot be read.", "", error.strerror)


class ExpertReader:
    """Reads one block's experts out of an opened artifact's rank files; `read` may be called from any thread."""

    def __init__(self, artifact: Artifact, block: MoeLayer, note: Note) -> None:
        """Looks at the headers of all ranks first; what is wrong with them is noted, the others are `good`."""
        self._artifact, self._block = artifact, block
        self.schema = artifact.schema_of(block.name)
        self.good = check_rank_headers(artifact, block, note)

    def read(self, gemm: str, expert: int, note: Note) -> dict[str, ExpertMatrix]:
        """The whole projections of one GEMM of one expert; none of them if a rank's slice cannot be decoded.

        Copies of a redundant expert are compared bit for bit with the first, which is the one decoded.
        """
        artifact, block = self._artifact, self._block
        places = artifact.grid.homes(block.num_experts)[expert]
        home, *copies = (
            GemmLocation(block.name, gemm, expert, *place, note, artifact.grid.tp) for place in places
        )
        slices = [
            matrix
            for tp_rank in range(artifact.grid.tp)
            if (gemm, tp_rank, home.ep_rank) in self.good
            and (matrix := self._slice(tp_rank, home, copies)) is not None
        ]
        if len(slices) < artifact.grid.tp:
            return {}
        size, schema = block.intermediate_size, self.schema
        if gemm == "w2":
            return {"w2": trim(join(slices, 1, schema, home), 1, size, home)}
        roles = [role for role in ("w1", "w3") if role in block.roles]
        parts = [[run_of_rows(one, i, len(roles)) for one in slices] for i in range(len(roles))]
        joined = {role: join(part, 0, schema, home) for role, part in zip(roles, parts, strict=True)}
        return {role: trim(one, 0, size, home) for role, one in joined.items()}

    def _slice(self, tp_rank: int, home: GemmLocation, copies: list[GemmLocation]) -> ExpertMatrix | None:
        """One TP rank's slice; None, and a note, where it cannot be read or decoded."""
        artifact, block, gemm = self._artifact, home.block, home.gemm
        try:
            first = artifact.read_expert(block, gemm, tp_rank, home.ep_rank, home.local)
            for copy in copies:
                other = artifact.read_expert(block, gemm, tp_rank, copy.ep_rank, copy.local)
                _compare_copy(first, other, home.path(tp_rank), copy, tp_rank)
            config = artifact.layer_config(block, gemm, tp_rank, home.ep_rank)
            return _decode_slice(config, first, artifact.flags(block, gemm), home, tp_rank)
        except (HqconvError, OSError) as error:
            where = f"{home.path(tp_rank)}, {gemm} of expert {home.expert} (local {home.local})"
            note_error(where, error, home.note)
            return None


def _compare_copy(first: Tensors, other: Tensors, path: str, copy: GemmLocation, tp_rank: int) -> None:
    for name in sorted(first.keys() & other.keys()):
        if not np.array_equal(first[name], other[name]):
            what = "A redundant copy of an expert differs."
            copy.note(copy.where(tp_rank, name), what, f"as in {path}", "other bits")


def _decode_slice(
    config: Mapping[str, Any], tensors: Tensors, flags: Mapping[str, Any], home: GemmLocation, tp_rank: int
) -> ExpertMatrix:
    unpacked = unlayout(config, tensors, flags)
    for problem in unpacked.problems:
        name, _, what = problem.partition(": ")
        home.note(home.where(tp_rank, name), "A value that no conversion writes.", "", what)
    return to_matrix(unpacked)


def to_matrix(unpacked: DecodedStack) -> ExpertMatrix:
    """The first expert of a decoded stack as a matrix."""
    bits, dtype = unpacked.weight_scale, unpacked.scale_dtype
    value, scale_2, flushed = to_float32(bits, dtype), unpacked.weight_scale_2, None
    if dtype in ADAPTED:
        if (second := second_scale(unpacked)) is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # of a damaged one
                value = value * second
        bits, flushed = e8m0_exponents(unpacked)
        dtype, scale_2 = "F8_E8M0", None
    return ExpertMatrix(
        codes=unpacked.codes[0],
        scale=np.atleast_2d(bits[0]),
        scale_dtype=dtype,
        scale_value=np.atleast_2d(value[0]),
        zero_point=None if unpacked.zero_point is None else unpacked.zero_point[0],
        scale_2=None if scale_2 is None else np.atleast_1d(scale_2[0]),
        bias=None if unpacked.bias is None else unpacked.bias[0],
        flushed=None if flushed is None else flushed[0],
    )
