"""Where the parts of a block's projections are: in tensors of single experts, or in stacks.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hqconv.errors import InputError
from hqconv.formats.resolve import PART_NAMES, UNUSED_PARTS, ResolvedFormat, logical_shape, resolve_format
from hqconv.formats.source_format import SourceFormat
from hqconv.models.families import Family
from hqconv.models.layer_checks import (
    REMEDY,
    ConfigSizes,
    LayerTensors,
    RoleParts,
    check_alike,
    check_counts,
    check_cuts,
    check_indices,
    check_one_form,
    check_one_format,
    contradiction,
    one_declared,
)
from hqconv.models.moe_layer import (
    IDENTITY,
    InputScales,
    MoeLayer,
    PerExpertIndex,
    Sources,
    StackedIndex,
    TensorSlice,
    View,
)
from hqconv.schemas.tensors import TensorRef, TensorSpec

# Always [out, in], whatever the floats' orientation: packed four bits at a time, or no matrix at all.
_NEVER_TRANSPOSED = ("blocks", "scales", "bias")


def raw_single(family: Family, name: str, found: LayerTensors) -> RoleParts:
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
            raw.setdefault(role, {})[key] = TensorSlice(template, ref.dtype, ref.shape, view)
    return raw


def raw_stacked(family: Family, name: str, found: LayerTensors, sizes: ConfigSizes, count: int) -> RoleParts:
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


def _stacked_as(family: Family, found: LayerTensors, transposed: Mapping[str, bool]) -> RoleParts:
    raw: RoleParts = {role: {} for role in family.projections}
    for stack in family.stacks:
        tensors = found.stacks[stack.name]
        for index, role in enumerate(stack.roles):
            for key, ref in tensors.items():
                is_turned = transposed[stack.name] and key not in _NEVER_TRANSPOSED
                is_turned = is_turned and not _is_column(ref.shape, tensors.get("weight"))
                view = View(is_turned, index, len(stack.roles), stack.interleaved)
                is_flat = stack.flat and key not in _NEVER_TRANSPOSED
                raw[role][key] = TensorSlice(ref.name, ref.dtype, ref.shape, view, is_flat)
    return raw


def _is_column(shape: tuple[int, ...], weight: TensorRef | None) -> bool:
    """Whether a part of a weight [E, in, out] is [E, out, 1]: fbgemm's `down_proj_scale` in transformers."""
    return weight is not None and len(weight.shape) == 3 and shape == (weight.shape[0], weight.shape[2], 1)


def _fits(raw: RoleParts, sizes: ConfigSizes, count: int) -> bool:
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


def raw_parts(parts: Mapping[str, TensorSlice], count: int, role: str) -> dict[str, TensorSpec]:
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


def names_of(part: TensorSlice, count: int) -> list[str]:
    experts = range(1) if part.is_stacked else range(count)
    return [part.template.format(expert=expert) for expert in experts]


_UNUSED = frozenset(UNUSED_PARTS)


def build_block(
    family: Family,
    name: str,
    found: LayerTensors,
    sizes: ConfigSizes,
    format_of: Callable[[str], SourceFormat],
    facts: Mapping[str, Any],
) -> tuple[MoeLayer, dict[str, str]]:
    """The block, and its tensors that are of no use to it (name → reason).

    `format_of` maps a module's path to the format that the config declares; `facts` are the block's other fields.
    Raises InputError, naming the tensor, where tensors and config contradict each other.
    """
    check_one_form(found)
    count = _count(family, name, found, sizes)
    check_counts(name, count, facts["top_k"])
    raw = raw_single(family, name, found) if found.experts else raw_stacked(family, name, found, sizes, count)
    modules = partial(_module_of, family, name, raw)
    declared = one_declared(modules, family.projections, count if found.experts else 1, format_of)
    hidden, inner = _matrix_sizes(sizes, declared["w2"], raw["w2"], count)
    done = _complete(declared, raw, count, (hidden, inner), sizes)
    parts = {
        role: {part: raw[role][key] for part, key in done[role].used.items()} for role in family.projections
    }
    check_cuts(parts, done["w2"].format, count, inner)
    block = MoeLayer(
        name=name,
        family=family.name,
        num_experts=count,
        hidden_size=hidden,
        intermediate_size=inner,
        gated=family.gated,
        pads_last_rank=family.pads_last_rank,
        dtype=parts["w2"]["weight"].dtype,
        format=done["w2"].format,
        words=dict(family.projections),
        parts=parts,
        sources=_sources(found, raw, parts, count),
        input_scales=find_input_scales(family, name, found, count, [one.format for one in done.values()]),
        **facts,
    )
    return block, _unused(done, raw, found, count)


def _unused(
    done: Mapping[str, ResolvedFormat], raw: RoleParts, found: LayerTensors, count: int
) -> dict[str, str]:
    """The block's tensors that nothing needs. Not every expert need have them: calibration may have missed some."""
    unused = {
        name: reason
        for role, one in done.items()
        for key, reason in one.unused.items()
        if found.stacks
        for name in names_of(raw[role][key], count)
    }
    for roles in found.experts.values():
        for parts in roles.values():
            if not _UNUSED.isdisjoint(parts):
                unused |= {parts[key].name: UNUSED_PARTS[key] for key in parts.keys() & _UNUSED}
    return unused


def _module_of(family: Family, name: str, raw: RoleParts, role: str, expert: int) -> str:
    first = next(iter(raw[role].values()))
    if first.is_stacked:
        return f"{name}.{next(stack for stack in family.stacks if role in stack.roles).name}"
    stack = family.expert_stack(first.template.format(expert=0), name)
    return f"{name}.{expert}.{stack.name if stack else family.projections[role]}"


