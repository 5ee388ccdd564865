"""Whole expert matrices back from an artifact: every rank's slice decoded, the slices put together.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hqconv.artifact.opened import Artifact, Tensors
from hqconv.artifact.unlayout.form import PADDED_E5M0, KernelTensors, read_config, to_float32
from hqconv.artifact.unlayout.read import e8m0_exponents, unlayout
from hqconv.errors import HqconvError
from hqconv.experts.block import ExpertBlock
from hqconv.plan.plan import gemm_shapes
from hqconv.schemas import artifact as names
from hqconv.schemas.target import TargetSchema

Array = NDArray[Any]
Note = Callable[[str, str, object, object], None]  # where, what, expected, found
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8e8m0": "F8_E8M0"}
_SAFETENSORS |= {"float8e4m3": "F8_E4M3", "float8e5m2": "F8_E5M2", "float8e5m3": "U8"}


@dataclass(frozen=True, eq=False)
class Matrix:
    """One projection of one expert, or a slice of it, in logical order; floats as unsigned bit patterns.

    codes uint8 [N, K]; scale [N, G], [N, 1] (channel), [N/bn, K/bk] (block) or [1, 1] (tensor), its dtype, and
    what the kernels take it for, float32 (with a float16 e8m0's second scale multiplied in); zero_point
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


# --- the kernel layout -------------------------------------------------------------------------------------


def check_rank_headers(artifact: Artifact, block: ExpertBlock, note: Note) -> set[tuple[str, int, int]]:
    """The (GEMM, TP rank, EP rank) whose LayerConfig and dtypes are those of the manifest's schema."""
    good = set()
    for tp_rank, ep_rank in artifact.grid.ranks:
        path = names.rank_file(block.name, tp_rank, ep_rank)
        num_local = len(artifact.grid.local_experts(block.num_experts, ep_rank))
        for gemm, shape in gemm_shapes(block, artifact.grid.tp, artifact.schema).items():
            try:
                config = artifact.layer_config(block.name, gemm, tp_rank, ep_rank)
                found, expected = _forms(artifact, config, artifact.flags(block.name, gemm), shape)
                for name, dtype in _dtypes(expected).items():
                    _check_entry(artifact, path, f"{block.name}.{gemm}_{name}", dtype, num_local, note)
            except (HqconvError, OSError) as error:
                _note_error(f"{path}, {gemm}", error, note)
                continue
            wrong = [f.name for f in fields(found) if getattr(found, f.name) != getattr(expected, f.name)]
            if wrong:
                what = "A LayerConfig describes another format than the manifest."
                texts = [
                    ", ".join(f"{name} {getattr(form, name)}" for name in wrong) for form in (expected, found)
                ]
                note(f"{path}, metadata {gemm}", what, *texts)
            else:
                good.add((gemm, tp_rank, ep_rank))
    return good


def _forms(
    artifact: Artifact, config: Mapping[str, Any], flags: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[KernelTensors, KernelTensors]:
    """What a LayerConfig says, and what it would say if it followed the manifest; padding is its own."""
    found = read_config(config, flags)
    param = artifact.param_dtype
    words = {**config, **artifact.schema.humming_fields(), "a_dtype": param, "c_dtype": param}
    if (artifact.schema.bs_dtype, param) == ("float8e8m0", "float16"):
        words["weight_scale_2_type"] = "tensor"
    return found, replace(read_config(words, flags), shape=shape)


def _dtypes(form: KernelTensors) -> dict[str, str]:
    """Every kernel tensor's dtype in the file's header."""
    scale = "F8_E8M0" if form.scale_dtype == PADDED_E5M0 else form.scale_dtype
    dtypes = {"weight": "I32", "weight_scale": scale}
    if form.zero_kind != "none":
        dtypes["zero_point"] = "I32" if form.zero_kind == "int" else form.param_dtype
    if form.scale_2_type != "none":
        dtypes["weight_scale_2"] = "F32" if form.scale_2_type == "tensor" else form.param_dtype
    if form.has_bias:
        dtypes["bias"] = form.param_dtype
    return dtypes


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


def _note_error(where: str, error: HqconvError | OSError, note: Note) -> None:
    if isinstance(error, HqconvError):
        inside = f"{where}: {error.where}" if error.where and error.where not in where else where
        note(inside, f"Weights cannot be decoded: {error.what}", error.expected, error.found)
    else:
        note(where, "Weights cannot be read.", "", error.strerror)


@dataclass(frozen=True)
class _Home:
    """One GEMM of one expert on one EP rank; `path` and `where` say it of a TP rank, and name a tensor."""

    block: str
    gemm: str
    expert: int
    ep_rank: int
    local: int
    note: Note
    num_tp: int

    def path(self, tp_rank: int) -> str:
        return names.rank_file(self.block, tp_rank, self.ep_rank)

    def where(self, tp_rank: int, tensor: str) -> str:
        tensor = f"{self.block}.{self.gemm}_{tensor}"
        return f"{self.path(tp_rank)}, tensor {tensor}, expert {self.expert} (local {self.local})"


def read_kernel_expert(
    artifact: Artifact,
    block: ExpertBlock,
    gemm: str,
    expert: int,
    good: set[tuple[str, int, int]],
    note: Note,
) -> dict[str, Matrix]:
    """The whole projections of one GEMM of one expert; none of them if a rank's slice cannot be decoded.

    Copies of a redundant expert are compared bit for bit with the first, which is the one decoded.
    """
    slices: list[Matrix] = []
    places = artifact.grid.homes(block.num_experts)[expert]
    num_tp = artifact.grid.tp
    home, *copies = (_Home(block.name, gemm, expert, *place, note, num_tp) for place in places)
    for tp_rank in range(artifact.grid.tp):
        if (gemm, tp_rank, home.ep_rank) not in good:
            continue
        try:
            first = artifact.read_expert(block.name, gemm, tp_rank, home.ep_rank, home.local)
            for copy in copies:
                other = artifact.read_expert(block.name, gemm, tp_rank, copy.ep_rank, copy.local)
                _compare_copy(first, other, home.path(tp_rank), copy, tp_rank)
            config = artifact.layer_config(block.name, gemm, tp_rank, home.ep_rank)
            slices.append(_decode_slice(config, first, artifact.flags(block.name, gemm), home, tp_rank))
        except (HqconvError, OSError) as error:
            _note_error(f"{home.path(tp_rank)}, {gemm} of expert {expert} (local {home.local})", error, note)
    if len(slices) < artifact.grid.tp:
        return {}
    size, schema = block.intermediate_size, artifact.schema
    if gemm == "w2":
        return {"w2": _trim(_join(slices, 1, schema, home), 1, size, home)}
    roles = [role for role in ("w1", "w3") if role in block.roles]
    parts = [[_rows(one, i, len(roles)) for one in slices] for i in range(len(roles))]
    joined = {role: _join(part, 0, schema, home) for role, part in zip(roles, parts, strict=True)}
    return {role: _trim(one, 0, size, home) for role, one in joined.items()}


def _compare_copy(first: Tensors, other: Tensors, path: str, copy: _Home, tp_rank: int) -> None:
    for name in sorted(first.keys() & other.keys()):
        if not np.array_equal(first[name], other[name]):
            what = "A redundant copy of an expert differs."
            copy.note(copy.where(tp_rank, name), what, f"as in {path}", "other bits")


def _decode_slice(
    config: Mapping[str, Any], tensors: Tensors, flags: Mapping[str, Any], home: _Home, tp_rank: int
) -> Matrix:
    unpacked = unlayout(config, tensors, flags)
    for problem in unpacked.problems:
        name, _, what = problem.partition(": ")
        home.note(home.where(tp_rank, name), "A value that no conversion writes.", "", what)
    bits, dtype = unpacked.weight_scale, unpacked.scale_dtype
    value, scale_2, flushed = to_float32(bits, dtype), unpacked.weight_scale_2, None
    if dtype == PADDED_E5M0:
        if scale_2 is not None:
            value = value * to_float32(scale_2, "F32")[:, None, None]
        bits, flushed = e8m0_exponents(unpacked)
        dtype, scale_2 = "F8_E8M0", None
    return Matrix(
        codes=unpacked.codes[0],
        scale=np.atleast_2d(bits[0]),
        scale_dtype=dtype,
        scale_value=np.atleast_2d(value[0]),
        zero_point=None if unpacked.zero_point is None else unpacked.zero_point[0],
        scale_2=None if scale_2 is None else np.atleast_1d(scale_2[0]),
        bias=None if unpacked.bias is None else unpacked.bias[0],
        flushed=None if flushed is None else flushed[0],
    )


def _rows(matrix: Matrix, part: int, parts: int) -> Matrix:
    """One of `parts` equal runs of rows; what all rows share stays."""

    def cut(array: Any) -> Any:
        if array is None or array.shape[0] == 1:
            return array
        share = array.shape[0] // parts
        return array[part * share : (part + 1) * share]

    fields = ("codes", "scale", "scale_value", "zero_point", "scale_2", "bias", "flushed")
    return replace(matrix, **{field: cut(getattr(matrix, field)) for field in fields})


def _join(slices: Sequence[Matrix], axis: int, schema: TargetSchema, home: _Home) -> Matrix:
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


def _trim(matrix: Matrix, axis: int, size: int, home: _Home) -> Matrix:
    """Take the last TP rank's padding off along `axis`; its rows must give zeros."""
    total = matrix.codes.shape[axis]
    if total == size:
        return matrix
    is_e8m0 = matrix.scale_dtype == "F8_E8M0"  # has no zero; the codes below are zero anyway

    def cut(field: str) -> Any:
        array = getattr(matrix, field)
        is_along = array is not None and array.ndim > axis and array.shape[axis] > 1
        if not is_along or (field == "bias" and axis == 1):
            return array
        kept = array.shape[axis] * size // total
        rest = array[kept:] if axis == 0 else array[:, kept:]
        if field in ("codes", "bias", "zero_point") or (field == "scale" and not is_e8m0):
            _check_padding(rest, field, home)
        return array[:kept] if axis == 0 else array[:, :kept]

    names_ = [one.name for one in fields(matrix) if one.name != "scale_dtype"]
    return replace(matrix, **{name: cut(name) for name in names_})


def _check_padding(rest: Array, field: str, home: _Home) -> None:
    if rest.any():
        tensor = {"codes": "weight", "scale": "weight_scale"}.get(field, field)
        what, found = "The padding of the last TP rank is not zero.", f"{np.count_nonzero(rest)} values"
        home.note(home.where(home.num_tp - 1, tensor), what, "zero", found)


def _merge(parts: Sequence[Any], axis: int | None, tensor: str, home: _Home | None) -> Any:
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


def _merge_bias(parts: Sequence[Any], axis: int, home: _Home) -> Any:
    """w13's bias is cut; w2's is on TP rank 0 and zero elsewhere, since ranks are summed."""
    if parts[0] is None or axis == 0:
        return _merge(parts, 0, "bias", home)
    for tp_rank, part in enumerate(parts[1:], start=1):
        if part.any():
            what, found = "The w2 bias is on more than TP rank 0.", f"{np.count_nonzero(part)} values"
            home.note(home.where(tp_rank, "bias"), what, "zero, since ranks are summed", found)
    return parts[0]


# --- packed tensors: the checkpoint layout, and what the quantizer makes -----------------------------------


def read_packed_expert(
    artifact: Artifact, block: ExpertBlock, role: str, expert: int, shards: Mapping[str, str], note: Note
) -> Matrix | None:
    """One projection from the checkpoint layout; `shards` is tensor name → file. None where it cannot be read."""
    base = block.module(expert, role) + "."
    shape = (block.hidden_size, block.intermediate_size)
    try:
        dtypes, bits = artifact.read_module(base, shards)
    except (HqconvError, OSError) as error:
        _note_error(f"tensors {base}*", error, note)
        return None
    expected = packed_shapes(shape if role == "w2" else shape[::-1], artifact.schema, artifact.param_dtype)
    found = {name: (dtypes[name], array.shape) for name, array in bits.items() if name != "bias"}
    if found != expected:
        where = f"{shards.get(base + 'weight', 'no file')}, tensors {base}*"
        note(where, "Packed tensors are not those of the manifest's schema.", expected, found)
        return None
    return unpack(bits, artifact.schema, dtypes["weight_scale"])


def packed_shapes(
    shape: tuple[int, int], schema: TargetSchema, param_dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of one matrix's packed tensors, worked out from the schema alone."""
    (n, k), param = shape, _SAFETENSORS[param_dtype]
    group = schema.weight_scale_group_size or k
    rows = n // (schema.weight_scale_group_size_n or 1)
    is_wide = schema.weight_scale_type in ("block", "tensor")
    dtype = "F32" if is_wide else _SAFETENSORS[schema.bs_dtype or param_dtype]
    scale: tuple[int, ...] = (1,) if schema.weight_scale_type == "tensor" else (rows, k // group)
    shapes = {"weight": ("I32", (n, k * schema.num_bits // 32)), "weight_scale": (dtype, scale)}
    if schema.has_zero_point:
        is_float = schema.is_fp_zero_point
        packed_rows = n if is_float else n * schema.num_bits // 32
        shapes["zero_point"] = (param if is_float else "I32", (packed_rows, k // group))
    if schema.weight_scale_2_type == "tensor":
        shapes["weight_scale_2"] = ("F32", (1,))
    elif schema.weight_scale_2_type == "channel":
        shapes["weight_scale_2"] = (param, (n,))
    return shapes


def unpack(bits: Mapping[str, Array], schema: TargetSchema, scale_dtype: str) -> Matrix:
    """A matrix from Humming's packed tensors as raw bits; shares no code with the packer."""
    zero, scale = bits.get("zero_point"), np.atleast_2d(bits["weight_scale"])
    if zero is not None and not schema.is_fp_zero_point:
        zero = np.ascontiguousarray(unpack_codes(np.ascontiguousarray(zero.T), schema.num_bits).T)
    return Matrix(
        codes=unpack_codes(bits["weight"], schema.num_bits),
        scale=scale,
        scale_dtype=scale_dtype,
        scale_value=to_float32(scale, scale_dtype),
        zero_point=zero,
        scale_2=bits.get("weight_scale_2"),
        bias=bits.get("bias"),
    )


def unpack_codes(words: Array, num_bits: int) -> Array:
    """Little-endian bit fields of each row of uint32 words [N, W] as uint8 [N, 32 W / num_bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    num_rows = data.shape[0]
    if num_bits in (1, 2, 4, 8):
        codes = np.empty((num_rows, data.shape[1], 8 // num_bits), np.uint8)
        for i in range(8 // num_bits):
            codes[:, :, i] = (data >> np.uint8(i * num_bits)) & np.uint8((1 << num_bits) - 1)
        return codes.reshape(num_rows, -1)
    # Eight codes fill num_bits whole bytes.
    runs = data.reshape(num_rows, -1, num_bits)
    codes = np.empty((num_rows, runs.shape[1], 8), np.uint8)
    for row in range(num_rows):  # by rows: the 64-bit words stay in the cache
        word = np.zeros(runs.shape[1], np.uint64)
        for i in range(num_bits):
            word |= runs[row, :, i].astype(np.uint64) << np.uint64(8 * i)
        for i in range(8):
            codes[row, :, i] = (word >> np.uint64(i * num_bits)) & np.uint64((1 << num_bits) - 1)
    return codes.reshape(num_rows, -1)
