"""What must hold of one MoE block's tensors, and the errors that name the one for which it does not.

Legend: E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hqconv.errors import InputError, RequestError
from hqconv.formats.resolve import UNUSED_PARTS, ResolvedFormat
from hqconv.formats.source_format import SourceFormat
from hqconv.models.moe_layer import Parts, TensorSlice, View
from hqconv.schemas.grid import MAX_COUNT
from hqconv.schemas.tensors import TensorRef

Size = tuple[str, int]  # the config key it came from, "" if from shapes, and the value
RoleParts = dict[str, dict[str, TensorSlice]]  # role → raw part name → where it is
REMEDY = "Check that the checkpoint is complete and that config.json belongs to it."


@dataclass
class LayerTensors:
    """A block's tensors by what their names say: of single experts, and of stacks; innermost key: part."""

    experts: dict[int, dict[str, Parts]] = field(default_factory=dict)
    stacks: dict[str, Parts] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigSizes:
    """What the config says of a block's sizes, where it says so."""

    num_experts: Size | None
    hidden: Size | None
    intermediate: Size | None


def contradiction(what: str, where: str, expected: object, found: object) -> InputError:
    """The error for tensors and config that do not belong together."""
    return InputError(what, where=where, expected=expected, found=found, remedy=REMEDY)


def check_one_form(found: LayerTensors) -> None:
    """A block has single experts or stacks, not both."""
    if found.experts and found.stacks:
        expert = next(iter(found.experts.values()))
        forms = (next(iter(expert.values())), next(iter(found.stacks.values())))
        one, other = (next(iter(parts.values())).name for parts in forms)
        raise contradiction("A block has its experts twice.", one, "single or fused experts", f"also {other}")


def check_once(name: str, ref: TensorRef, first: TensorRef) -> None:
    """A part of a projection is in one tensor: `first` is the one that was found before, maybe the same."""
    if first is not ref:
        what = f"An expert of {name} has a projection twice."
        raise contradiction(what, ref.name, "gate and up apart or in one tensor", f"also {first.name}")


def check_indices(name: str, experts: Mapping[int, object], count: Size | None) -> None:
    """Experts 0..E-1 are all there, E as the config says where it says so."""
    highest = max(experts, default=-1)
    expected = count[1] if count else highest + 1
    if len(experts) == expected == highest + 1:
        return
    first_missing = next(e for e in range(len(experts) + 1) if e not in experts)
    is_gap = first_missing < expected
    raise contradiction(
        "The experts of a block are not complete." if is_gap else "A block has too many experts.",
        f"{name}.{first_missing if is_gap else highest}",
        f"experts 0..{expected - 1}" + (f" ({count[0]} in config.json)" if count else ""),
        f"{len(experts)} experts, the highest is {highest}"
        + (f", the first missing is {first_missing}" if is_gap else ""),
    )


def check_counts(name: str, count: int, top_k: int) -> None:
    """There are experts that a grid can deal, and as many as serve a token."""
    if not 0 < count <= MAX_COUNT:
        raise contradiction("A block has too many experts, or none.", name, f"1 to {MAX_COUNT}", count)
    if top_k > count > 1:  # a single expert serves every token, whatever the config says
        what = "More experts serve a token than a block has."
        raise contradiction(what, name, f"at most {count} experts per token", top_k)


_ONE_FORMAT = (
    "Convert the original checkpoint that it was made from, or one with a format for each whole block."
)


def one_declared(
    module_of: Callable[[str, int], str],
    roles: Collection[str],
    count: int,
    format_of: Callable[[str], SourceFormat],
) -> dict[str, SourceFormat]:
    """The format that the config declares for each projection, the same for every expert.

    `module_of`: role and expert → the module to ask for. Raises RequestError, naming one that is not as most are.
    """
    found = {}
    for role in roles:
        formats = [format_of(module_of(role, e)) for e in range(count)]
        found[role] = formats[0]
        if all(one is formats[0] or one == formats[0] for one in formats):
            continue
        usual = max((one for e, one in enumerate(formats) if one not in formats[:e]), key=formats.count)
        e, other = next((e, one) for e, one in enumerate(formats) if one != usual)
        raise RequestError(
            "A block mixes formats: the config declares another one for some of its experts.",
            where=module_of(role, e),
            expected=f"{usual.describe()}, as for {formats.count(usual)} of {count} experts: a kernel takes one",
            found=other.describe(),
            remedy=_ONE_FORMAT,
        )
    return found