# --- how many experts --------------------------------------------------------------------------------------


def _count(family: Family, name: str, found: LayerTensors, sizes: ConfigSizes) -> int:
    if found.experts:
        check_indices(name, found.experts, sizes.num_experts)
        return len(found.experts)
    if sizes.num_experts:
        return sizes.num_experts[1]
    first = next(iter(next(iter(found.stacks.values())).values()))
    if any(stack.flat for stack in family.stacks) or not first.shape:
        keys = " or ".join(family.num_experts_keys)
        raise contradiction("The config lacks the number of experts.", name, keys, "no such key")
    return first.shape[0]


# --- sizes and formats -------------------------------------------------------------------------------------


def _matrix_sizes(
    sizes: ConfigSizes, declared: SourceFormat, raw: Mapping[str, TensorSlice], count: int
) -> tuple[int, int]:
    """Hidden and intermediate size, from the config or else from the down projection."""
    if sizes.hidden and sizes.intermediate:
        return sizes.hidden[1], sizes.intermediate[1]
    shape = logical_shape(declared, raw_parts(raw, count, "w2"))
    if shape is None:
        first = next(iter(raw.values()))
        what = "The size of an expert's matrix cannot be told from its tensor."
        raise contradiction(what, first.template.format(expert=0), "2 dimensions", list(first.shape))
    hidden = sizes.hidden[1] if sizes.hidden else shape[0]
    return hidden, sizes.intermediate[1] if sizes.intermediate else shape[1]


def _complete(
    declared: Mapping[str, SourceFormat],
    raw: RoleParts,
    count: int,
    wide: tuple[int, int],
    sizes: ConfigSizes,
) -> dict[str, ResolvedFormat]:
    """Every projection's format; `wide` is the down projection's [H, I]. All must be the same."""
    done: dict[str, ResolvedFormat] = {}
    for role, source in declared.items():
        try:
            done[role] = resolve_format(
                source, raw_parts(raw[role], count, role), *(wide if role == "w2" else wide[::-1])
            )
        except InputError as error:
            raise _with_context(error, raw[role], sizes) from error
    check_one_format(declared, done, raw)
    return done


def _with_context(error: InputError, parts: Mapping[str, TensorSlice], sizes: ConfigSizes) -> InputError:
    """The error of one projection's headers, with what the block knows: the tensor, its shape, the config's sizes."""
    first = parts[min(parts, key=PART_NAMES.index)]
    where, found = error.where or first.template.format(expert=0), error.found
    shape = next((p.shape for p in parts.values() if p.is_stacked and p.template == where), None)
    if shape is not None:
        found += f", as an expert's share of {list(shape)}"
    known = [f"{size[0]} {size[1]}" for size in (sizes.hidden, sizes.intermediate) if size]
    remedy = error.remedy or (f"{REMEDY.rstrip('.')} ({', '.join(known)})." if known else REMEDY)
    return InputError(error.what, where=where, expected=error.expected, found=found, remedy=remedy)


def _sources(
    found: LayerTensors, raw: RoleParts, parts: Mapping[str, Mapping[str, TensorSlice]], count: int
) -> Sources:
    """Every expert's byte ranges; experts with tensors of their own must all be like expert 0."""
    if found.stacks:
        tensors = {ref.name: ref for parts_ in found.stacks.values() for ref in parts_.values()}
        return StackedIndex(parts, tensors, count)
    keys = {
        role: {
            part: next(key for key, other in raw[role].items() if other is source)
            for part, source in of_role.items()
        }
        for role, of_role in parts.items()
    }
    for e in range(count):
        check_alike(found.experts[e], raw, e)
    return PerExpertIndex(
        {
            role: {
                part: tuple(
                    parts[role][part].ref(found.experts[e][role][key], e, count) for e in range(count)
                )
                for part, key in of_role.items()
            }
            for role, of_role in keys.items()
        }
    )


_PART = "input_scale"
_GEMM_OF = {"w1": "w13", "w3": "w13", "w2": "w2"}


def find_input_scales(
    family: Family, name: str, found: LayerTensors, count: int, formats: Iterable[SourceFormat]
) -> InputScales:
    """What a block's tensors and its projections' formats say; nothing is checked, as most requests have no use for it.

    name: of the block. count: its experts.
    """
    dtypes = {one.static_inputs for one in formats}
    refs: dict[str, list[TensorRef]] = {}
    most: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for stack in family.stacks if found.stacks else ():
        ref, gemm = found.stacks.get(stack.name, {}).get(_PART), _GEMM_OF[stack.roles[0]]
        if ref is not None:
            refs.setdefault(gemm, []).append(ref)
            most[gemm] = count * len(stack.roles)
    for expert, roles in sorted(found.experts.items()):
        for role, word in family.projections.items():
            gemm, ref = _GEMM_OF[role], roles[role].get(_PART)
            most[gemm] = 1
            if ref is None:
                missing.setdefault(gemm, []).append(f"{name}.{expert}.{word}.{_PART}")
            else:
                refs.setdefault(gemm, []).append(ref)
    return InputScales(
        dtypes.pop() if len(dtypes) == 1 else "",
        {gemm: tuple(of_gemm) for gemm, of_gemm in refs.items()},
        most,
        {gemm: tuple(of_gemm) for gemm, of_gemm in missing.items()},
    )
