"""Unsharded experts of an artifact: reassembled from its ranks' slices, or read from packed tensors, on any device.

Many experts in one buffer (`plan`, `fill`, `decode`), where `DecodedStack.wrong` marks the experts that need to be read
alone; or one expert by the same code (`read`), with a note for everything that is wrong.

Legend: E experts, N rows, K columns, G groups along K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hqconv.artifact.reader import Artifact, Note, note_error
from hqconv.errors import HqconvError, VerificationError
from hqconv.layout_decoder.decode import (
    DecodedStack,
    bits_of_arrays,
    decode_layout,
    decode_packed,
    packed_shapes,
)
from hqconv.layout_decoder.layout_form import LayoutForm, expected_tensors
from hqconv.layout_decoder.scales import Fault
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMMS, rank_file
from hqconv.schemas.grid import tp_slices
from hqconv.schemas.tensors import TensorRef, num_bits
from hqconv.schemas.weight_schema import WeightSchema

TENSOR_OF = {  # field of a DecodedStack → tensor of a file
    "codes": "weight",
    "scale": "weight_scale",
    "zero_point": "zero_point",
    "scale_2": "weight_scale_2",
    "bias": "bias",
}
_VALUES = (*TENSOR_OF, "scale_value", "flushed")
_ALIGNMENT = 64
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def roles_of(layer: MoeLayer, gemm: str) -> list[str]:
    """Return the projections of a GEMM: `w1` (if gated) and `w3`, or `w2`; all of a linear group are of w13."""
    if layer.is_linear:
        return [*layer.roles] if gemm == "w13" else []
    return [role for role in (("w1", "w3") if gemm == "w13" else ("w2",)) if role in layer.roles]


@dataclass(frozen=True)
class _Region:
    """One kernel tensor of some experts in a buffer: each of `refs` is the tensor of one expert."""

    start: int
    refs: tuple[tuple[str, TensorRef], ...]  # file, byte range
    shape: tuple[int, ...]
    width: int

    @property
    def expert_bytes(self) -> int:
        return math.prod(self.shape) * self.width // 8

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the bit patterns [len(refs), …]."""
        raw = buffer[self.start : self.start + len(self.refs) * self.expert_bytes]
        return raw.view(_INTEGERS[self.width]).view(len(self.refs), *self.shape)


@dataclass(frozen=True)
class StoredExperts:
    """Positions of the kernel tensors of some experts in a buffer of `num_bytes`.

    Keys are (GEMM, TP rank, tensor). firsts: every expert on its first EP rank. copies: further copies of the experts
    at the positions `copied` of the batch. forms: layout of each GEMM.
    """

    forms: Mapping[str, LayoutForm]
    firsts: Mapping[tuple[str, int, str], _Region]
    copies: Mapping[tuple[str, int, str], _Region]
    copied: tuple[int, ...]
    num_bytes: int


