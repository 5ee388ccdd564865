"""What a config says of one layer's experts: their sizes, how many serve a token, and what activates them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from hqconv.errors import RequestError
from hqconv.models.families import Config, Family
from hqconv.models.family_choice import FamilyChoice
from hqconv.models.layer_checks import ConfigSizes, Size, contradiction
from hqconv.schemas.activation import CHANGING_KEYS, NUMBERS, Activation, Numbers
from hqconv.schemas.grid import MAX_SIZE


def layer_indices(family: Family, names: Iterable[str], text: Config) -> dict[str, int]:
    """block name → layer; `mtp.layers.i` counts on from the last decoder layer, as vLLM numbers it."""
    index = re.compile(r"(?:^|\.)(?:layers|blocks|mtp)\.([0-9]+)\.")
    found = {name: int(match.group(1)) for name in names if (match := index.search(name))}
    mtp = {name for name in found if name.startswith(("mtp.", "language_model.mtp."))}
    last = max((layer for name, layer in found.items() if name not in mtp), default=-1)
    configured = number(text, family.num_layers_keys, 0)
    offset = configured[1] if configured else last + 1
    return {name: layer + offset if name in mtp else layer for name, layer in found.items()}


def layer_config(family: Family, layer: int, text: Config) -> Config:
    """The config as one layer has it, where layers have values of their own. Raises InputError for too short a list."""
    each = text.get(family.layer_configs_key) if family.layer_configs_key else None
    if each is None:
        return text
    if not isinstance(each, list) or len(each) <= layer or not isinstance(each[layer], Mapping):
        expected = f"an element with the values of layer {layer}"
        raise contradiction(
            "A value of config.json is not usable.", family.layer_configs_key, expected, "none"
        )
    return {**text, **{key: value for key, value in each[layer].items() if value is not None}}


def sizes_of(family: Family, layer: int, text: Config) -> ConfigSizes:
    """What the config says of the sizes of a layer's experts."""
    keys = (family.num_experts_keys, family.hidden_size_keys, family.intermediate_size_keys)
    return ConfigSizes(*(number(text, of_size, layer) for of_size in keys))


def top_k(family: Family, name: str, layer: int, text: Config) -> int:
    """How many experts serve a token in one layer."""
    found = number(text, family.top_k_keys, layer)
    if found is None:
        keys = " or ".join(family.top_k_keys)
        raise contradiction("The config lacks the number of experts per token.", name, keys, "no such key")
    return found[1]


def named_activation(choice: FamilyChoice, text: Config) -> tuple[str, str]:
    """The activation's name and where it came from; never guessed for a model_type without a row of its own."""
    family = choice.family
    for key in family.activation_keys:
        value = text.get(key)
        if isinstance(value, str) and value:
            return value, f"activation {value} from config {key}"
    if choice.is_own_row:
        return family.activation, f"activation {family.activation} is the family's own, the config names none"
    raise RequestError(
        "The experts' activation is not known.",
        where="config.json",
        expected=f"a name under {' or '.join(family.activation_keys)}, such as 'silu'",
        found=f"none ({choice.because})",
        remedy=f'Add "{family.activation_keys[0]}" to config.json.',
    )


def activation_of(choice: FamilyChoice, name: str, layer: int, text: Config) -> Activation:
    """The activation of one layer with its numbers, as the model's own code takes them from the config.

    Where a config has numbers that this model's code is not known to read, the activation has a name of its own such as
    `silu+swiglu_limit`, of which nothing else is known. Raises InputError for a value that is no number.
    """
    numbers = _numbers_of(choice, text)
    own = set(numbers.keys.values()) if numbers is not None and numbers.plain == name else set()
    foreign = [key for key in CHANGING_KEYS if key not in own and _reached(text.get(key), layer)]
    if foreign:
        return Activation("+".join((name, *foreign)))
    if numbers is None or numbers.plain != name:
        return Activation.of_label(name)
    return numbers.with_numbers(
        {field: _number_at(numbers, field, text, layer) for field, key in numbers.keys.items() if key in text}
    )


def _numbers_of(choice: FamilyChoice, text: Config) -> Numbers | None:
    """Where the model's numbers are; another family's keys mean nothing certain in a model without a row of its own."""
    of_type = NUMBERS.get(str(text.get("model_type")))
    return NUMBERS.get(choice.family.name) if of_type is None and choice.is_own_row else of_type


def _reached(value: object, layer: int) -> object:
    """A config's value for one layer; layers that a list does not reach have none, as in vLLM's model classes."""
    if isinstance(value, list):
        return value[layer] if layer < len(value) else None
    return value


def _number_at(numbers: Numbers, field: str, text: Config, layer: int) -> float | None:
    """One number of one layer; None for null, and for 0 where that switches something off."""
    key = numbers.keys[field]
    value = _reached(text[key], layer)
    if value is None or (value == 0 and field not in numbers.any_value):
        return None
    least = -math.inf if field in numbers.any_value else 0
    if not isinstance(value, int | float) or isinstance(value, bool) or not least < value < math.inf:
        expected = "a finite number" if field in numbers.any_value else "a positive number"
        raise contradiction("A value of config.json is not usable.", key, expected, text[key])
    return float(value)


def _of_layer(value: object, layer: int) -> object:
    """A config's value for one layer; a list holds one per layer, and an MTP layer is built like the last one."""
    return value[min(layer, len(value) - 1)] if isinstance(value, list) and value else value


def number(text: Config, keys: tuple[str, ...], layer: int) -> Size | None:
    """The first key the config has, with its value; a list holds one value per layer.

    Raises InputError for a value that is no whole number, or one that no model has.
    """
    for key in keys:
        if text.get(key) is None:
            continue
        value = _of_layer(text[key], layer)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < MAX_SIZE:
            expected = f"a positive integer below {MAX_SIZE}"
            raise contradiction("A value of config.json is not usable.", key, expected, text[key])
        return key, value
    return None
