"""Whole matrices of many experts at once, from the kernel layout or from packed tensors, on any device.

What `expert_reader` does for one expert, by array operations. Nothing here says what is wrong: `MatrixStack.wrong`
marks the experts for which those should be asked.

Legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hqconv.artifact.expert_reader import Good, code_table
from hqconv.artifact.reader import Artifact
from hqconv.errors import VerificationError
from hqconv.layout_decoder.layout_form import LayoutForm, read_config
from hqconv.layout_decoder.stack_scales import float_values, look_up, unpack_fields
from hqconv.layout_decoder.stacks import MatrixStack, bits_of, read_stack
from hqconv.layout_decoder.tensors import expected_tensors
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import code_of, code_of_torch, num_bits
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.weight_schema import WeightSchema

_ALIGNMENT = 64
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_VALUES = tuple(one.name for one in fields(MatrixStack) if one.name not in ("scale_dtype", "wrong"))


# --- bytes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Region:
    """One kernel tensor of some experts in a buffer: every `refs` entry is an expert's."""

    start: int
    path: str
    refs: tuple[tuple[str, TensorRef], ...]  # file, byte range
    shape: tuple[int, ...]
    width: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """As bit patterns [len(refs), …]."""
        size = len(self.refs) * math.prod(self.shape) * self.width // 8
        raw = buffer[self.start : self.start + size].view(_INTEGERS[self.width])
        return raw.view(len(self.refs), *self.shape)


@dataclass(frozen=True)
class StoredExperts:
    """Where the kernel tensors of some experts go in a buffer: of their first homes, and of all their copies.

    Keys are (GEMM, TP rank, tensor). `copies` are regions as `firsts`, of the experts at `copied` in the batch.
    """

    firsts: Mapping[tuple[str, int, str], _Region]
    copies: Mapping[tuple[str, int, str], _Region]
    copied: tuple[int, ...]
    num_bytes: int

    def places(self) -> Iterator[tuple[str, TensorRef, int]]:
        """Every range with its file, and its start in the buffer."""
        for region in (*self.firsts.values(), *self.copies.values()):
            size = math.prod(region.shape) * region.width // 8
            for i, (path, ref) in enumerate(region.refs):
                yield path, ref, region.start + i * size


