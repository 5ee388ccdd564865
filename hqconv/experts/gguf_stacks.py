"""The stacks of experts in a GGUF file: what they hold, and what must hold of them.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from hqconv.checkpoint.gguf import COPY_AGAIN, wrong_shape
from hqconv.errors import InputError
from hqconv.experts.block import View
from hqconv.experts.checks import Sizes
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.families import Family
from hqconv.schemas.tensors import TensorRef

STACKS = {
    "ffn_gate_exps": ("w1",),
    "ffn_up_exps": ("w3",),
    "ffn_down_exps": ("w2",),
    "ffn_gate_up_exps": ("w1", "w3"),
}


@dataclass(frozen=True)
class GgufPart:
    """A tensor of a GGUF file that holds one part of a projection of all experts of a layer."""

    ref: TensorRef
    view: View

    def share(self, expert: int, shape: tuple[int, ...]) -> TensorRef:
        """Where one expert's part is, if that has this shape. A scale is one for the whole stack."""
        num_bytes = self.ref.num_bytes // self.ref.shape[0]
        offset = self.ref.offset_bytes + expert * num_bytes
        if shape:
            num_bytes //= self.view.count
            offset += self.view.index * num_bytes
        return self.ref._replace(shape=shape, offset_bytes=offset, num_bytes=num_bytes)


GgufLayer = dict[str, dict[str, GgufPart]]  # role → part → where it is


def check_layer(layer: int, found: GgufLayer, family: Family, sizes: Sizes) -> None:
    """Every projection is there, and every part has the size that the config says; raises InputError."""
    needed = ["weight", *(["bias"] if any("bias" in parts for parts in found.values()) else [])]
    for role in family.projections:
        for part in needed:
            if part not in found.get(role, {}):
                stack = next(stack for stack, roles in STACKS.items() if role in roles)
                what, where = "A layer of experts lacks a tensor.", f"blk.{layer}.{stack}.{part}"
                raise InputError(
                    what, where=where, expected="present", found="no such tensor", remedy=COPY_AGAIN
                )
    for role, parts in found.items():
        for part, one in parts.items():
            _check_part(role, part, one, sizes, found["w2"]["weight"].ref)


def _check_part(role: str, part: str, one: GgufPart, sizes: Sizes, down: TensorRef) -> None:
    ref, from_config = one.ref, (sizes.num_experts, sizes.hidden, sizes.intermediate)
    if len(down.shape) != 3:
        raise wrong_shape(down.name, "[experts, out, in]", down.shape)
    count, hidden, inner = (
        size[1] if size else have for size, have in zip(from_config, down.shape, strict=True)
    )
    rows, columns = (hidden, inner) if role == "w2" else (inner, hidden)
    rows *= one.view.count
    shape = {"weight": (count, rows, columns), "bias": (count, rows), "scale_2": (count,)}[part]
    if ref.shape != shape or not all(shape):
        keys = ", ".join(size[0] for size in from_config if size)
        raise wrong_shape(ref.name, f"{list(shape)} ({keys} in config.json)", ref.shape)
    if part != "weight" and ref.dtype not in FLOATS:
        what, expected = "A bias or scale has the wrong type.", " or ".join(FLOATS)
        raise InputError(what, where=ref.name, expected=expected, found=ref.dtype, remedy=COPY_AGAIN)
