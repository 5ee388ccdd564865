"""Build one MoE layer: find the parts of its projections, in tensors of single experts or in stacks, and check them.

Legend: E experts, I intermediate size, H hidden size. Every error names the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hqconv.errors import InputError, RequestError
from hqconv.formats.encoding import UNUSED_PARTS, ResolvedFormat, part_names, resolve_format
from hqconv.formats.source_format import SourceFormat, per_projection
from hqconv.models.config_facts import REMEDY, TWICE, ConfigSizes, Size, contradiction
from hqconv.models.families import Family
from hqconv.models.moe_layer import (
    IDENTITY,
    InputScaleTensors,
    MoeLayer,
    PerExpertIndex,
    Sources,
    StackedIndex,
    TensorRefs,
    TensorSlice,
    View,
)
from hqconv.schemas.artifact_names import GEMM_OF
from hqconv.schemas.grid import MAX_COUNT
from hqconv.schemas.tensors import TensorRef, TensorSpec

Slices = Mapping[str, TensorSlice]  # name of a part → its slice
# Always [out, in], whatever the floats' orientation: packed four bits at a time, or no matrix at all.
_NEVER_TRANSPOSED = ("blocks", "scales", "bias")
_ONE_FORMAT = "Convert the original checkpoint that it was made from, or one with a format for each whole layer."


@dataclass
class LayerTensors:
    """Tensors of a layer by name: of single experts, and of stacks; innermost key: part.

    projection_names: the name of each projection's tensors, by role: the same for every expert.
    """

    experts: dict[int, dict[str, TensorRefs]] = field(default_factory=dict)
    stacks: dict[str, TensorRefs] = field(default_factory=dict)
    projection_names: dict[str, str] = field(default_factory=dict)

    def modules(self) -> Iterator[TensorRefs]:
        """Yield the tensors of every module, by part: of single experts, then of stacks."""
        for roles in self.experts.values():
            yield from roles.values()
        yield from self.stacks.values()


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
    _check_one_form(found)
    released = family
    family = family.spelled(found.projection_names, found.stacks)
    count = _count(family, name, found, sizes)
    _check_counts(name, count, facts["top_k"])
    raw = (
        _single_slices(family, name, found)
        if found.experts
        else _stacked_slices(family, name, found, sizes, count)
    )
    modules = {role: _module_template(family, name, slices, role) for role, slices in raw.items()}
    declared = _declared_formats(modules, count if found.experts else 1, format_of)
    headers = {role: _raw_headers(slices, count, role) for role, slices in raw.items()}
    hidden, inner = _matrix_sizes(family, name, sizes, declared["w2"], headers["w2"])
    resolved: dict[str, ResolvedFormat] = {}
    for role in family.projections:
        rows, columns = (hidden, inner) if role == "w2" else (inner, hidden)
        remedy = partial(remedy_of, modules[role].format(0))
        try:
            resolved[role] = resolve_format(declared[role], headers[role], rows, columns, remedy)
        except InputError as error:
            _add_stack_shape(error, raw[role])
            raise
    _check_one_format(declared, resolved, headers)
    slices = {
        role: {part: raw[role][raw_name] for part, raw_name in resolved[role].used.items()}
        for role in family.projections
    }
    for role in family.projections:
        _check_cuts(role, slices[role], resolved[role].format, count, inner)
    formats = {role: fmt.format for role, fmt in resolved.items()}
    layer = MoeLayer(
        name=name,
        family=family.name,
        num_experts=count,
        hidden_size=hidden,
        intermediate_size=inner,
        gated=family.gated,
        pads_last_rank=family.pads_last_rank,
        dtype=slices["w2"]["weight"].dtype,
        format=per_projection(formats),
        projection_names=dict(released.projections),
        slices=slices,
        sources=_sources(found, raw, slices, resolved, count),
        input_scales=_find_input_scales(family, name, found, count, formats.values()),
        **facts,
    )
    return layer, _unused(resolved, raw, found)


def _unused(
    resolved: Mapping[str, ResolvedFormat], raw: Mapping[str, Slices], found: LayerTensors
) -> dict[str, str]:
    """Map a layer's unused tensors to reasons. Not every expert need have them: calibration may have missed some."""
    unused: dict[str, str] = {}
    for role, fmt in resolved.items() if found.stacks else ():
        unused |= {raw[role][part].template: reason for part, reason in fmt.unused.items()}
    for roles in found.experts.values():
        for refs in roles.values():
            unused |= {refs[part].name: UNUSED_PARTS[part] for part in refs.keys() & UNUSED_PARTS}
    return unused