class BatchReader:
    """Reads some experts of one block out of an opened artifact's rank files. Any thread may."""

    def __init__(self, artifact: Artifact, block: MoeLayer, good: Good) -> None:
        """`good`: of `check_rank_headers`. Raises VerificationError unless every rank's tensors are as they must be."""
        self.artifact, self.block = artifact, block
        self._forms: dict[str, LayoutForm] = {}
        for gemm in names.GEMMS:
            for tp_rank, ep_rank in artifact.grid.ranks:
                if (gemm, tp_rank, ep_rank) not in good:
                    raise VerificationError("A rank's tensors are not as the manifest says.")
                if gemm not in self._forms:  # the same of all ranks that are good
                    config = artifact.layer_config(block.name, gemm, tp_rank, ep_rank)
                    self._forms[gemm] = read_config(config, artifact.flags(block.name, gemm))
                self._check_entries(gemm, tp_rank, ep_rank)

    def _check_entries(self, gemm: str, tp_rank: int, ep_rank: int) -> None:
        prefix, found = f"{self.block.name}.{gemm}_", {}
        for name, ref in self.artifact.header(names.rank_file(self.block.name, tp_rank, ep_rank))[0].items():
            if name.startswith(prefix) and not names.is_input_scale(name):
                found[name.removeprefix(prefix)] = (num_bits(ref.dtype), ref.shape)
        num_local = len(self.artifact.grid.local_experts(self.block.num_experts, ep_rank))
        expected = expected_tensors(self._forms[gemm])
        if found != {n: (num_bits(code), (num_local, *shape)) for n, (code, shape) in expected.items()}:
            raise VerificationError("A rank's tensors are not those that its layer config asks for.")

    def plan(self, experts: Sequence[int]) -> StoredExperts:
        """Where the bytes of some experts go in a buffer."""
        homes = self.artifact.grid.homes(self.block.num_experts)
        firsts = [homes[expert][0] for expert in experts]
        copies = [(i, home) for i, expert in enumerate(experts) for home in homes[expert][1:]]
        at = 0
        regions: tuple[dict[Any, _Region], dict[Any, _Region]] = ({}, {})
        for of_kind, places in zip(regions, (firsts, [home for _, home in copies]), strict=True):
            for key in self._keys() if places else ():
                of_kind[key] = region = self._region(key, places, at)
                at += -(-sum(ref.num_bytes for _, ref in region.refs) // _ALIGNMENT) * _ALIGNMENT
        return StoredExperts(*regions, tuple(i for i, _ in copies), at)

    def _keys(self) -> Iterator[tuple[str, int, str]]:
        for gemm, form in self._forms.items():
            for tp_rank in range(self.artifact.grid.tp):
                for name in expected_tensors(form):
                    yield gemm, tp_rank, name

    def _region(self, key: tuple[str, int, str], places: Sequence[tuple[int, int]], start: int) -> _Region:
        gemm, tp_rank, name = key
        refs = []
        for ep_rank, local in places:
            path = names.rank_file(self.block.name, tp_rank, ep_rank)
            refs.append(
                (path, self.artifact.header(path)[0][f"{self.block.name}.{gemm}_{name}"].entry(local))
            )
        code, shape = expected_tensors(self._forms[gemm])[name]
        return _Region(start, refs[0][0], tuple(refs), shape, num_bits(code))

    def read(self, stored: StoredExperts, buffer: memoryview) -> None:
        """Fill a buffer on the host. Raises VerificationError or OSError."""
        for path, ref, start in stored.places():
            self.artifact.read(path, buffer[start : start + ref.num_bytes], ref.offset_bytes)

    def stacks(self, stored: StoredExperts, buffer: torch.Tensor) -> dict[str, MatrixStack]:
        """All projections of the experts, put together from their TP slices; `buffer` is uint8 on any device."""
        found: dict[str, MatrixStack] = {}
        for gemm in names.GEMMS:
            slices = [self._slice(stored, buffer, gemm, t) for t in range(self.artifact.grid.tp)]
            roles = [r for r in (("w1", "w3") if gemm == "w13" else ("w2",)) if r in self.block.roles]
            axis = 1 if gemm == "w2" else 0
            for index, role in enumerate(roles):
                parts = [_run_of_rows(one, index, len(roles)) for one in slices]
                whole = _join(parts, axis, self.artifact.schema_of(self.block.name))
                found[role] = _trim(whole, axis, self.block.intermediate_size)
        return found

    def _slice(self, stored: StoredExperts, buffer: torch.Tensor, gemm: str, tp_rank: int) -> MatrixStack:
        """One TP rank's slices; a copy that differs is wrong."""
        expected = expected_tensors(self._forms[gemm])
        bits = {name: stored.firsts[gemm, tp_rank, name].view(buffer) for name in expected}
        stack = read_stack(self._forms[gemm], bits)
        if not stored.copied:
            return stack
        positions = torch.tensor(stored.copied, device=buffer.device)
        unequal = torch.zeros(len(stack.wrong), dtype=torch.int64, device=buffer.device)
        for name, first in bits.items():
            copy = stored.copies[gemm, tp_rank, name].view(buffer)
            unequal.index_add_(0, positions, (copy != first[positions]).reshape(len(copy), -1).sum(1))
        return replace(stack, wrong=stack.wrong | (unequal > 0))


# --- slices ------------------------------------------------------------------------------------------------


def _run_of_rows(stack: MatrixStack, part: int, parts: int) -> MatrixStack:
    """One of `parts` equal runs of rows; what all rows share stays."""

    def cut(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None or values.size(1) == 1:
            return values
        share = values.size(1) // parts
        return values[:, part * share : (part + 1) * share]

    values: dict[str, Any] = {name: cut(getattr(stack, name)) for name in _VALUES}
    return replace(stack, **values)


def _join(slices: Sequence[MatrixStack], axis: int, schema: WeightSchema) -> MatrixStack:
    """TP slices side by side along rows (0) or columns (1); where what is not cut differs, the expert is wrong."""
    first = slices[0]
    if len(slices) == 1:
        return first
    is_shared = schema.weight_scale_type == "tensor" or (schema.weight_scale_type == "channel" and axis == 1)
    scale_axis = None if is_shared else axis
    axes = dict.fromkeys(("scale", "scale_value", "zero_point", "flushed"), scale_axis)
    axes |= {"codes": axis, "bias": None if axis == 1 else 0}
    axes |= {"scale_2": 0 if schema.weight_scale_2_type == "channel" and axis == 0 else None}
    joined: dict[str, Any] = {}
    wrong = functools.reduce(torch.logical_or, (one.wrong for one in slices))
    for name, along in axes.items():
        parts = [getattr(one, name) for one in slices]
        if parts[0] is None:
            continue
        joined[name] = parts[0] if along is None else torch.cat(parts, along + 1)
        for part in parts[1:] if along is None else ():
            # Ranks are summed: w2's bias is on the first one only.
            other = torch.zeros_like(part) if name == "bias" else parts[0]
            wrong = wrong | (part != other).flatten(1).any(1)
    return replace(first, wrong=wrong, **joined)


def _trim(stack: MatrixStack, axis: int, size: int) -> MatrixStack:
    """Take the last TP rank's padding off; an expert where it is not zero is wrong. e8m0 scales are the last again."""
    total = stack.codes.size(axis + 1)
    if total == size:
        return stack
    checked = ("codes", "bias", "zero_point", "scale", "scale_2")
    cut: dict[str, Any] = {}
    wrong = stack.wrong
    for name in _VALUES:
        values = getattr(stack, name)
        is_along = values is not None and values.ndim > axis + 1 and values.size(axis + 1) > 1
        if is_along and not (name == "bias" and axis == 1):
            kept = values.size(axis + 1) * size // total
            cut[name], rest = values.split([kept, values.size(axis + 1) - kept], axis + 1)
            if name in checked:
                is_repeated = name == "scale" and stack.scale_dtype == "F8_E8M0"
                last = cut[name].narrow(axis + 1, kept - 1, 1) if is_repeated else 0
                wrong = wrong | (rest != last).flatten(1).any(1)
    return replace(stack, wrong=wrong, **cut)


# --- packed tensors, and values ----------------------------------------------------------------------------


def unpack_stack(packed: Mapping[str, torch.Tensor], schema: WeightSchema) -> MatrixStack:
    """Matrices from Humming's packed tensors [E, …]; shares no code with the packer."""
    weight, scale, zero = packed["weight"], packed["weight_scale"], packed.get("zero_point")
    dtype = code_of_torch(scale.dtype)
    if zero is not None:
        is_float = schema.is_fp_zero_point
        zero = bits_of(zero) if is_float else unpack_fields(zero.mT, schema.num_bits).mT
    bits = bits_of(scale)
    bits = bits.view(-1, 1, 1) if bits.ndim == 1 else bits
    second, bias = packed.get("weight_scale_2"), packed.get("bias")
    return MatrixStack(
        codes=unpack_fields(weight, schema.num_bits),
        scale=bits,
        scale_dtype=dtype,
        scale_value=float_values(bits, dtype),
        wrong=torch.zeros(len(weight), dtype=torch.bool, device=weight.device),
        zero_point=zero,
        scale_2=None if second is None else bits_of(second).view(len(weight), -1),
        bias=None if bias is None else bits_of(bias),
    )


def differs(found: MatrixStack, expected: MatrixStack) -> torch.Tensor:
    """Experts whose values are not equal, bool [E]; a flushed scale may be anything up to the one that it shows."""
    wrong = found.wrong | expected.wrong
    if found.scale_dtype != expected.scale_dtype:
        return torch.ones_like(wrong)
    for name in ("codes", "scale", "zero_point", "scale_2", "bias"):
        left, right = getattr(found, name), getattr(expected, name)
        if left is None and right is None:
            continue
        if left is None or right is None or left.shape != right.shape:
            return torch.ones_like(wrong)
        unequal = left != right
        if name == "scale" and found.flushed is not None:
            unequal = torch.where(found.flushed, right > left, unequal)
        wrong = wrong | unequal.flatten(1).any(1)
    return wrong


def decode(stack: MatrixStack, schema: WeightSchema, param_dtype: str) -> torch.Tensor:
    """The decoded weights ((value - zero) * scale) * scale_2, float32 [E, N, K]; every step is rounded."""
    num_experts, num_rows, num_columns = stack.codes.shape
    _, runs, groups = stack.scale_value.shape
    values = look_up(_code_values(schema, stack.codes.device), stack.codes)
    values = values.view(num_experts, runs, num_rows // runs, groups, num_columns // groups)
    if stack.zero_point is not None:
        dtype = code_of(param_dtype) if schema.is_fp_zero_point else "codes"
        zero = float_values(stack.zero_point, dtype)  # [E, N, G | 1]
        values = values - zero.reshape(num_experts, runs, num_rows // runs, -1, 1)
    values = values * stack.scale_value.reshape(num_experts, runs, 1, groups, 1)
    values = values.view(num_experts, num_rows, num_columns)
    if stack.scale_2 is not None:
        is_tensor = schema.weight_scale_2_type == "tensor"
        values = values * float_values(stack.scale_2, "F32" if is_tensor else code_of(param_dtype)).unsqueeze(
            2
        )
    return values


@functools.lru_cache(maxsize=64)
def _code_values(schema: WeightSchema, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(code_table(schema)).to(device)
