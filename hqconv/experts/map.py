"""Finds the experts of a checkpoint from tensor names, shapes and the config; reads no tensor bytes.

Every source tensor is converted, copied or dropped exactly once. What looks like an expert tensor and is
not understood is refused: copied as if it were dense, it would leave a model that runs and answers wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.experts.block import ExpertBlock
from hqconv.experts.build import build_block
from hqconv.experts.checks import Found, Size, Sizes, contradiction
from hqconv.formats.complete import PART_NAMES
from hqconv.formats.declared import Declared, declared_formats
from hqconv.formats.format import PLAIN, SourceFormat
from hqconv.schemas.families import BY_MODEL_TYPE, FAMILIES, INDEX, UNSUPPORTED, Config, Family, text_config

if TYPE_CHECKING:
    from hqconv.checkpoint.folder import Checkpoint, TensorRef

NUM_NAMES_SHOWN = 5

# Lies in `experts` without being a weight: the router's correction of its scores (laguna).
_CORRECTION = ".e_score_correction_bias"
_SHARED = ("shared_expert.", "shared_experts.")  # dense, though a stack in some


@dataclass(frozen=True)
class ExpertMap:
    """The accounting of a checkpoint: each tensor is in exactly one of `converted`, `copied`, `dropped`."""

    family: str
    chosen_because: str
    blocks: tuple[ExpertBlock, ...]
    converted: dict[str, str]
    copied: tuple[str, ...]
    dropped: dict[str, str]


@runtime_checkable
class KnowsExperts(Protocol):
    """A source that does not need its tensors' names to know its experts."""

    def map_experts(self) -> ExpertMap:
        """Its experts."""


def map_checkpoint(checkpoint: Checkpoint) -> ExpertMap:
    """`map_experts` of an opened checkpoint; an artifact as a source knows its experts itself."""
    if isinstance(checkpoint, KnowsExperts):
        return checkpoint.map_experts()
    return map_experts(checkpoint.tensors, checkpoint.config, checkpoint.quantization)


def map_experts(
    tensors: Mapping[str, TensorRef], config: Config, quantization: Mapping[str, Any] | None = None
) -> ExpertMap:
    """Sorts a checkpoint's tensors into expert blocks, in layer order, and tensors to copy.

    `tensors` are all tensors by name, `config` is config.json, `quantization` its quantization_config or what
    stands for it. Raises RequestError for experts this version cannot convert (unknown names or formats, none at
    all) and InputError where names, shapes, dtypes and config contradict one another.
    """
    text = text_config(config)
    candidates = [name for name, ref in tensors.items() if looks_like_expert(name, len(ref.shape))]
    choice = _choose_family(candidates, config, text)
    family, because = choice.family, choice.because
    declared = declared_formats(quantization, text)
    grouped, unmatched = _group(family, tensors, candidates)
    if unmatched:
        raise _unmatched_error(InputError, family, unmatched, because)
    if not grouped:
        raise RequestError(
            "no MoE experts found: nothing to convert",
            expected=f"tensors such as {family.example()}",
            found=f"{len(tensors)} tensors, none of an expert ({because})",
            remedy="convert a Mixture-of-Experts checkpoint; check that the folder holds all of its files",
        )
    activation, origin = _activation(choice, text)
    layers = _layer_indices(family, grouped, text)
    dropped = _drop_zero_experts(family, grouped, layers, text)
    blocks = []
    for name in sorted(grouped, key=lambda name: (layers[name], name)):
        facts = {
            "layer": layers[name],
            "activation": _bounded(family, activation, layers[name], text),
            "top_k": _top_k(family, name, layers, text),
        }
        sizes = sizes_of(family, layers[name], text)
        format_of = _formats(declared, name, grouped[name], _is_extra(family, layers[name], text))
        block, unused = build_block(family, name, grouped[name], sizes, format_of, facts)
        blocks.append(block)
        dropped |= unused
    converted = {name: block.name for block in blocks for name in block.tensor_names()}
    copied = tuple(name for name in tensors if name not in converted and name not in dropped)
    assert len(converted) + len(dropped) + len(copied) == len(tensors), "an expert tensor was counted twice"
    assert not set(candidates).intersection(copied), "an expert tensor was lost"
    return ExpertMap(family.name, f"{because}; {origin}", tuple(blocks), converted, copied, dropped)


