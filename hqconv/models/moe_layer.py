"""One MoE layer's experts as a source stores them: tensors, byte ranges of every part, and a buffer with their bytes.

The buffer holds each part of each projection as one run, expert after expert, so that parts stored as plain numbers
form a stack [E, …] without a copy.
Legend: E experts, I intermediate size, H hidden size. Roles: w1 gate, w3 up (both [I, H]), w2 down ([H, I]).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from hqconv.formats.source_format import SourceFormat
from hqconv.schemas.activation import Activation
from hqconv.schemas.tensors import TensorRef, num_bits, torch_dtype

if TYPE_CHECKING:
    import torch

TensorRefs = dict[str, TensorRef]  # of one projection, by part


class Sources(Protocol):
    """Byte ranges of every expert: expert → role → part. Some implementations compute them on first access."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> dict[str, TensorRefs]: ...

    def __iter__(self) -> Iterator[dict[str, TensorRefs]]: ...


@dataclass(frozen=True, slots=True)
class View:
    """Position of one projection in an expert's share of a tensor: transposed first, then one of `count` parts.

    The parts are equal runs of rows, or every `count`-th row where `interleaved`. A single row is not cut: all
    projections share it (a scale per expert, or per stack of projections).
    """

    transposed: bool = False
    index: int = 0
    count: int = 1
    interleaved: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the projection's shape. Raises ValueError if the rows cannot be split equally."""
        if self.transposed and len(shape) > 1:
            shape = (shape[1], shape[0], *shape[2:])
        if self.count == 1 or not shape or shape[0] == 1:
            return shape
        if shape[0] % self.count:
            raise ValueError(f"{shape[0]} rows are not {self.count} equal parts")
        return (shape[0] // self.count, *shape[1:])

    def of(self, share: torch.Tensor) -> torch.Tensor:
        """Return the projection in an expert's share of a tensor, as a view."""
        if self.transposed and share.ndim > 1:
            share = share.transpose(0, 1)
        if self.count == 1 or not share.ndim or share.size(0) == 1:
            return share
        rows = share.size(0) // self.count
        return (
            share[self.index :: self.count]
            if self.interleaved
            else share[self.index * rows :][:rows]
        )


IDENTITY = View()


@dataclass(frozen=True)
class TensorSlice:
    """One part (codes, scales, bias …) of a projection, the same for every expert of a layer.

    `template` is the tensor's name with `{expert}` if experts have separate tensors (maybe of several
    projections, which `view` distinguishes); else the tensor holds all experts, along its first dimension (with the
    rows if `is_flat`). `shape` is the whole tensor's.
    """

    template: str
    dtype: str
    shape: tuple[int, ...]
    view: View = IDENTITY
    is_flat: bool = False

    @property
    def is_stacked(self) -> bool:
        """True if one tensor holds all experts."""
        return "{expert}" not in self.template

    def share(self, num_experts: int) -> tuple[int, ...]:
        """Return the shape of one expert's share of the tensor. Raises ValueError if the tensor cannot be split."""
        if not self.is_stacked:
            return self.shape
        if self._is_for_all(num_experts):
            return ()
        length, *inner = self.shape or (0,)
        rows = length // num_experts
        if rows * num_experts != length or not (rows if self.is_flat else rows == 1):
            raise ValueError(f"{list(self.shape)} does not hold {num_experts} experts")
        return (rows, *inner) if self.is_flat else tuple(inner)

    def _is_for_all(self, num_experts: int) -> bool:
        """Return True if the tensor is one number, a scale that all experts share."""
        return num_experts > 1 and math.prod(self.shape) == 1

    def logical_shape(self, num_experts: int) -> tuple[int, ...]:
        """Return the shape of the part for one expert's projection, [out, …]. Raises ValueError as `share`."""
        return self.view.shape(self.share(num_experts))

    def ref(self, tensor: TensorRef, expert: int, num_experts: int) -> TensorRef:
        """Return the byte range of one expert's share; only the projection's own bytes if they are contiguous."""
        if not self.is_stacked:
            if self.view == IDENTITY:
                return tensor
            num_experts = 1
            expert = 0
        elif self._is_for_all(num_experts):
            return tensor._replace(shape=())
        shape = self.share(num_experts)
        share_bytes = num_bytes = tensor.num_bytes // num_experts
        offset = tensor.offset_bytes + expert * share_bytes
        if self.is_run:
            shape = self.view.shape(shape)
            num_bytes = math.prod(shape) * num_bits(self.dtype) // 8
            offset += self.view.index * num_bytes if num_bytes < share_bytes else 0
        return tensor._replace(shape=shape, offset_bytes=offset, num_bytes=num_bytes)

    @property
    def is_run(self) -> bool:
        """True if the projection's bytes are contiguous, so that no view is needed once they are read."""
        return not self.view.transposed and not (self.view.interleaved and self.view.count > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the slice for JSON; `from_dict` is the inverse."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TensorSlice:
        """Read a slice from `to_dict`'s document. Raises KeyError, TypeError or ValueError for any other document."""
        view = View(**document["view"])
        shape = tuple(int(size) for size in document["shape"])
        part = cls(**{**document, "view": view, "shape": shape})
        if part.to_dict() != document or {"{", "}"}.intersection(
            part.template.replace("{expert}", "")
        ):
            raise ValueError(f"a part at {part.template!r}")
        return part


@dataclass(frozen=True)
class InputScaleTensors:
    """Static scales of activations, measured by calibration, one for each projection, expert or stack.

    a_dtype: Humming's name of the activations' dtype; "" if the config does not contain it.
    refs: GEMM → its tensors, each once, of which every value counts. max_values: GEMM → the most values that each may
    hold. missing: GEMM → the tensors that other experts have. divides: the stored numbers are the scales' inverses
    (compressed-tensors' input_global_scale).
    """

    a_dtype: str = ""
    refs: Mapping[str, tuple[TensorRef, ...]] = field(default_factory=dict)
    max_values: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    divides: bool = False

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return [ref.name for refs in self.refs.values() for ref in refs]


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer's experts. `sources[e]["w1"]["weight"]` is the byte range of the codes (or floats) of e's gate.

    A layer that is not gated has no w1. `hidden_size` is the experts' input size: a latent size in some nemotron_h.
    `index` counts a separate `mtp.layers.i` on from the last decoder layer. `projection_names` are the
    released ones, for artifacts with a tensor per expert. `dtype` is that of the weights in the headers.
    `input_scales` are no parts: calibration may have missed experts.
    """

    name: str
    family: str
    index: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    activation: Activation
    top_k: int
    dtype: str
    pads_last_rank: bool
    format: SourceFormat
    projection_names: Mapping[str, str]
    slices: Mapping[str, Mapping[str, TensorSlice]]
    sources: Sources
    input_scales: InputScaleTensors = field(default_factory=InputScaleTensors)

    def __repr__(self) -> str:
        """Name the layer and its sizes; the places of its tensors are in `sources`."""
        return f"<MoeLayer {self.name}: {self.num_experts} experts, H {self.hidden_size}, I {self.intermediate_size}>"

    def shape(self, role: str) -> tuple[int, int]:
        """Return [out, in] of a projection."""
        wide = (self.hidden_size, self.intermediate_size)
        return wide if role == "w2" else wide[::-1]

    def module(self, expert: int, role: str) -> str:
        """Return the projection's name in a checkpoint with tensors per expert."""
        return f"{self.name}.{expert}.{self.projection_names[role]}"

    @property
    def is_linear(self) -> bool:
        """True if this is a group of linear layers beside the experts: see `linear_layers`."""
        return False

    @property
    def roles(self) -> tuple[str, ...]:
        """The layer's projections, gate first."""
        return tuple(role for role in ("w1", "w3", "w2") if role in self.projection_names)

    @property
    def coupled_roles(self) -> tuple[tuple[str, ...], ...]:
        """The layer's roles in groups that share their tensor-level scale."""
        coupled = (tuple(role for role in self.roles if role != "w2"), ("w2",))
        return tuple(roles for roles in coupled if roles)

    @property
    def knows_activation(self) -> bool:
        """True if the activation's formula and numbers are known, not only its name."""
        return self.activation.is_known(self.gated)

    @property
    def has_bias(self) -> bool:
        """True if the experts' projections have biases."""
        return "bias" in self.slices["w2"]

    def refs(self, expert: int) -> list[TensorRef]:
        """Return the byte ranges of one expert, each once."""
        refs = [ref for roles in self.sources[expert].values() for ref in roles.values()]
        return list({(ref.file, ref.offset_bytes): ref for ref in refs}.values())

    @cached_property
    def num_bytes(self) -> int:
        """Source bytes of all experts."""
        return sum(ref.num_bytes for expert in range(self.num_experts) for ref in self.refs(expert))

    def bits_of_weight(self, expert: int) -> float:
        """Return the stored bits of a weight of an expert's smallest projection.

        A tensor of several projections counts in shares, and some projections may be padded.
        """
        tensors = self.sources[expert].values()
        shares = Counter((ref.file, ref.offset_bytes) for refs in tensors for ref in refs.values())
        least_bytes = min(
            sum(ref.num_bytes / shares[ref.file, ref.offset_bytes] for ref in refs.values())
            for refs in tensors
        )
        return 8 * least_bytes / (self.hidden_size * self.intermediate_size)

    def tensor_names(self) -> list[str]:
        """List every source tensor of the layer, from the templates, expert by expert."""
        templates = [part.template for slices in self.slices.values() for part in slices.values()]
        names = (
            template.format(expert=expert)
            for expert in range(self.num_experts)
            for template in templates
        )
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class PerExpertIndex:
    """`MoeLayer.sources` for experts with separate tensors.

    columns: role → part → every expert's tensor. Dicts for each expert would take more memory than the tensors.
    """

    columns: Mapping[str, Mapping[str, tuple[TensorRef, ...]]]

    def __len__(self) -> int:
        return len(next(iter(next(iter(self.columns.values())).values())))

    def __getitem__(self, expert: int, /) -> dict[str, TensorRefs]:
        return {
            role: {part: refs[expert] for part, refs in columns.items()}
            for role, columns in self.columns.items()
        }

    def __iter__(self) -> Iterator[dict[str, TensorRefs]]:
        return (self[expert] for expert in range(len(self)))

    def names(self) -> Iterator[str]:
        """Yield every tensor's name, expert by expert."""
        columns = [refs for by_part in self.columns.values() for refs in by_part.values()]
        return (ref.name for refs in zip(*columns, strict=True) for ref in refs)


@dataclass(frozen=True)
class StackedIndex:
    """`MoeLayer.sources` for experts in stacks, each computed on first access: header-only commands need few.

    slices: role → part → the stack that holds it. tensors: by name. count: of experts.
    """

    slices: Mapping[str, Mapping[str, TensorSlice]]
    tensors: Mapping[str, TensorRef]
    count: int
    _known: dict[int, dict[str, TensorRefs]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, expert: int, /) -> dict[str, TensorRefs]:
        if expert not in self._known:
            place = range(self.count)[expert]
            self._known[expert] = {
                role: {
                    part: tensor_slice.ref(self.tensors[tensor_slice.template], place, self.count)
                    for part, tensor_slice in slices.items()
                }
                for role, slices in self.slices.items()
            }
        return self._known[expert]

    def __iter__(self) -> Iterator[dict[str, TensorRefs]]:
        return (self[expert] for expert in range(self.count))


_ALIGNMENT = 64


class RawLayout:
    """Buffer positions for the bytes of some experts: each byte range of the source once.

    ranges: each with its start in the buffer. starts: the same by (file, offset). stacks: starts of the parts that
    every expert has for itself, by role and part.
    """

    def __init__(self, layer: MoeLayer, experts: Sequence[int]) -> None:
        self.layer = layer
        self.experts = experts
        self.ranges: list[tuple[TensorRef, int]] = []
        self.starts: dict[tuple[int, int], int] = {}
        self.stacks: dict[tuple[str, str], int] = {}
        self.num_bytes = 0
        expert_refs = [layer.sources[expert] for expert in experts]
        for role in layer.roles:
            for part in expert_refs[0][role]:
                self._add(role, part, [refs[role][part] for refs in expert_refs])

    def _add(self, role: str, part: str, refs: list[TensorRef]) -> None:
        """Append one part of every expert."""
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        end = start
        for ref in refs:
            if (ref.file, ref.offset_bytes) not in self.starts:
                self.starts[ref.file, ref.offset_bytes] = end
                self.ranges.append((ref, end))
                end += ref.num_bytes
        if end == start + len(refs) * refs[0].num_bytes:
            self.stacks[role, part] = start
        self.num_bytes = end

    def pieces(self, num_bytes: int) -> list[list[tuple[TensorRef, int]]]:
        """Split the ranges into pieces of about `num_bytes`, in the order of the files, for parallel reads."""
        pieces: list[list[tuple[TensorRef, int]]] = []
        filled = num_bytes
        for ref, start in sorted(
            self.ranges, key=lambda item: (item[0].file, item[0].offset_bytes)
        ):
            if filled >= num_bytes:
                pieces.append([])
                filled = 0
            pieces[-1].append((ref, start))
            filled += ref.num_bytes
        return pieces


@dataclass(frozen=True, eq=False)
class RawExperts:
    """A filled buffer (uint8) and the layout of the ranges in it."""

    layout: RawLayout
    buffer: torch.Tensor

    def on(self, device: torch.device) -> RawExperts:
        """Copy the buffer to a device, in one asynchronous copy."""
        if device.type == "cpu":
            return self
        return RawExperts(
            self.layout, self.buffer[: self.layout.num_bytes].to(device, non_blocking=True)
        )

    def views(
        self, ranges: Iterable[tuple[TensorRef, int]]
    ) -> Iterator[tuple[TensorRef, memoryview]]:
        """Yield ranges of the layout with the parts of the buffer that they fill."""
        buffer = self.buffer.numpy().data
        for ref, start in ranges:
            yield ref, buffer[start : start + ref.num_bytes]

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """View a range as a tensor in its own dtype and shape, without a copy."""
        start = self.layout.starts[ref.file, ref.offset_bytes]
        return _typed(self.buffer[start : start + ref.num_bytes], ref, ())

    def stack(self, role: str) -> torch.Tensor | None:
        """View a projection's weights of all experts as [E, …], without a copy; None if they are not one run."""
        layer = self.layout.layer
        experts = self.layout.experts
        start = self.layout.stacks.get((role, "weight"))
        if start is None or not layer.slices[role]["weight"].is_run:
            return None
        num_experts = len(experts)
        ref = layer.sources[experts[0]][role]["weight"]
        return _typed(self.buffer[start : start + num_experts * ref.num_bytes], ref, (num_experts,))


def stored_shape(ref: TensorRef) -> tuple[int, ...]:
    """Return a tensor's shape as torch holds it: two 4-bit codes are one element."""
    return (*ref.shape[:-1], ref.shape[-1] // 2) if ref.dtype == "F4" else ref.shape


def _typed(raw: torch.Tensor, ref: TensorRef, front: tuple[int, ...]) -> torch.Tensor:
    return raw.view(torch_dtype(ref.dtype)).view((*front, *stored_shape(ref)))
