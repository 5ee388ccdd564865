"""Build one MoE layer: find the parts of its projections, in tensors of single experts or in stacks, and check them.

Legend: E experts, I intermediate size, H hidden size. Every error names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hqconv.errors import InputError, RequestError
from hqconv.formats.encoding import UNUSED_PARTS, part_names
from hqconv.formats.source_format import SourceFormat, per_projection
from hqconv.formats.source_matrix import ResolvedFormat, logical_shape, resolve_format
from hqconv.models.config_facts import REMEDY, TWICE, ConfigSizes, Size, contradiction
from hqconv.models.families import Family
from hqconv.models.moe_layer import (
    IDENTITY,
    InputScales,
    MoeLayer,
    Parts,
    PerExpertIndex,
    Sources,
    StackedIndex,
    TensorSlice,
    View,
)
from hqconv.schemas.artifact_names import GEMM_OF
from hqconv.schemas.grid import MAX_COUNT
from hqconv.schemas.tensors import TensorRef, TensorSpec

RoleParts = dict[str, dict[str, TensorSlice]]  # role → name of the stored part → its slice
_UNUSED = frozenset(UNUSED_PARTS)
# Always [out, in], whatever the floats' orientation: packed four bits at a time, or no matrix at all.
_NEVER_TRANSPOSED = ("blocks", "scales", "bias")


@dataclass
class LayerTensors:
    """Tensors of a layer by name: of single experts, and of stacks; innermost key: part.

    words: the name of each projection's tensors, by role: the same for every expert.
    """

    experts: dict[int, dict[str, Parts]] = field(default_factory=dict)
    stacks: dict[str, Parts] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def check_once(name: str, ref: TensorRef, first: TensorRef) -> None:
    """Check that a part of a projection is in one tensor: `first` is the tensor found before, maybe the same one."""
    if first is not ref:
        what = f"An expert of {name} has a projection twice."
        raise contradiction(
            what, ref.name, "gate and up apart or in one tensor", f"also {first.name}", TWICE
        )


def build_layer(
    family: Family,
    name: str,
    found: LayerTensors,
    sizes: ConfigSizes,
    format_of: Callable[[str], SourceFormat],
    remedy_of: Callable[[str], str],
    facts: Mapping[str, Any],
) -> tuple[MoeLayer, dict[str, str]]:
    """Build a layer; return it and the layer's unused tensors (name → reason).

    `format_of` maps a module's path to the format that the config declares, `remedy_of` to a remedy for tensors that
    contradict it; `facts` are the other fields of `MoeLayer`.
    Raises InputError, naming the tensor, if tensors and config contradict each other.
    """
    check_one_form(found)
    released, family = family, family.spelled(found.words, found.stacks)
    count = _count(family, name, found, sizes)
    check_counts(name, count, facts["top_k"])
    raw = (
        raw_single(family, name, found)
        if found.experts
        else raw_stacked(family, name, found, sizes, count)
    )
    modules = {role: _module_template(family, name, parts, role) for role, parts in raw.items()}
    declared = one_declared(modules, count if found.experts else 1, format_of)
    hidden, inner = _matrix_sizes(sizes, declared["w2"], raw["w2"], count)
    done = _complete(
        declared,
        raw,
        count,
        (hidden, inner),
        sizes,
        lambda role: remedy_of(modules[role].format(0)),
    )
    parts = {
        role: {part: raw[role][key] for part, key in done[role].used.items()}
        for role in family.projections
    }
    for role in family.projections:
        check_cuts({role: parts[role]}, done[role].format, count, inner)
    layer = MoeLayer(
        name=name,
        family=family.name,
        num_experts=count,
        hidden_size=hidden,
        intermediate_size=inner,
        gated=family.gated,
        pads_last_rank=family.pads_last_rank,
        dtype=parts["w2"]["weight"].dtype,
        format=per_projection({role: one.format for role, one in done.items()}),
        words=dict(released.projections),
        parts=parts,
        sources=_sources(found, raw, parts, count),
        input_scales=find_input_scales(
            family, name, found, count, [one.format for one in done.values()]
        ),
        **facts,
    )
    return layer, _unused(done, raw, found, count)


def _unused(
    done: Mapping[str, ResolvedFormat], raw: RoleParts, found: LayerTensors, count: int
) -> dict[str, str]:
    """Map a layer's unused tensors to reasons. Not every expert need have them: calibration may have missed some."""
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