def _module_template(family: Family, name: str, slices: Slices, role: str) -> str:
    """Return the path of a projection's module, with `{}` for the expert where experts have modules of their own."""
    first = next(iter(slices.values()))
    if first.is_stacked:
        return f"{name}.{next(stack for stack in family.stacks if role in stack.roles).name}"
    stack = family.expert_stack(first.template.format(expert=0), name)
    return f"{name}.{{}}.{stack.name if stack else family.projections[role]}"


# --- slices


def _single_slices(family: Family, name: str, found: LayerTensors) -> dict[str, Slices]:
    """Return the slices of every projection, of expert 0's tensors."""
    raw: dict[str, Slices] = {}
    for role, word in family.projections.items():
        for expert, roles in sorted(found.experts.items()):
            if role not in roles:
                missing = f"{name}.{expert}.{word}.weight"
                raise contradiction(
                    "An expert lacks a projection.", missing, "present", "no such tensor"
                )
        slices: dict[str, TensorSlice] = {}
        for part, ref in found.experts[0][role].items():
            stack = family.expert_stack(ref.name, name)
            view = IDENTITY
            if stack:
                index = stack.roles.index(role)
                view = View(False, index, len(stack.roles), stack.interleaved)
            template = ref.name.replace(f"{name}.0.", f"{name}.{{expert}}.", 1)
            slices[part] = TensorSlice(template, ref.dtype, ref.shape, view)
        raw[role] = slices
    return raw


def _stacked_slices(
    family: Family, name: str, found: LayerTensors, sizes: ConfigSizes, count: int
) -> dict[str, Slices]:
    """Return the slices of every projection, of the layer's stacks."""
    for stack in family.stacks:
        if stack.name not in found.stacks:
            where = f"{name}.{stack.name}"
            raise contradiction(
                "A layer lacks a stack of projections.", where, "present", "no such tensor"
            )
    if all(stack.transposed is not None for stack in family.stacks):
        return _stacked_as(family, found, False)
    ways = [_stacked_as(family, found, is_transposed) for is_transposed in (False, True)]
    fitting = [raw for raw in ways if _fits(raw, sizes, count)]
    if len(fitting) == 1:
        return fitting[0]
    ref = next(iter(found.stacks[family.stacks[0].name].values()))
    hidden, inner = (size[1] if size else "?" for size in (sizes.hidden, sizes.intermediate))
    raise contradiction(
        "The shapes of a layer's stacks do not tell their orientation.",
        ref.name,
        f"[E, out, in] or [E, in, out] with the config's hidden and intermediate size {hidden} and {inner}",
        list(ref.shape),
    )


def _stacked_as(family: Family, found: LayerTensors, is_transposed: bool) -> dict[str, Slices]:
    """is_transposed: of stacks whose orientation the family's row leaves open."""
    raw: dict[str, Slices] = {}
    for stack in family.stacks:
        refs = found.stacks[stack.name]
        is_turned_stack = is_transposed if stack.transposed is None else stack.transposed
        for index, role in enumerate(stack.roles):
            slices: dict[str, TensorSlice] = {}
            for part, ref in refs.items():
                is_matrix = part not in _NEVER_TRANSPOSED
                is_turned = is_turned_stack and is_matrix
                is_turned = is_turned and not _is_column(ref.shape, refs.get("weight"))
                view = View(is_turned, index, len(stack.roles), stack.interleaved)
                is_flat = stack.flat and is_matrix
                slices[part] = TensorSlice(ref.name, ref.dtype, ref.shape, view, is_flat)
            raw[role] = slices
    return {role: raw[role] for role in family.projections}