def _formats(declared: Declared, block: str, found: Found, is_extra: bool) -> Callable[[str], SourceFormat]:
    """The declared format of a block's modules. Humming's own rules speak of the experts module, as vLLM has it.

    `is_extra`: a layer beyond the decoder's, for predicting further tokens. Servers pass over such layers, so ignore
    lists often forget that they are not quantized.
    """
    if is_extra and _is_plain(found):
        return lambda _module: PLAIN
    return (lambda _module: declared.of(block)) if declared.method == "humming" else declared.of


def _is_plain(found: Found) -> bool:
    """Whether a block's tensors are floats and nothing else, which no format's are."""
    single = (parts for roles in found.experts.values() for parts in roles.values())
    refs = [(key, ref) for parts in chain(single, found.stacks.values()) for key, ref in parts.items()]
    return all(key in ("weight", "bias") and ref.dtype in ("BF16", "F16", "F32") for key, ref in refs)


def _is_extra(family: Family, layer: int, text: Config) -> bool:
    """Whether a layer comes after the decoder's last one."""
    num_layers = _number(text, family.num_layers_keys, 0)
    return num_layers is not None and layer >= num_layers[1]


def looks_like_expert(name: str, num_dims: int) -> bool:
    """Whether the tensor lies in an `experts` module, or is a 3-D stack in some other MoE module."""
    if "expert" not in name and "moe" not in name:
        return False
    if ".experts." in name or name.startswith("experts."):
        return not name.endswith(_CORRECTION)
    return num_dims >= 3 and not any(part in name for part in _SHARED)


class _Choice(NamedTuple):
    family: Family
    because: str
    is_own_row: bool  # the row that names this model_type, not merely one that fits


def _choose_family(candidates: list[str], config: Config, text: Config) -> _Choice:
    """The row of the model_type, or else the closest row that matches every candidate name."""
    outer, inner = str(config.get("model_type")), str(text.get("model_type"))
    if (why := UNSUPPORTED.get(outer) or UNSUPPORTED.get(inner)) and candidates:
        raise RequestError(
            "the experts of this model cannot be converted",
            where="config.json: model_type",
            expected="experts that one fused Mixture-of-Experts kernel can serve",
            found=f"{outer if outer in UNSUPPORTED else inner}: {why}",
            remedy="choose a model of another family",
        )
    known = BY_MODEL_TYPE.get(outer) or BY_MODEL_TYPE.get(inner)
    model_type = inner if known is not None and outer not in known.model_types else outer
    if known is not None:
        return _Choice(known, f"model_type {model_type}", True)
    because = f"unknown model_type {model_type}"
    # Stable: where rows fit equally well, table order decides.
    rows = sorted(FAMILIES, key=lambda row: -_num_keys_found(row, text))
    if not candidates:
        return _Choice(rows[0], because, False)
    for row in rows:
        match = name_pattern(row).fullmatch
        if all(match(name) for name in candidates):
            _refuse_unknown_stacks(row, candidates, because)
            return _Choice(row, f"closest row {row.name} for {because}", False)
    unmatched = {
        row.name: [name for name in candidates if not name_pattern(row).fullmatch(name)] for row in rows
    }
    closest = min(rows, key=lambda row: len(unmatched[row.name]))
    raise _unmatched_error(RequestError, closest, unmatched[closest.name], because)


def _refuse_unknown_stacks(row: Family, candidates: list[str], because: str) -> None:
    """Names do not say in which order a stack holds gate and up, nor whether their rows alternate."""
    pattern = _name_pattern(row.blocks, tuple(row.projections.values()), ())
    fused = [name for name in candidates if not pattern.fullmatch(name)]
    if fused:
        raise RequestError(
            "the experts of an unknown model are fused: gate and up cannot be told apart",
            where=_some(fused),
            expected=f"one tensor per expert and projection, such as {row.example()}",
            found=because,
            remedy="check model_type in config.json; a new family needs a row in hqconv/schemas/families.py",
        )


