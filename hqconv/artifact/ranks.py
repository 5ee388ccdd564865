"""Whole expert matrices back from the kernel layout: every rank's slice decoded, the slices put together.

Legend: N rows, K columns, G groups along K.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from hqconv.artifact.matrix import Home, Matrix, Note, join, run_of_rows, trim
from hqconv.artifact.opened import Artifact, Tensors
from hqconv.artifact.unlayout.form import KernelTensors, read_config
from hqconv.artifact.unlayout.numbers import to_float32
from hqconv.artifact.unlayout.read import ADAPTED, Unpacked, e8m0_exponents, second_scale, unlayout
from hqconv.artifact.unlayout.tensors import expected_tensors
from hqconv.errors import HqconvError
from hqconv.experts.block import ExpertBlock
from hqconv.planning.groups import gemm_shapes
from hqconv.schemas import artifact as names
from hqconv.schemas.layer import resolve

Good = set[tuple[str, int, int]]  # GEMM, TP rank, EP rank


def check_rank_headers(
    artifact: Artifact, block: ExpertBlock, note: Note, ranks: Iterable[tuple[int, int]] | None = None
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
                what = "A LayerConfig describes another format than the manifest."
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
) -> tuple[KernelTensors, KernelTensors]:
    """What a LayerConfig says, and what it would say if it followed the manifest; padding is its own."""
    kind = artifact.kind_of(block)
    layer = asdict(resolve(kind))
    if (
        layer["bs_dtype"] == "float8e8m0"
        and kind.param_dtype == "float16"
        and not layer["use_block_scaled_mma"]
    ):
        # The range of float16 is made up for by a second scale, which fused exponents have anyway.
        layer["weight_scale_2_type"] = (
            layer["weight_scale_2_type"] if layer["use_fused_e8m0_scale"] else "tensor"
        )
    sizes = {
        key: config[key]
        for key in ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k", "has_bias")
        if key in config
    }
    words = {
        **kind.schema.humming_fields(),
        **layer,
        **sizes,
        "a_dtype": kind.a_dtype,
        "c_dtype": kind.param_dtype,
        "sm_version": kind.target.sm_version,
    }
    found = read_config(config, flags)
    return found, replace(read_config(words, layer), shape=shape)


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


class BlockReader:
    """Reads one block's experts out of an opened artifact's rank files; `read` may be called from any thread."""

    def __init__(self, artifact: Artifact, block: ExpertBlock, note: Note) -> None:
        """Looks at the headers of all ranks first; what is wrong with them is noted, the others are `good`."""
        self._artifact, self._block = artifact, block
        self.schema = artifact.schema_of(block.name)
        self.good = check_rank_headers(artifact, block, note)

    def read(self, gemm: str, expert: int, note: Note) -> dict[str, Matrix]:
        """The whole projections of one GEMM of one expert; none of them if a rank's slice cannot be decoded.

        Copies of a redundant expert are compared bit for bit with the first, which is the one decoded.
        """
        artifact, block = self._artifact, self._block
        places = artifact.grid.homes(block.num_experts)[expert]
        home, *copies = (Home(block.name, gemm, expert, *place, note, artifact.grid.tp) for place in places)
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

    def _slice(self, tp_rank: int, home: Home, copies: list[Home]) -> Matrix | None:
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


def _compare_copy(first: Tensors, other: Tensors, path: str, copy: Home, tp_rank: int) -> None:
    for name in sorted(first.keys() & other.keys()):
        if not np.array_equal(first[name], other[name]):
            what = "A redundant copy of an expert differs."
            copy.note(copy.where(tp_rank, name), what, f"as in {path}", "other bits")


def _decode_slice(
    config: Mapping[str, Any], tensors: Tensors, flags: Mapping[str, Any], home: Home, tp_rank: int
) -> Matrix:
    unpacked = unlayout(config, tensors, flags)
    for problem in unpacked.problems:
        name, _, what = problem.partition(": ")
        home.note(home.where(tp_rank, name), "A value that no conversion writes.", "", what)
    return to_matrix(unpacked)


def to_matrix(unpacked: Unpacked) -> Matrix:
    """The first expert of a decoded stack as a matrix."""
    bits, dtype = unpacked.weight_scale, unpacked.scale_dtype
    value, scale_2, flushed = to_float32(bits, dtype), unpacked.weight_scale_2, None
    if dtype in ADAPTED:
        if (second := second_scale(unpacked)) is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # of a damaged one
                value = value * second
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