def _is_column(shape: tuple[int, ...], weight: TensorRef | None) -> bool:
    """Return True if a part of a weight [E, in, out] is [E, out, 1]: fbgemm's `down_proj_scale` in transformers."""
    if weight is None or len(weight.shape) != 3:
        return False
    return shape == (weight.shape[0], weight.shape[2], 1)


def _fits(raw: Mapping[str, Slices], sizes: ConfigSizes, count: int) -> bool:
    """Return True if every weight has its expected size under these views."""
    if sizes.hidden is None or sizes.intermediate is None:
        return False
    shape = (sizes.intermediate[1], sizes.hidden[1])
    for role, slices in raw.items():
        expected = shape[::-1] if role == "w2" else shape
        try:
            if "weight" in slices and slices["weight"].logical_shape(count) != expected:
                return False
        except ValueError:
            return False
    return True


def _raw_headers(slices: Slices, count: int, role: str) -> dict[str, TensorSpec]:
    """Return the headers of one projection, codes first: errors about a missing partner name the first header."""
    raw = {}
    for part in sorted(slices, key=part_names().index):
        tensor = slices[part]
        try:
            shape = tensor.logical_shape(count)
        except ValueError as error:
            expected = f"{count} experts' {role}"
            raise contradiction(
                "A fused tensor cannot be dealt to its experts.", tensor.template, expected, error
            ) from None
        raw[part] = TensorSpec(tensor.template.format(expert=0), tensor.dtype, shape)
    return raw


# --- sizes and formats


def _count(family: Family, name: str, found: LayerTensors, sizes: ConfigSizes) -> int:
    if found.experts:
        _check_indices(name, found.experts, sizes.num_experts)
        return len(found.experts)
    if sizes.num_experts:
        return sizes.num_experts[1]
    first = next(iter(next(iter(found.stacks.values())).values()))
    if any(stack.flat for stack in family.stacks) or not first.shape:
        keys = " or ".join(family.num_experts_keys)
        raise contradiction("The config lacks the number of experts.", name, keys, "no such key")
    return first.shape[0]


def _matrix_sizes(
    family: Family,
    name: str,
    sizes: ConfigSizes,
    declared: SourceFormat,
    headers: Mapping[str, TensorSpec],
) -> tuple[int, int]:
    """Return hidden and intermediate size, from the config or else from a down projection of floats."""
    if sizes.hidden and sizes.intermediate:
        return sizes.hidden[1], sizes.intermediate[1]
    weight = headers.get("weight")
    if not declared.is_float or weight is None or len(weight.shape) != 2:
        keys = " or ".join(
            family.intermediate_size_keys if sizes.hidden else family.hidden_size_keys
        )
        raise contradiction("The config lacks a size of the experts.", name, keys, "no such key")
    hidden, inner = weight.shape
    return (
        sizes.hidden[1] if sizes.hidden else hidden,
        sizes.intermediate[1] if sizes.intermediate else inner,
    )


def _add_stack_shape(error: InputError, slices: Slices) -> None:
    """Add the shape of the whole stack to an error about an expert's share of it."""
    for part in slices.values():
        if part.is_stacked and part.template == error.where:
            error.found += f", an expert's share of {list(part.shape)}"


def _declared_formats(
    modules: Mapping[str, str], count: int, format_of: Callable[[str], SourceFormat]
) -> dict[str, SourceFormat]:
    """Return the format that the config declares for each projection, the same for every expert.

    modules: role → path of its module, see `_module_template`. Raises RequestError.
    """
    declared = {}
    for role, module in modules.items():
        formats = [format_of(module.format(expert)) for expert in range(count)]
        declared[role] = formats[0]
        if all(fmt is formats[0] or fmt == formats[0] for fmt in formats):
            continue
        ((usual, num_usual),) = Counter(formats).most_common(1)
        odd = next(expert for expert, fmt in enumerate(formats) if fmt != usual)
        raise RequestError(
            "A layer mixes formats: the config declares another one for some of its experts.",
            where=module.format(odd),
            expected=f"{usual.describe()}, as for {num_usual} of {count} experts: a kernel takes one",
            found=formats[odd].describe(),
            remedy=_ONE_FORMAT,
        )
    return declared