def _num_keys_found(row: Family, text: Config) -> int:
    groups = (row.num_experts_keys, row.top_k_keys, row.intermediate_size_keys, row.activation_keys)
    # A row's first key counts most: the later ones are other spellings of the same value.
    return sum(2 if text.get(keys[0]) is not None else any(key in text for key in keys) for keys in groups)


def name_pattern(family: Family) -> re.Pattern[str]:
    """Matches a whole tensor name; groups: block, expert and projection or else stack, part. Equal rows share one."""
    return _name_pattern(
        family.blocks, tuple(family.projections.values()), tuple(s.name for s in family.stacks)
    )


@cache
def _name_pattern(
    blocks: tuple[str, ...], projections: tuple[str, ...], stacks: tuple[str, ...]
) -> re.Pattern[str]:
    paths = "|".join(re.escape(t).replace(re.escape("{layer}"), INDEX) for t in blocks)
    words, parts = _any_of(projections), _any_of(sorted(PART_NAMES, key=len, reverse=True))
    single = rf"(?P<expert>{INDEX})\.(?P<projection>{words})\.(?P<part>{parts})"
    fused = rf"(?P<stack>{_any_of(stacks)})(?:[._](?P<stack_part>{parts}))?"
    return re.compile(rf"(?P<block>{paths})\.(?:{single}" + (rf"|{fused})" if stacks else ")"))


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def _group(
    family: Family, tensors: Mapping[str, TensorRef], candidates: list[str]
) -> tuple[dict[str, Found], list[str]]:
    """block name → its tensors, and the candidate names that matched nothing."""
    role_of = {name: role for role, name in family.projections.items()}
    match = name_pattern(family).fullmatch
    grouped: dict[str, Found] = {}
    unmatched = set(candidates)
    for name, ref in tensors.items():
        if name not in unmatched and "expert" not in name and "moe" not in name:
            continue
        found = match(name)
        if found is None:
            continue
        unmatched.discard(name)
        block_name, expert, projection, part, *stack = found.groups()
        if (block := grouped.get(block_name)) is None:
            block = grouped[block_name] = Found()
        if expert is not None:
            roles = block.experts.setdefault(int(expert), {})
            roles.setdefault(role_of[projection], {})[part] = ref
        else:
            block.stacks.setdefault(stack[0], {})[stack[1] or "weight"] = ref
    return grouped, [name for name in candidates if name in unmatched]


def _unmatched_error(
    kind: type[HqconvError], family: Family, unmatched: list[str], because: str
) -> HqconvError:
    return kind(
        f"{len(unmatched)} tensors look like experts but their names are not understood",
        where=_some(unmatched),
        expected=f"names such as {family.example()} ({because})",
        found="extra, renamed or fused tensors, which must not be copied as if they were dense",
        remedy="check model_type in config.json; a new naming needs a row in hqconv/schemas/families.py",
    )


def _layer_indices(family: Family, names: Iterable[str], text: Config) -> dict[str, int]:
    """block name → layer; `mtp.layers.i` counts on from the last decoder layer, as vLLM numbers it."""
    index = re.compile(r"(?:^|\.)(?:layers|blocks|mtp)\.([0-9]+)\.")
    found = {name: int(match.group(1)) for name in names if (match := index.search(name))}
    mtp = {name for name in found if name.startswith(("mtp.", "language_model.mtp."))}
    last = max((layer for name, layer in found.items() if name not in mtp), default=-1)
    configured = _number(text, family.num_layers_keys, 0)
    offset = configured[1] if configured else last + 1
    return {name: layer + offset if name in mtp else layer for name, layer in found.items()}