def _module_template(family: Family, name: str, parts: Mapping[str, TensorSlice], role: str) -> str:
    """Return the path of a projection's module, with `{}` for the expert where experts have modules of their own."""
    first = next(iter(parts.values()))
    if first.is_stacked:
        return f"{name}.{next(stack for stack in family.stacks if role in stack.roles).name}"
    stack = family.expert_stack(first.template.format(expert=0), name)
    return f"{name}.{{}}.{stack.name if stack else family.projections[role]}"


# --- parts


def raw_single(family: Family, name: str, found: LayerTensors) -> RoleParts:
    """Collect the parts of every projection from expert 0's tensors."""
    raw: RoleParts = {}
    for role, word in family.projections.items():
        for e, roles in sorted(found.experts.items()):
            if role not in roles:
                missing = f"{name}.{e}.{word}.weight"
                raise contradiction(
                    "An expert lacks a projection.", missing, "present", "no such tensor"
                )
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


def raw_stacked(
    family: Family, name: str, found: LayerTensors, sizes: ConfigSizes, count: int
) -> RoleParts:
    """Collect the parts of every projection from the layer's stacks."""
    for stack in family.stacks:
        if stack.name not in found.stacks:
            where = f"{name}.{stack.name}"
            raise contradiction(
                "A layer lacks a stack of projections.", where, "present", "no such tensor"
            )
    if all(stack.transposed is not None for stack in family.stacks):
        return _stacked_as(family, found, {s.name: bool(s.transposed) for s in family.stacks})
    fits = []
    for transposed in (False, True):
        flags = {
            s.name: transposed if s.transposed is None else s.transposed for s in family.stacks
        }
        raw = _stacked_as(family, found, flags)
        if _fits(raw, sizes, count):
            fits.append(raw)
    if len(fits) != 1:
        ref = next(iter(found.stacks[family.stacks[0].name].values()))
        sides = f"{sizes.hidden[1] if sizes.hidden else '?'} and {sizes.intermediate[1] if sizes.intermediate else '?'}"
        expected = (
            f"[E, out, in] or [E, in, out] with the config's hidden and intermediate size {sides}"
        )
        what = (
            "The orientation of a layer's stacks cannot be told."
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
    """Return True if a part of a weight [E, in, out] is [E, out, 1]: fbgemm's `down_proj_scale` in transformers."""
    return (
        weight is not None
        and len(weight.shape) == 3
        and shape == (weight.shape[0], weight.shape[2], 1)
    )


def _fits(raw: RoleParts, sizes: ConfigSizes, count: int) -> bool:
    """Return True if every weight has its expected size under these views."""
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
    """Return the headers of one projection, codes first: errors about a missing partner name the first header."""
    raw = {}
    order = part_names()
    for key, part in sorted(parts.items(), key=lambda item: order.index(item[0])):
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


# --- sizes and formats


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


def _matrix_sizes(
    sizes: ConfigSizes, declared: SourceFormat, raw: Mapping[str, TensorSlice], count: int
) -> tuple[int, int]:
    """Return hidden and intermediate size, from the config or else from the down projection."""
    if sizes.hidden and sizes.intermediate:
        return sizes.hidden[1], sizes.intermediate[1]
    shape = logical_shape(declared, raw_parts(raw, count, "w2"))
    if shape is None:
        first = next(iter(raw.values()))
        what = "The size of an expert's matrix cannot be told from its tensor."
        raise contradiction(
            what, first.template.format(expert=0), "2 dimensions", list(first.shape)
        )
    hidden = sizes.hidden[1] if sizes.hidden else shape[0]
    return hidden, sizes.intermediate[1] if sizes.intermediate else shape[1]


def _complete(
    declared: Mapping[str, SourceFormat],
    raw: RoleParts,
    count: int,
    wide: tuple[int, int],
    sizes: ConfigSizes,
    remedy_of: Callable[[str], str],
) -> dict[str, ResolvedFormat]:
    """Resolve every projection's format; `wide` is the down projection's [H, I]. All must be the same."""
    done: dict[str, ResolvedFormat] = {}
    for role, source in declared.items():
        try:
            rows, columns = wide if role == "w2" else wide[::-1]
            done[role] = resolve_format(
                source, raw_parts(raw[role], count, role), rows, columns, partial(remedy_of, role)
            )
        except InputError as error:
            raise _with_context(error, raw[role], sizes) from error
    check_one_format(declared, done, raw)
    return done


def _with_context(
    error: InputError, parts: Mapping[str, TensorSlice], sizes: ConfigSizes
) -> InputError:
    """Add context to an error of one projection's headers: the tensor, its shape, the config's sizes."""
    first = parts[min(parts, key=part_names().index)]
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
    """Build every expert's byte ranges; experts with separate tensors must all be like expert 0."""
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
                    parts[role][part].ref(found.experts[e][role][key], e, count)
                    for e in range(count)
                )
                for part, key in of_role.items()
            }
            for role, of_role in keys.items()
        }
    )