def check_one_format(
    declared: Mapping[str, SourceFormat], done: Mapping[str, ResolvedFormat], raw: RoleParts
) -> None:
    """All projections of a block are stored alike. Raises RequestError where the config says that they are not."""
    first = done["w2"]
    for role, one in done.items():
        if (one.format, set(one.used)) != (first.format, set(first.used)):
            where = raw[role][one.used["weight"]].template.format(expert=0)
            texts = [f"{c.format.describe()} ({', '.join(sorted(c.used))})" for c in (first, one)]
            expected = f"{texts[0]} as its w2"
            if declared[role] != declared["w2"]:
                what = "A block mixes formats: the config declares another one for some of its projections."
                raise RequestError(what, where=where, expected=expected, found=texts[1], remedy=_ONE_FORMAT)
            raise contradiction("A block mixes formats.", where, expected, texts[1])
        dtypes = [
            r[role_].dtype
            for r, role_ in ((raw["w2"], first.used["weight"]), (raw[role], one.used["weight"]))
        ]
        if dtypes[0] != dtypes[1]:
            where = raw[role][one.used["weight"]].template.format(expert=0)
            raise contradiction("A block mixes dtypes.", where, f"{dtypes[0]} as its w2", dtypes[1])


def check_cuts(
    parts: Mapping[str, Mapping[str, TensorSlice]], source: SourceFormat, count: int, inner: int
) -> None:
    """Rows of a stack are dealt to its projections only where each row belongs to one of them.

    A row of block scales, and of zero points packed along N, stands for several rows of the matrix, which may be of
    gate and up both.
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
            runs = {"scale": source.group_n, "zero_point": inner * view.count // num_rows}.get(name, 0)
            if view.interleaved or not runs or inner % runs:
                what = "A fused tensor's rows belong to several of its projections."
                expected = f"one row, or rows that are all of one projection, as {inner} rows of {role} are"
                raise contradiction(what, part.template, expected, list(part.shape))


def check_alike(roles: Mapping[str, Parts], raw: RoleParts, expert: int) -> None:
    """An expert has the parts of expert 0, of the same dtypes and shapes; what nothing needs may be missing."""
    for role, whole in raw.items():
        if _are_alike(roles[role], whole):
            continue
        refs = {key: ref for key, ref in roles[role].items() if key not in UNUSED_PARTS}
        like = {key: part for key, part in whole.items() if key not in UNUSED_PARTS}
        if like.keys() - refs.keys() and refs.keys() - like.keys():
            ref, texts = refs[min(refs.keys() - like.keys())], [_parts_of(one) for one in (like, refs)]
            raise contradiction("A block mixes formats.", ref.name, f"{texts[0]} as in expert 0", texts[1])
        if refs.keys() != like.keys():
            for key in sorted(like.keys() - refs.keys()):
                where = like[key].template.format(expert=expert)
                raise contradiction(
                    "An expert lacks a tensor.", where, "present as in expert 0", "no such tensor"
                )
            ref = refs[min(refs.keys() - like.keys())]
            raise contradiction("An expert has a tensor too many.", ref.name, "as in expert 0", "present")
        for key, ref in refs.items():
            first = like[key]
            # bitsandbytes' state is a JSON document in bytes: only its numbers' digits tell how long it is.
            if ref.shape != first.shape and "quant_state" not in key:
                expected = f"{list(first.shape)} as {first.template.format(expert=0)}"
                raise contradiction("An expert has an unexpected shape.", ref.name, expected, list(ref.shape))
            if ref.dtype != first.dtype:
                expected = f"{first.dtype} as {first.template.format(expert=0)}"
                raise contradiction("A block mixes dtypes.", ref.name, expected, ref.dtype)


def _parts_of(parts: Mapping[str, TensorRef | TensorSlice]) -> str:
    return ", ".join(f"{key} {part.dtype}" for key, part in sorted(parts.items()))


def _are_alike(refs: Parts, whole: Mapping[str, TensorSlice]) -> bool:
    """Whether an expert has exactly the parts of expert 0, as nearly all have: the quick way to see it."""
    if len(refs) != len(whole):
        return False
    for key, ref in refs.items():
        first = whole.get(key)
        if first is None or ref.shape != first.shape or ref.dtype != first.dtype:
            return False
    return True