def _drop_zero_experts(
    family: Family, grouped: Mapping[str, Found], layers: Mapping[str, int], text: Config
) -> dict[str, str]:
    """Takes identity experts, E..E+Z-1, out of `grouped`; transformers 5 writes gate and up for them."""
    dropped: dict[str, str] = {}
    for name, found in grouped.items():
        experts = found.experts
        count = _number(text, family.num_experts_keys, layers[name])
        zeros = _number(text, family.zero_experts_keys, layers[name])
        if count is None or zeros is None:
            continue
        for e in [e for e in experts if count[1] <= e < count[1] + zeros[1] and "w2" not in experts[e]]:
            reason = (
                f"expert {e} is a zero-expert ({zeros[0]} {zeros[1]}): an identity, its weights are unused"
            )
            dropped |= {ref.name: reason for parts in experts.pop(e).values() for ref in parts.values()}
    return dropped


def sizes_of(family: Family, layer: int, text: Config) -> Sizes:
    """What the config says of the sizes of a layer's experts."""
    keys = (family.num_experts_keys, family.hidden_size_keys, family.intermediate_size_keys)
    return Sizes(*(_number(text, of_size, layer) for of_size in keys))


def _top_k(family: Family, name: str, layers: Mapping[str, int], text: Config) -> int:
    found = _number(text, family.top_k_keys, layers[name])
    if found is None:
        keys = " or ".join(family.top_k_keys)
        raise contradiction("config.json lacks the experts per token", name, keys, "no such key")
    return found[1]


def _activation(choice: _Choice, text: Config) -> tuple[str, str]:
    """The activation and where it came from; never guessed for a model_type without a row of its own."""
    family = choice.family
    if not choice.is_own_row:
        _refuse_unknown_bounds(choice, text)
    for key in family.activation_keys:
        value = text.get(key)
        if isinstance(value, str) and value:
            return value, f"activation {value} from config {key}"
    if choice.is_own_row:
        return family.activation, f"activation {family.activation} is the family's own, the config names none"
    raise RequestError(
        "the experts' activation is not known",
        where="config.json",
        expected=f"a name under {' or '.join(family.activation_keys)}, such as 'silu'",
        found=f"none ({choice.because})",
        remedy=f'add "{family.activation_keys[0]}" to config.json',
    )


def _refuse_unknown_bounds(choice: _Choice, text: Config) -> None:
    """What other families bound their activation by means nothing certain in a model without a row of its own."""
    keys = {row.limit[0] for row in FAMILIES if row.limit[0]}
    key = next((key for key in sorted(keys) if text.get(key)), None)
    if key is not None:
        raise RequestError(
            "the experts' activation is not known",
            where=f"config.json: {key}",
            expected=f"no bound, since the family is not known ({choice.because})",
            found=text[key],
            remedy="a new family needs a row in hqconv/schemas/families.py",
        )


def _bounded(family: Family, activation: str, layer: int, text: Config) -> str:
    """The activation of one layer, by the name that says its bound where the family has one; 0 and null are none."""
    key, bounded = family.limit
    limit = _of_layer(text.get(key), layer) if key else None
    if limit is None or limit == 0:
        return activation
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < float("inf"):
        raise contradiction(f"config.json: {key} is not usable", key, "a positive number", text[key])
    if not bounded.startswith(f"{activation}_"):
        what = "the experts' activation has a bound that is not known for it"
        raise contradiction(what, f"config.json: {key}", bounded.partition("_")[0], activation)
    return bounded.format(limit)


def _of_layer(value: object, layer: int) -> object:
    """A config's value for one layer; a list holds one per layer, and an MTP layer is built like the last one."""
    return value[min(layer, len(value) - 1)] if isinstance(value, list) and value else value


def _number(text: Config, keys: tuple[str, ...], layer: int) -> Size | None:
    """The first key the config has, with its value; a list holds one value per layer."""
    for key in keys:
        if text.get(key) is None:
            continue
        value = _of_layer(text[key], layer)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise contradiction(f"config.json: {key} is not usable", key, "a positive integer", text[key])
        return key, value
    return None


def _some(names: list[str]) -> str:
    more = f" … ({NUM_NAMES_SHOWN} of {len(names)})" if len(names) > NUM_NAMES_SHOWN else ""
    return ", ".join(names[:NUM_NAMES_SHOWN]) + more
