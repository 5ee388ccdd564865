"""Choice of the row of the families table that matches a checkpoint's tensor names.

Legend: a candidate is a tensor whose name looks like an expert's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from hqconv.errors import HqconvError, RequestError, first_few
from hqconv.formats.encoding import part_names
from hqconv.models.families import (
    BY_ARCHITECTURE,
    BY_MODEL_TYPE,
    FAMILIES,
    INDEX,
    UNSUPPORTED,
    Config,
    Family,
)
from hqconv.models.loadable import refuse_leftovers

# Lies in `experts` without being a weight: the router's correction of its scores (laguna).
_CORRECTION = ".e_score_correction_bias"
_SUM_BIAS = ".mlp.experts.bias"  # nomic_bert's, of the weighted sum
# Every pattern treats all indices alike: names that differ only in indices match together or not at all.
_INDICES = re.compile(rf"(?<=\.){INDEX}(?=\.)")
_SHARED = ("shared_expert.", "shared_experts.")  # dense, though a stack in some


def looks_like_expert(name: str, num_dims: int) -> bool:
    """Return True for a tensor in an `experts` module, or a 3-D stack in some other MoE module."""
    if "expert" not in name and "moe" not in name:
        return False
    if ".experts." in name or name.startswith("experts."):
        return not name.endswith((_CORRECTION, _SUM_BIAS))
    return num_dims >= 3 and not any(part in name for part in _SHARED)


class FamilyChoice(NamedTuple):
    """The row that describes a checkpoint, and the reason for the choice."""

    family: Family
    because: str
    is_own_row: bool  # the row that names this model_type, not merely one that fits


def choose_family(candidates: list[str], config: Config, text: Config) -> FamilyChoice:
    """Return the row of the model_type, or else the closest row that matches every candidate name."""
    outer, inner = str(config.get("model_type")), str(text.get("model_type"))
    if (why := UNSUPPORTED.get(outer) or UNSUPPORTED.get(inner)) and candidates:
        raise RequestError(
            "The experts of this model cannot be converted.",
            where="config.json: model_type",
            expected="experts that one fused Mixture-of-Experts kernel can serve",
            found=f"{outer if outer in UNSUPPORTED else inner}: {why}",
            remedy="Choose a model of another family.",
        )
    known = BY_MODEL_TYPE.get(outer) or BY_MODEL_TYPE.get(inner)
    if known is None and (architecture := _known_architecture(config, text)):
        return FamilyChoice(BY_ARCHITECTURE[architecture], f"architecture {architecture}", True)
    model_type = inner if known is not None and outer not in known.model_types else outer
    if known is not None:
        return FamilyChoice(known, f"model_type {model_type}", True)
    because = f"unknown model_type {model_type}"
    # Stable sort: of rows that fit equally well the first one in the table wins.
    rows = sorted(FAMILIES, key=lambda row: -_num_keys_found(row, text))
    if not candidates:
        return FamilyChoice(rows[0], because, False)
    templates = [_INDICES.sub("0", name) for name in candidates]
    num_names = Counter(templates)
    num_unmatched = {}
    for as_released in (True, False):
        for row in rows:
            match = name_pattern(row, as_released=as_released).fullmatch
            num_unmatched[row.name] = sum(
                count for one, count in num_names.items() if not match(one)
            )
            if not num_unmatched[row.name]:
                _refuse_unknown_stacks(row, candidates, set(templates), because)
                return FamilyChoice(row, f"closest row {row.name} for {because}", False)
    closest = min(rows, key=lambda row: num_unmatched[row.name])
    match = name_pattern(closest).fullmatch
    unmatched = [name for name in candidates if not match(name)]
    raise unmatched_error(RequestError, closest, unmatched, because)


def _known_architecture(config: Config, text: Config) -> str | None:
    """Return the first class that a row names, if model_type is missing or another model's."""
    lists = [found for one in (config, text) if isinstance(found := one.get("architectures"), list)]
    names = [name for names in lists for name in names if isinstance(name, str)]
    return next((name for name in names if name in BY_ARCHITECTURE), None)


def _refuse_unknown_stacks(
    row: Family, candidates: list[str], templates: set[str], because: str
) -> None:
    """Refuse stacks of unknown models: names tell neither the order of gate and up nor if their rows alternate."""
    match = _name_pattern(row.paths, _words(row), (), part_names()).fullmatch
    if not all(map(match, templates)):
        fused = [name for name in candidates if not match(name)]
        raise RequestError(
            "The experts of an unknown model are fused: gate and up cannot be told apart.",
            where=first_few(fused),
            expected=f"one tensor per expert and projection, such as {row.example()}",
            found=because,
            remedy="Check model_type in config.json; a new family needs a row in hqconv/models/families.py.",
        )


def _num_keys_found(row: Family, text: Config) -> int:
    groups = (row.num_experts_keys, row.top_k_keys, row.intermediate_size_keys, row.activation_keys)
    # A row's first key counts most: the later ones are other spellings of the same value.
    return sum(
        2 if text.get(keys[0]) is not None else any(key in text for key in keys) for keys in groups
    )


def name_pattern(family: Family, *, as_released: bool = False) -> re.Pattern[str]:
    """Compile the pattern of whole tensor names; groups: layer, expert and projection or else stack, part.

    as_released: of the released names alone. Equal rows share one pattern.
    """
    modules, words = (
        (family.modules, tuple(family.projections.values()))
        if as_released
        else (family.paths, _words(family))
    )
    stacks = family.stacks if as_released else (*family.stacks, *family.more_stacks)
    singles = (*words, *(stack.name for stack in family.expert_stacks))
    return _name_pattern(
        modules, singles, tuple(dict.fromkeys(stack.name for stack in stacks)), part_names()
    )


def _words(family: Family) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in family.spellings for name in one.values()))


@cache
def _name_pattern(
    modules: tuple[str, ...],
    projections: tuple[str, ...],
    stacks: tuple[str, ...],
    parts: tuple[str, ...],
) -> re.Pattern[str]:
    paths = "|".join(re.escape(t).replace(re.escape("{layer}"), INDEX) for t in modules)
    names, part = _any_of(projections), _any_of(sorted(parts, key=len, reverse=True))
    single = rf"(?P<expert>{INDEX})\.(?P<projection>{names})\.(?P<part>{part})"
    fused = rf"(?P<stack>{_any_of(stacks)})(?:[._](?P<stack_part>{part}))?"
    return re.compile(rf"(?P<block>{paths})\.(?:{single}" + (rf"|{fused})" if stacks else ")"))


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def unmatched_error(
    kind: type[HqconvError], family: Family, unmatched: list[str], because: str
) -> HqconvError:
    """Return the error for tensors that look like experts and match no template of the row.

    Raises InputError for names of adapters and wrappers.
    """
    refuse_leftovers(unmatched)
    return kind(
        "Tensors look like experts, but their names are not understood.",
        where=first_few(unmatched),
        expected=f"names such as {family.example()} ({because})",
        found="extra, renamed or fused tensors, which must not be copied as if they were dense",
        remedy="Check model_type in config.json; a new naming needs a row in hqconv/models/families.py.",
    )