_PART = "input_scale"
_INVERSE = "input_global_scale"  # compressed-tensors' of nvfp4, by which activations are multiplied


def find_input_scales(
    family: Family, name: str, found: LayerTensors, count: int, formats: Iterable[SourceFormat]
) -> InputScales:
    """Find the static activation scales from a layer's tensors and its projections' formats.

    Nothing is checked, as most requests do not need them. name: of the layer. count: its experts.
    """
    dtypes = {one.static_inputs for one in formats}
    of_roles = [parts for roles in found.experts.values() for parts in roles.values()]
    divides = any(_INVERSE in parts for parts in (*of_roles, *found.stacks.values()))
    part = _INVERSE if divides else _PART
    refs: dict[str, list[TensorRef]] = {}
    most: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for stack in family.stacks if found.stacks else ():
        ref, gemm = found.stacks.get(stack.name, {}).get(part), GEMM_OF[stack.roles[0]]
        if ref is not None:
            refs.setdefault(gemm, []).append(ref)
            most[gemm] = count * len(stack.roles)
    for expert, roles in sorted(found.experts.items()):
        for role, word in family.projections.items():
            gemm, ref = GEMM_OF[role], roles[role].get(part)
            most[gemm] = 1
            if ref is None:
                missing.setdefault(gemm, []).append(f"{name}.{expert}.{word}.{part}")
            else:
                refs.setdefault(gemm, []).append(ref)
    return InputScales(
        dtypes.pop() if len(dtypes) == 1 else "",
        {gemm: tuple(of_gemm) for gemm, of_gemm in refs.items()},
        most,
        {gemm: tuple(of_gemm) for gemm, of_gemm in missing.items()},
        divides,
    )


# --- checks


def check_one_form(found: LayerTensors) -> None:
    """Check that a layer has single experts or stacks, not both."""
    if found.experts and found.stacks:
        expert = next(iter(found.experts.values()))
        forms = (next(iter(expert.values())), next(iter(found.stacks.values())))
        one, other = (next(iter(parts.values())).name for parts in forms)
        raise contradiction(
            "A layer has its experts twice.", one, "single or fused experts", f"also {other}", TWICE
        )