def _sources(
    found: LayerTensors,
    raw: Mapping[str, Slices],
    slices: Mapping[str, Slices],
    resolved: Mapping[str, ResolvedFormat],
    count: int,
) -> Sources:
    """Build every expert's byte ranges; experts with separate tensors must all be like expert 0."""
    if found.stacks:
        tensors = {ref.name: ref for refs in found.stacks.values() for ref in refs.values()}
        return StackedIndex(slices, tensors, count)
    for expert in range(count):
        _check_alike(expert, found.experts[expert], raw)
    columns: dict[str, dict[str, tuple[TensorRef, ...]]] = {}
    for role, fmt in resolved.items():
        columns[role] = {}
        for part, raw_name in fmt.used.items():
            tensor_slice = slices[role][part]
            columns[role][part] = tuple(
                tensor_slice.ref(found.experts[expert][role][raw_name], expert, count)
                for expert in range(count)
            )
    return PerExpertIndex(columns)


_SCALE = "input_scale"
_INVERSE = "input_global_scale"  # compressed-tensors' of nvfp4, by which activations are multiplied


def _find_input_scales(
    family: Family, name: str, found: LayerTensors, count: int, formats: Iterable[SourceFormat]
) -> InputScaleTensors:
    """Find the static activation scales from a layer's tensors and its projections' formats.

    Nothing is checked, as most requests do not need them. name: of the layer. count: its experts.
    """
    dtypes = {fmt.static_inputs for fmt in formats}
    divides = any(_INVERSE in refs for refs in found.modules())
    part = _INVERSE if divides else _SCALE
    scales: dict[str, list[TensorRef]] = {}
    max_values: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for stack in family.stacks if found.stacks else ():
        ref = found.stacks.get(stack.name, {}).get(part)
        gemm = GEMM_OF[stack.roles[0]]
        if ref is not None:
            scales.setdefault(gemm, []).append(ref)
            max_values[gemm] = count * len(stack.roles)
    for expert, roles in sorted(found.experts.items()):
        for role, word in family.projections.items():
            gemm = GEMM_OF[role]
            ref = roles[role].get(part)
            max_values[gemm] = 1
            if ref is None:
                missing.setdefault(gemm, []).append(f"{name}.{expert}.{word}.{part}")
            else:
                scales.setdefault(gemm, []).append(ref)
    return InputScaleTensors(
        dtypes.pop() if len(dtypes) == 1 else "",
        {gemm: tuple(refs) for gemm, refs in scales.items()},
        max_values,
        {gemm: tuple(names) for gemm, names in missing.items()},
        divides,
    )


# --- checks


def _check_one_form(found: LayerTensors) -> None:
    """Check that a layer has single experts or stacks, not both."""
    if found.experts and found.stacks:
        single = next(iter(next(found.modules()).values()))
        stack = next(iter(next(iter(found.stacks.values())).values()))
        expected = "single or fused experts"
        raise contradiction(
            "A layer has its experts twice.", single.name, expected, f"also {stack.name}", TWICE
        )


def _check_indices(name: str, experts: Mapping[int, object], count: Size | None) -> None:
    """Check that experts 0..E-1 are all present, with E from the config if it has the number."""
    expected = count[1] if count else max(experts) + 1
    missing = next((e for e in range(expected) if e not in experts), None)
    if missing is None and len(experts) == expected:
        return
    if missing is None:
        what = "A layer has too many experts."
        where = f"{name}.{max(experts)}"
    else:
        what = "The experts of a layer are not complete."
        where = f"{name}.{missing}"
    source = f" ({count[0]} in config.json)" if count else ""
    raise contradiction(
        what, where, f"experts 0..{expected - 1}{source}", f"{len(experts)} experts"
    )


