"""Values of config.json for the experts of one layer: sizes, experts per token, and the activation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.errors import InputError, RequestError, first_few
from hqconv.models.families import INDEX, TOP_K_KEYS, Family
from hqconv.models.tensor_names import FamilyChoice
from hqconv.schemas.activation import CHANGING_KEYS, NUMBERS, Activation, Numbers, may_change
from hqconv.schemas.artifact_names import Config, text_config
from hqconv.schemas.grid import MAX_SIZE

Size = tuple[str, int]  # the config key of a value, "" if from shapes, and the value
REMEDY = "Check that the checkpoint is complete and that config.json belongs to it."
TWICE = "Leave one of both in the files: they may belong to two versions of the model."
_UNUSABLE = "A value of config.json is not usable."

# Keys that change what a model computes; those that a publisher may mean to change, such as for longer contexts.
_FUNCTION = re.compile(
    r"top_?k|per_tok|scor|routed_scal|n_group|hidden_act|activation|rope|rotary|theta|_eps(?:ilon)?$|_heads$|head_dim|"
    r"sliding|layer_types|limit|softcap|tie_word|qk_norm|multiplier|beta|alpha|factor"
)
MEANT_KEYS = re.compile(
    r"aux|loss|output_|rope_type|^factor|beta_|attention_factor|max_position|original_max|mscale"
)
_USUAL = (None, False, 0, 1, "default")


@dataclass(frozen=True)
class ConfigSizes:
    """Sizes of a layer's experts as config.json gives them; None for a missing key."""

    num_experts: Size | None
    hidden: Size | None
    intermediate: Size | None


def contradiction(
    what: str, where: str, expected: object, found: object, remedy: str = REMEDY
) -> InputError:
    """Return the error for tensors and a config that contradict each other."""
    return InputError(what, where=where, expected=expected, found=found, remedy=remedy)


def layer_indices(family: Family, names: Iterable[str], text: Config) -> dict[str, int]:
    """Map names of MoE layers to layer indices; `mtp.layers.i` follow the last decoder layer, as in vLLM."""
    pattern = re.compile(r"(?:^|\.)(?:layers|blocks|mtp|mtp_layers|meta_mlp)\.([0-9]+)\.")
    indices = {name: int(match.group(1)) for name in names if (match := pattern.search(name))}
    mtp = {
        name for name in indices if name.startswith(("mtp.", "language_model.mtp.", "mtp_layers."))
    }
    last = max((index for name, index in indices.items() if name not in mtp), default=-1)
    num_layers = config_number(text, family.num_layers_keys, 0)
    offset = num_layers[1] if num_layers else last + 1
    return {name: index + offset if name in mtp else index for name, index in indices.items()}


_DECODER_LAYER = re.compile(rf"((?:\w+\.)*?(?:layers|blocks))\.({INDEX})\.")
# Number of multi-token-prediction layers, which follow the decoder's last one.
DRAFT_LAYERS_KEYS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_layers",
)


def is_draft(family: Family, index: int, text: Config) -> bool:
    """Return whether a layer follows the decoder's last one: it predicts further tokens, or drafts them."""
    num_layers = config_number(text, family.num_layers_keys, 0)
    return num_layers is not None and index >= num_layers[1]


def layer_notices(
    family: Family, moe_layers: Iterable[str], names: Iterable[str], text: Config
) -> list[str]:
    """Return warnings where the decoder layers of a checkpoint are not those that its config counts.

    moe_layers: names of the experts modules. names: of all tensors. No warning where the config has no number, or
    where MoE layers lie in several stacks, such as an encoder and a decoder.
    """
    num_layers = config_number(text, family.num_layers_keys, 0)
    layers = [_DECODER_LAYER.match(name) for name in moe_layers]
    stacks = {layer[1] for layer in layers if layer and "mtp" not in layer[1].split(".")}
    if num_layers is None or len(stacks) != 1:
        return []
    stack = stacks.pop()
    key, count = num_layers
    found = (_DECODER_LAYER.match(name) for name in names if name.startswith(f"{stack}."))
    indices = {int(layer[2]) for layer in found if layer and layer[1] == stack}
    counted = f"config.json counts {count} layers ({key})"
    missing = [str(index) for index in range(count) if index not in indices]
    if missing:
        return [
            f"{counted}, and the checkpoint has no tensor of layer {first_few(missing)}: a server does not load it "
            "whole. Check that the download is complete and that config.json belongs to it."
        ]
    declared = [text.get(draft_key) for draft_key in DRAFT_LAYERS_KEYS]
    num_drafts = [value for value in declared if isinstance(value, int)]
    # Not every config mentions a draft.
    if max(indices) >= count + max([1, *num_drafts]):
        return [
            f"{counted}, and the checkpoint has {max(indices) + 1}: a server leaves out the rest. Check that "
            "config.json belongs to the checkpoint."
        ]
    return []


def layer_config(family: Family, layer: int, text: Config) -> Config:
    """Merge one layer's entry of a per-layer list into the config. Raises InputError for too short a list."""
    configs = text.get(family.layer_configs_key) if family.layer_configs_key else None
    if configs is None:
        return text
    if (
        not isinstance(configs, list)
        or len(configs) <= layer
        or not isinstance(configs[layer], Mapping)
    ):
        expected = f"an element with the values of layer {layer}"
        raise contradiction(_UNUSABLE, family.layer_configs_key, expected, "none")
    return {**text, **{key: value for key, value in configs[layer].items() if value is not None}}