def check_indices(name: str, experts: Mapping[int, object], count: Size | None) -> None:
    """Check that experts 0..E-1 are all present, with E from the config if it has the number."""
    highest = max(experts, default=-1)
    expected = count[1] if count else highest + 1
    if len(experts) == expected == highest + 1:
        return
    first_missing = next(e for e in range(len(experts) + 1) if e not in experts)
    is_gap = first_missing < expected
    raise contradiction(
        "The experts of a layer are not complete." if is_gap else "A layer has too many experts.",
        f"{name}.{first_missing if is_gap else highest}",
        f"experts 0..{expected - 1}" + (f" ({count[0]} in config.json)" if count else ""),
        f"{len(experts)} experts, the highest is {highest}"
        + (f", the first missing is {first_missing}" if is_gap else ""),
    )


def check_counts(name: str, count: int, top_k: int) -> None:
    """Check that the layer has experts, and no fewer than serve a token."""
    if not 0 < count <= MAX_COUNT:
        raise contradiction(
            "A layer has too many experts, or none.", name, f"1 to {MAX_COUNT}", count
        )
    if top_k > count > 1:  # a single expert serves every token, whatever the config says
        what = "More experts serve a token than a layer has."
        raise contradiction(what, name, f"at most {count} experts per token", top_k)


_ONE_FORMAT = "Convert the original checkpoint that it was made from, or one with a format for each whole layer."


def one_declared(
    modules: Mapping[str, str], count: int, format_of: Callable[[str], SourceFormat]
) -> dict[str, SourceFormat]:
    """Return the format that the config declares for each projection, the same for every expert.

    modules: role → path of its module, see `_module_template`. Raises RequestError, naming one unlike the majority.
    """
    found = {}
    for role, module in modules.items():
        formats = [format_of(module.format(e)) for e in range(count)]
        found[role] = formats[0]
        if all(one is formats[0] or one == formats[0] for one in formats):
            continue
        usual = max(
            (one for e, one in enumerate(formats) if one not in formats[:e]), key=formats.count
        )
        e, other = next((e, one) for e, one in enumerate(formats) if one != usual)
        raise RequestError(
            "A layer mixes formats: the config declares another one for some of its experts.",
            where=module.format(e),
            expected=f"{usual.describe()}, as for {formats.count(usual)} of {count} experts: a kernel takes one",
            found=other.describe(),
            remedy=_ONE_FORMAT,
        )
    return found


def check_one_format(
    declared: Mapping[str, SourceFormat], done: Mapping[str, ResolvedFormat], raw: RoleParts
) -> None:
    """Check that all projections of a layer have one format, but for those that the config declares apart."""
    first = done["w2"]
    for role, one in done.items():
        if declared[role] != declared["w2"]:
            continue
        if (one.format, set(one.used)) != (first.format, set(first.used)):
            where = raw[role][one.used["weight"]].template.format(expert=0)
            texts = [f"{c.format.describe()} ({', '.join(sorted(c.used))})" for c in (first, one)]
            raise contradiction(
                "A layer mixes formats.", where, f"{texts[0]} as its w2", texts[1], _ONE_FORMAT
            )
        dtypes = [
            r[role_].dtype
            for r, role_ in ((raw["w2"], first.used["weight"]), (raw[role], one.used["weight"]))
        ]
        if dtypes[0] != dtypes[1]:
            where = raw[role][one.used["weight"]].template.format(expert=0)
            raise contradiction(
                "A layer mixes dtypes.", where, f"{dtypes[0]} as its w2", dtypes[1], _ONE_FORMAT
            )


