"""Where the parts of a block's projections are: in tensors of single experts, or in stacks.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

from hqconv.experts.block import IDENTITY, PartSource, View
from hqconv.experts.checks import Found, RoleParts, Sizes, contradiction
from hqconv.formats.complete import PART_NAMES
from hqconv.schemas.families import Family
from hqconv.schemas.tensors import TensorRef, TensorSpec

# Always [out, in], whatever the floats' orientation: packed four bits at a time, or no matrix at all.
_NEVER_TRANSPOSED = ("blocks", "scales", "bias")


def raw_single(family: Family, name: str, found: Found) -> RoleParts:
    """The parts of every projection, as expert 0 has them."""
    raw: RoleParts = {}
    for role, word in family.projections.items():
        for e, roles in sorted(found.experts.items()):
            if role not in roles:
                missing = f"{name}.{e}.{word}.weight"
                raise contradiction("An expert lacks a projection.", missing, "present", "no such tensor")
        for key, ref in found.experts[0][role].items():
            stack = family.expert_stack(ref.name, name)
            view = (
                View(False, stack.roles.index(role), len(stack.roles), stack.interleaved)
                if stack
                else IDENTITY
            )
            template = ref.name.replace(f"{name}.0.", f"{name}.{{expert}}.", 1)
            raw.setdefault(role, {})[key] = PartSource(template, ref.dtype, ref.shape, view)
    return raw


def raw_stacked(family: Family, name: str, found: Found, sizes: Sizes, count: int) -> RoleParts:
    """The parts of every projection in the block's stacks."""
    for stack in family.stacks:
        if stack.name not in found.stacks:
            where = f"{name}.{stack.name}"
            raise contradiction("A block lacks a stack of projections.", where, "present", "no such tensor")
    if all(stack.transposed is not None for stack in family.stacks):
        return _stacked_as(family, found, {s.name: bool(s.transposed) for s in family.stacks})
    fits = []
    for transposed in (False, True):
        flags = {s.name: transposed if s.transposed is None else s.transposed for s in family.stacks}
        raw = _stacked_as(family, found, flags)
        if _fits(raw, sizes, count):
            fits.append(raw)
    if len(fits) != 1:
        ref = next(iter(found.stacks[family.stacks[0].name].values()))
        sides = f"{sizes.hidden[1] if sizes.hidden else '?'} and {sizes.intermediate[1] if sizes.intermediate else '?'}"
        expected = f"[E, out, in] or [E, in, out] with the config's hidden and intermediate size {sides}"
        what = (
            "The orientation of a block's stacks cannot be told."
            if fits
            else "A stack has an unexpected shape."
        )
        raise contradiction(what, ref.name, expected, list(ref.shape))
    return fits[0]


def _stacked_as(family: Family, found: Found, transposed: Mapping[str, bool]) -> RoleParts:
    raw: RoleParts = {role: {} for role in family.projections}
    for stack in family.stacks:
        tensors = found.stacks[stack.name]
        for index, role in enumerate(stack.roles):
            for key, ref in tensors.items():
                is_turned = transposed[stack.name] and key not in _NEVER_TRANSPOSED
                is_turned = is_turned and not _is_column(ref.shape, tensors.get("weight"))
                view = View(is_turned, index, len(stack.roles), stack.interleaved)
                is_flat = stack.flat and key not in _NEVER_TRANSPOSED
                raw[role][key] = PartSource(ref.name, ref.dtype, ref.shape, view, is_flat)
    return raw


def _is_column(shape: tuple[int, ...], weight: TensorRef | None) -> bool:
    """Whether a part of a weight [E, in, out] is [E, out, 1]: fbgemm's `down_proj_scale` in transformers."""
    return weight is not None and len(weight.shape) == 3 and shape == (weight.shape[0], weight.shape[2], 1)


def _fits(raw: RoleParts, sizes: Sizes, count: int) -> bool:
    """Whether every weight has its size under these views."""
    if sizes.hidden is None or sizes.intermediate is None:
        return False
    for role, parts in raw.items():
        shape = (sizes.intermediate[1], sizes.hidden[1])
        try:
            if "weight" in parts and parts["weight"].logical_shape(count) != (
                shape[::-1] if role == "w2" else shape
            ):
                return False
        except ValueError:
            return False
    return True


def raw_parts(parts: Mapping[str, PartSource], count: int, role: str) -> dict[str, TensorSpec]:
    """The headers of one projection, its codes first: where a partner is missing, they name the place."""
    raw = {}
    for key, part in sorted(parts.items(), key=lambda item: PART_NAMES.index(item[0])):
        try:
            shape = part.logical_shape(count)
        except ValueError as error:
            expected = f"{count} experts' {role}"
            raise contradiction(
                "A fused tensor cannot be dealt to its experts.", part.template, expected, error
            ) from None
        raw[key] = TensorSpec(part.template.format(expert=0), part.dtype, shape)
    return raw


def names_of(part: PartSource, count: int) -> list[str]:
    experts = range(1) if part.is_stacked else range(count)
    return [part.template.format(expert=expert) for expert in experts]