class ExpertReader:
    """Reads the experts of one MoE layer out of an opened artifact's rank files; any thread may call it."""

    def __init__(self, artifact: Artifact, layer: MoeLayer, note: Note) -> None:
        """Check the headers of all ranks, and note errors; `forms` has the sound ones: (GEMM, TP, EP rank) → form."""
        self.artifact = artifact
        self.layer = layer
        self.schema = artifact.schema_of(layer.name)
        self.grid = artifact.grid
        self.forms = artifact.rank_forms(layer, note)

    def read(self, gemm: str, expert: int, note: Note) -> dict[str, DecodedStack]:
        """Read the whole projections of one GEMM of one expert, E = 1, and note every fault by its place.

        None where a rank's header is not as the manifest says, which `__init__` has noted, or a file cannot be read.
        Copies of a redundant expert are compared bit for bit with the first, which is decoded.
        """
        homes = self.grid.homes(self.layer.num_experts)[expert]
        ranks = range(self.grid.tp)
        (ep_rank, local), *copies = homes
        forms = {self.forms.get((gemm, tp_rank, home)) for tp_rank in ranks for home, _ in homes}
        form = forms.pop()
        if form is None or forms:
            return {}

        def where(tp_rank: int, tensor: str, ep_rank: int, local: int) -> str:
            path = rank_file(self.layer.name, tp_rank, ep_rank)
            return (
                f"{path}, tensor {self.layer.name}.{gemm}_{tensor}, expert {expert} (local {local})"
            )

        first_path = rank_file(self.layer.name, 0, ep_rank)
        try:
            stored = self.plan([expert], {gemm: form})
            buffer = torch.empty(stored.num_bytes, dtype=torch.uint8)
            self.fill(stored, buffer.numpy().data)
            found = self.decode(stored, buffer)
        except (HqconvError, OSError) as error:
            note_error(f"{first_path}, {gemm} of expert {expert} (local {local})", error, note)
            return {}
        for fault in (fault for one in found.values() for fault in one.faults if fault.tensor):
            if bool(fault.wrong.any()):
                note(
                    where(fault.tp_rank, fault.tensor, ep_rank, local),
                    fault.what,
                    *fault.describe(0),
                )
        for (_, tp_rank, tensor), region in stored.copies.items():
            bits = region.view(buffer)
            own = stored.firsts[gemm, tp_rank, tensor].view(buffer)[0]
            for copy, home in enumerate(copies):
                if not torch.equal(bits[copy], own):
                    expected = f"as on EP rank {ep_rank}"
                    note(
                        where(tp_rank, tensor, *home),
                        "A redundant copy of an expert differs.",
                        expected,
                        "other bits",
                    )
        return found

    def _assemble(self, gemm: str, slices: Sequence[DecodedStack]) -> dict[str, DecodedStack]:
        """Join the slices of all TP ranks to the projections of a GEMM."""
        axis = 2 if gemm == "w2" else 1
        roles = roles_of(self.layer, gemm)
        sizes = [
            part.end - part.begin
            for part in tp_slices(self.layer.intermediate_size, self.grid, self.schema)
        ]
        found = {}
        for index, role in enumerate(roles):
            parts = (_run_of_rows(one, index, len(roles)) for one in slices)
            cut = [
                _trim(one, axis, size, rank)
                for rank, (one, size) in enumerate(zip(parts, sizes, strict=True))
            ]
            found[role] = join(cut, axis, self.schema.of(role))
        return found

    @functools.cached_property
    def batch_forms(self) -> dict[str, LayoutForm]:
        """Return GEMM → form, of all ranks. Raises VerificationError where a rank differs from the manifest."""
        forms: dict[str, LayoutForm] = {}
        for gemm in GEMMS:
            for tp_rank, ep_rank in self.grid.ranks:
                form = self.forms.get((gemm, tp_rank, ep_rank))
                if form is None or form != forms.setdefault(gemm, form):
                    raise VerificationError("A rank's tensors are not as the manifest says.")
        return forms

    def plan(
        self, experts: Sequence[int], forms: Mapping[str, LayoutForm] | None = None
    ) -> StoredExperts:
        """Plan the positions of some experts' bytes in a buffer. Raises as `batch_forms`, unless `forms` are given."""
        forms = self.batch_forms if forms is None else forms
        homes = self.grid.homes(self.layer.num_experts)
        firsts = [homes[expert][0] for expert in experts]
        copies = [(i, home) for i, expert in enumerate(experts) for home in homes[expert][1:]]
        start = 0
        regions: tuple[dict[Any, _Region], dict[Any, _Region]] = ({}, {})
        for of_kind, ranks in zip(regions, (firsts, [home for _, home in copies]), strict=True):
            for gemm, form in forms.items() if ranks else ():
                for tp_rank in range(self.grid.tp):
                    for name, (code, shape) in expected_tensors(form).items():
                        refs = tuple(self._entry(gemm, tp_rank, name, *rank) for rank in ranks)
                        of_kind[gemm, tp_rank, name] = _Region(start, refs, shape, num_bits(code))
                        start += (
                            -(-sum(ref.num_bytes for _, ref in refs) // _ALIGNMENT) * _ALIGNMENT
                        )
        return StoredExperts(forms, *regions, tuple(i for i, _ in copies), start)

    def _entry(
        self, gemm: str, tp_rank: int, name: str, ep_rank: int, local: int
    ) -> tuple[str, TensorRef]:
        path = rank_file(self.layer.name, tp_rank, ep_rank)
        return path, self.artifact.header(path)[0][f"{self.layer.name}.{gemm}_{name}"].entry(local)

    def fill(self, stored: StoredExperts, buffer: memoryview) -> None:
        """Read the bytes into a buffer on the host. Raises VerificationError or OSError."""
        for region in (*stored.firsts.values(), *stored.copies.values()):
            for i, (path, ref) in enumerate(region.refs):
                start = region.start + i * region.expert_bytes
                self.artifact.read(path, buffer[start : start + ref.num_bytes], ref.offset_bytes)

    def decode(self, stored: StoredExperts, buffer: torch.Tensor) -> dict[str, DecodedStack]:
        """Decode all projections of the experts, joined from their TP slices; `buffer` is uint8 on any device."""
        found: dict[str, DecodedStack] = {}
        for gemm in stored.forms:
            ranks = range(self.grid.tp)
            found |= self._assemble(
                gemm, [self._slice(stored, buffer, gemm, rank) for rank in ranks]
            )
        return found

    def _slice(
        self, stored: StoredExperts, buffer: torch.Tensor, gemm: str, tp_rank: int
    ) -> DecodedStack:
        """Return one TP rank's slices; an expert with a copy that differs is wrong."""
        form = stored.forms[gemm]
        bits = {
            name: stored.firsts[gemm, tp_rank, name].view(buffer) for name in expected_tensors(form)
        }
        stack = decode_layout(form, bits)
        if stored.copied:
            positions = torch.tensor(stored.copied, device=buffer.device)
            num_unequal = torch.zeros(len(stack.codes), dtype=torch.int64, device=buffer.device)
            for name, first in bits.items():
                copy = stored.copies[gemm, tp_rank, name].view(buffer)
                num_unequal.index_add_(
                    0, positions, (copy != first[positions]).reshape(len(copy), -1).sum(1)
                )
            fault = Fault(
                "", "A redundant copy of an expert differs.", num_unequal > 0, lambda _: ("", "")
            )
            stack = replace(stack, faults=(*stack.faults, fault))
        return replace(
            stack, faults=tuple(replace(fault, tp_rank=tp_rank) for fault in stack.faults)
        )


# --- slices ------------------------------------------------------------------------------------------------


def _run_of_rows(stack: DecodedStack, part: int, num_parts: int) -> DecodedStack:
    """Return one of several equal runs of rows; each has the values that all rows share, the first has the faults."""

    def cut(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None or values.size(1) == 1:
            return values
        share = values.size(1) // num_parts
        return values[:, part * share : (part + 1) * share]

    runs: dict[str, Any] = {name: cut(getattr(stack, name)) for name in _VALUES}
    return replace(stack, **runs, faults=stack.faults if part == 0 else ())


def join(slices: Sequence[DecodedStack], axis: int, schema: WeightSchema) -> DecodedStack:
    """Join TP slices along rows (axis 1) or columns (2); values that are not cut must agree on all ranks."""
    first = slices[0]
    if len(slices) == 1:
        return first
    is_shared = schema.weight_scale_type == "tensor" or (
        schema.weight_scale_type == "channel" and axis == 2
    )
    axes = dict.fromkeys(
        ("scale", "scale_value", "zero_point", "flushed"), None if is_shared else axis
    )
    axes |= {"codes": axis, "bias": None if axis == 2 else 1}
    axes |= {"scale_2": 1 if schema.weight_scale_2_type == "channel" and axis == 1 else None}
    faults = [fault for one in slices for fault in one.faults]
    joined: dict[str, Any] = {}
    for name, along in axes.items():
        parts = [getattr(one, name) for one in slices]
        if parts[0] is None:
            continue
        joined[name] = parts[0] if along is None else torch.cat(parts, along)
        if along is None and name in TENSOR_OF:
            check = (
                _check_is_zero
                if name == "bias"
                else functools.partial(_check_agrees, name, parts[0])
            )
            faults += [check(part, tp_rank) for tp_rank, part in enumerate(parts) if tp_rank]
    return replace(first, **joined, faults=tuple(faults))


def _check_agrees(name: str, first: torch.Tensor, part: torch.Tensor, tp_rank: int) -> Fault:
    wrong = part != first

    def describe(expert: int) -> tuple[str, str]:
        places = wrong[expert].nonzero()
        index = tuple(places[0].tolist())
        left, right = (hex_bits(values[expert][index]) for values in (part, first))
        found = f"{left} at {list(index)}; {len(places)} of {wrong[expert].numel()} differ"
        return f"{right} as on tp rank 0", found

    return Fault(TENSOR_OF[name], "TP ranks disagree on what they share.", wrong, describe, tp_rank)


def _check_is_zero(part: torch.Tensor, tp_rank: int) -> Fault:
    """Check that the bias of w2 is on TP rank 0 and zero elsewhere."""
    wrong = part != 0
    expected = "zero, since ranks are summed"
    what = "The w2 bias is on more than TP rank 0."
    return Fault(
        "bias",
        what,
        wrong,
        lambda expert: (expected, f"{int(wrong[expert].sum())} values"),
        tp_rank,
    )


def _trim(stack: DecodedStack, axis: int, size: int, tp_rank: int) -> DecodedStack:
    """Remove a TP rank's padding, which must be zero; padding of e8m0 scales must repeat the last scale."""
    total = stack.codes.size(axis)
    if total == size:
        return stack
    faults = list(stack.faults)
    cut = {}
    for name in _VALUES:
        values = getattr(stack, name)
        if values is None or values.ndim <= axis or values.size(axis) == 1:
            continue
        kept = values.size(axis) * size // total
        cut[name], rest = values.split([kept, values.size(axis) - kept], axis)
        if name in TENSOR_OF:
            # has no zero; the codes are zero
            is_repeated = name == "scale" and stack.scale_dtype == "F8_E8M0"
            wrong = rest != (cut[name].narrow(axis, kept - 1, 1) if is_repeated else 0)
            faults.append(
                _padding_fault(name, wrong, "the last scale" if is_repeated else "zero", tp_rank)
            )
    trimmed = cut
    return replace(stack, **trimmed, faults=tuple(faults))


def _padding_fault(name: str, wrong: torch.Tensor, expected: str, tp_rank: int) -> Fault:
    what = f"The padding of a TP rank is not {expected}."
    found = lambda expert: (expected, f"{int(wrong[expert].sum())} values")  # noqa: E731
    return Fault(TENSOR_OF[name], what, wrong, found, tp_rank)


def hex_bits(value: torch.Tensor) -> str:
    """Format one bit pattern as an unsigned hexadecimal number."""
    return f"{int(value) & ((1 << 8 * value.element_size()) - 1):#x}"


# --- packed tensors ----------------------------------------------------------------------------------------


def read_packed_expert(
    artifact: Artifact,
    layer: MoeLayer,
    role: str,
    expert: int,
    shards: Mapping[str, str],
    note: Note,
) -> DecodedStack | None:
    """Read one projection from the checkpoint layout; `shards` is tensor name → file. None if it cannot be read."""
    base = layer.module(expert, role) + "."
    schema = artifact.schema_of(layer.name).of(role)
    try:
        dtypes, arrays = artifact.read_module(base, shards)
    except (HqconvError, OSError) as error:
        note_error(f"tensors {base}*", error, note)
        return None
    if layer.is_linear:
        arrays.pop("bias", None)  # a copied tensor
    expected = packed_shapes(layer.shape(role), schema, artifact.param_dtype)
    found = {name: (dtypes[name], array.shape) for name, array in arrays.items() if name != "bias"}
    if found != expected:
        note(
            f"{shards.get(base + 'weight', 'no file')}, tensors {base}*",
            "Packed tensors are not those of the manifest's schema.",
            expected,
            found,
        )
        return None
    bits = {name: tensor.unsqueeze(0) for name, tensor in bits_of_arrays(arrays).items()}
    return decode_packed(bits, schema, dtypes["weight_scale"])