def config_sizes(family: Family, layer: int, text: Config) -> ConfigSizes:
    """Read the sizes of a layer's experts."""
    keys = (family.num_experts_keys, family.hidden_size_keys, family.intermediate_size_keys)
    return ConfigSizes(*(config_number(text, size_keys, layer) for size_keys in keys))


def top_k(family: Family, name: str, layer: int, text: Config) -> int:
    """Read the number of experts per token in one layer. Raises InputError without it."""
    keys = tuple(dict.fromkeys((*family.top_k_keys, *TOP_K_KEYS)))
    size = config_number(text, keys, layer)
    if size is None:
        what = "The config lacks the number of experts per token."
        raise contradiction(what, name, " or ".join(keys), "no such key")
    return size[1]


def named_activation(choice: FamilyChoice, text: Config) -> tuple[str, str]:
    """Return the activation's name and its origin; no guess for a model_type without a row in the families table."""
    family = choice.family
    for key in family.activation_keys:
        value = text.get(key)
        if isinstance(value, str) and value:
            return value, f"activation {value} from config {key}"
    if choice.is_own_row:
        return (
            family.activation,
            f"activation {family.activation} is the family's own, the config names none",
        )
    raise RequestError(
        "The experts' activation is not known.",
        where="config.json",
        expected=f"a name under {' or '.join(family.activation_keys)}, such as 'silu'",
        found=f"none ({choice.because})",
        remedy=f'Add "{family.activation_keys[0]}" to config.json.',
    )


def activation_of(choice: FamilyChoice, name: str, layer: int, text: Config) -> Activation:
    """Return the activation of one layer with its numbers, as the model's code reads them from the config.

    If a config has numbers that this model's code is not known to read, the activation gets a name such as
    `silu+swiglu_limit` without a known formula; the keys of an unknown model are judged by their words. Raises
    InputError for a value that is no number.
    """
    # Without a row for the model no other family's keys are used.
    numbers = NUMBERS.get(str(text.get("model_type")))
    if numbers is None and choice.is_own_row:
        numbers = NUMBERS.get(choice.family.name)
    if numbers is not None and numbers.plain != name:
        numbers = None
    own = set(numbers.keys.values()) if numbers is not None else set()
    keys = list(CHANGING_KEYS)
    if not choice.is_own_row:
        changing = [key for key in text if may_change(key) and _is_number(text[key])]
        keys += sorted(set(changing).difference(keys))
    foreign = [key for key in keys if key not in own and _reached(text.get(key), layer)]
    if foreign:
        return Activation("+".join((name, *foreign)))
    if numbers is None:
        return Activation.of_label(name)
    found = {
        number: _number_at(numbers, number, text, layer)
        for number, key in numbers.keys.items()
        if key in text
    }
    return numbers.with_numbers(found)


def _reached(value: object, layer: int) -> object:
    """Return a config's value for one layer; None for layers beyond the end of a list, as in vLLM's model classes."""
    if isinstance(value, list):
        return value[layer] if layer < len(value) else None
    return value


def _is_number(value: object) -> bool:
    """Return True for a number or a flag, or a list with one for each layer."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(number, int | float | None) for number in values)


def _number_at(numbers: Numbers, field: str, text: Config, layer: int) -> float | None:
    """Read one number of one layer; None for null, and for 0 where 0 switches a feature off."""
    key = numbers.keys[field]
    value = _reached(text[key], layer)
    if value is None or (value == 0 and field not in numbers.any_value):
        return None
    is_signed = field in numbers.any_value
    least = -MAX_SIZE if is_signed else 0
    if (
        not isinstance(value, int | float)
        or not least < value < MAX_SIZE
        or isinstance(value, bool)
    ):
        expected = f"a {'' if is_signed else 'positive '}number below {MAX_SIZE}"
        raise contradiction(_UNUSABLE, key, expected, repr(text[key]))
    return float(value)


def function_changes(config: Config, original: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield keys that change what a model computes: the original's value and the config's, None for an absent key.

    Keys that one of both lacks, and that have a usual value in the other, are left out.
    """
    ours = _function_of(config)
    theirs = _function_of(original)
    for key in sorted(ours.keys() | theirs.keys()):
        found = ours.get(key)
        expected = theirs.get(key)
        is_usual = key not in ours.keys() & theirs.keys() and (found or expected) in _USUAL
        numbers = [value for value in (found, expected) if isinstance(value, int | float)]
        is_same = found == expected or (len(numbers) == 2 and math.isclose(*numbers, rel_tol=1e-6))
        if not is_same and not is_usual:  # GGUF has float32
            yield key, expected, found


def _function_of(config: Config) -> dict[str, Any]:
    text = {**text_config(config)}
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.pop(key, None)
        text |= rope if isinstance(rope, dict) else {}
    return {key: value for key, value in text.items() if _FUNCTION.search(key)}


def config_number(text: Config, keys: tuple[str, ...], layer: int) -> Size | None:
    """Return the first of some keys that the config has, with its value for one layer; None without any.

    A list holds one value per layer; an MTP layer has the last one. Raises InputError for a value that is no positive
    whole number of plausible size.
    """
    for key in keys:
        if text.get(key) is None:
            continue
        value = text[key]
        if isinstance(value, list) and value:
            value = value[min(layer, len(value) - 1)]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MAX_SIZE:
            expected = f"a positive integer below {MAX_SIZE}"
            raise contradiction(_UNUSABLE, key, expected, repr(text[key]))
        return key, value
    return None