def _check_counts(name: str, count: int, top_k: int) -> None:
    """Check that the layer has experts, and no fewer than serve a token."""
    if not 0 < count <= MAX_COUNT:
        raise contradiction(
            "A layer has too many experts, or none.", name, f"1 to {MAX_COUNT}", count
        )
    if top_k > count > 1:  # a single expert serves every token, whatever the config says
        raise contradiction(
            "More experts serve a token than a layer has.",
            name,
            f"at most {count} experts per token",
            top_k,
        )


def _check_one_format(
    declared: Mapping[str, SourceFormat],
    resolved: Mapping[str, ResolvedFormat],
    headers: Mapping[str, Mapping[str, TensorSpec]],
) -> None:
    """Check that all projections of a layer have one format, but for those that the config declares apart."""

    def describe(role: str) -> str:
        fmt = resolved[role]
        dtype = headers[role][fmt.used["weight"]].dtype
        return f"{dtype} {fmt.format.describe()} ({', '.join(sorted(fmt.used))})"

    for role, fmt in resolved.items():
        is_same = fmt.format == resolved["w2"].format and describe(role) == describe("w2")
        if declared[role] == declared["w2"] and not is_same:
            where = headers[role][fmt.used["weight"]].name
            expected = f"{describe('w2')} as its w2"
            raise contradiction(
                "A layer mixes formats.", where, expected, describe(role), _ONE_FORMAT
            )


def _check_cuts(role: str, slices: Slices, source: SourceFormat, count: int, inner: int) -> None:
    """Check that each row of a stack belongs to one projection, so that rows can be split.

    A row of block scales, and of zero points packed along N, covers several rows of the matrix, which may include both
    gate and up rows.
    """
    for name, part in slices.items():
        view = part.view
        groups = [size for size in (source.group_n, source.group_k) if size]
        if part.is_flat and name == "scale" and any(inner % size for size in groups):
            expected = f"groups that divide {inner} rows"
            raise contradiction(
                "A scale of a flat stack serves two experts.",
                part.template,
                expected,
                source.describe(),
            )
        whole = View(transposed=view.transposed).shape(part.share(count))
        num_rows = whole[0] if whole else 1
        # One number for each projection: a scale of its own, or its second scale.
        is_single = name == "scale_2" or (name == "scale" and source.group_n == 0)
        if view.count == 1 or num_rows in (1, inner * view.count):
            continue
        if is_single and num_rows == view.count:
            continue
        rows_per_row = {"scale": source.group_n, "zero_point": inner * view.count // num_rows}
        run = rows_per_row.get(name, 0)
        if view.interleaved or not run or inner % run:
            expected = (
                f"one row, or rows that are all of one projection, as {inner} rows of {role} are"
            )
            raise contradiction(
                "A fused tensor's rows belong to several of its projections.",
                part.template,
                expected,
                list(part.shape),
            )


def _check_alike(expert: int, roles: Mapping[str, TensorRefs], raw: Mapping[str, Slices]) -> None:
    """Check that an expert has the parts of expert 0, of the same dtypes and shapes; unused parts may be missing."""
    for role, slices in raw.items():
        refs = roles[role]
        for part in (*refs, *slices):
            ref = refs.get(part)
            first = slices.get(part)
            if part in UNUSED_PARTS or (ref and first and _is_alike(part, ref, first)):
                continue
            where = first.template.format(expert=expert) if first else refs[part].name
            remedy = _ONE_FORMAT if ref else REMEDY
            raise contradiction(
                "An expert's tensors are not like those of expert 0.",
                where,
                _form(first),
                _form(ref),
                remedy,
            )


def _form(tensor: TensorRef | TensorSlice | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "no such tensor"


def _is_alike(part: str, ref: TensorRef, first: TensorSlice) -> bool:
    # bitsandbytes' state is a JSON document in bytes: only its numbers' digits tell how long it is.
    return ref.dtype == first.dtype and (ref.shape == first.shape or "quant_state" in part)