def check_cuts(
    parts: Mapping[str, Mapping[str, TensorSlice]], source: SourceFormat, count: int, inner: int
) -> None:
    """Check that each row of a stack belongs to one projection, so that rows can be split.

    A row of block scales, and of zero points packed along N, covers several rows of the matrix, which may include both
    gate and up rows.
    """
    for role, of_role in parts.items():
        for name, part in of_role.items():
            view = part.view
            if (
                part.is_flat
                and name == "scale"
                and any(g and inner % g for g in (source.group_n, source.group_k))
            ):
                what, expected = (
                    "A scale of a flat stack serves two experts.",
                    f"groups that divide {inner} rows",
                )
                raise contradiction(what, part.template, expected, source.describe())
            whole = View(transposed=view.transposed).shape(part.share(count))
            num_rows = whole[0] if whole else 1
            # One number for each projection: a scale of its own, or its second scale.
            is_own = num_rows == view.count and (
                name == "scale_2" or (name == "scale" and source.group_n == 0)
            )
            if view.count == 1 or is_own or num_rows in (1, inner * view.count):
                continue
            runs = {"scale": source.group_n, "zero_point": inner * view.count // num_rows}.get(
                name, 0
            )
            if view.interleaved or not runs or inner % runs:
                what = "A fused tensor's rows belong to several of its projections."
                expected = f"one row, or rows that are all of one projection, as {inner} rows of {role} are"
                raise contradiction(what, part.template, expected, list(part.shape))


def check_alike(roles: Mapping[str, Parts], raw: RoleParts, expert: int) -> None:
    """Check that an expert has the parts of expert 0, of the same dtypes and shapes; unused parts may be missing."""
    for role, whole in raw.items():
        if _are_alike(roles[role], whole):
            continue
        refs = {key: ref for key, ref in roles[role].items() if key not in UNUSED_PARTS}
        like = {key: part for key, part in whole.items() if key not in UNUSED_PARTS}
        lacking, extra = like.keys() - refs.keys(), refs.keys() - like.keys()
        has_other_dtypes = any(
            refs[key].dtype != like[key].dtype for key in refs.keys() & like.keys()
        )
        if (lacking and extra) or ((lacking or extra) and has_other_dtypes):
            ref, texts = refs[min(extra or refs)], [_parts_of(one) for one in (like, refs)]
            raise contradiction(
                "A layer mixes formats.",
                ref.name,
                f"{texts[0]} as in expert 0",
                texts[1],
                _ONE_FORMAT,
            )
        if lacking:
            where = like[min(lacking)].template.format(expert=expert)
            raise contradiction(
                "An expert lacks a tensor.", where, "present as in expert 0", "no such tensor"
            )
        if extra:
            where = refs[min(extra)].name
            raise contradiction(
                "An expert has a tensor too many.", where, "as in expert 0", "present"
            )
        for key, ref in refs.items():
            first = like[key]
            # bitsandbytes' state is a JSON document in bytes: only its numbers' digits tell how long it is.
            if ref.shape != first.shape and "quant_state" not in key:
                expected = f"{list(first.shape)} as {first.template.format(expert=0)}"
                remedy = (
                    REMEDY if like.keys() <= {"weight", "bias"} else _ONE_FORMAT
                )  # of bits or groups of its own
                raise contradiction(
                    "An expert has an unexpected shape.",
                    ref.name,
                    expected,
                    list(ref.shape),
                    remedy,
                )
            if ref.dtype != first.dtype:
                expected = f"{first.dtype} as {first.template.format(expert=0)}"
                raise contradiction(
                    "A layer mixes dtypes.", ref.name, expected, ref.dtype, _ONE_FORMAT
                )


def _parts_of(parts: Mapping[str, TensorRef | TensorSlice]) -> str:
    return ", ".join(f"{key} {part.dtype}" for key, part in sorted(parts.items()))


def _are_alike(refs: Parts, whole: Mapping[str, TensorSlice]) -> bool:
    """Return True if an expert has exactly the parts of expert 0: fast path for nearly all experts."""
    if len(refs) != len(whole):
        return False
    for key, ref in refs.items():
        first = whole.get(key)
        if first is None or ref.shape != first.shape or ref.dtype != first.dtype:
            return False
    return True
