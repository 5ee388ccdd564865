"""What a config says of one layer's experts: their sizes, how many serve a token, and what activates them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hqconv.errors import RequestError
from hqconv.experts.checks import Size, Sizes, contradiction
from hqconv.experts.names import Choice
from hqconv.schemas.families import FAMILIES, Config, Family


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


def sizes_of(family: Family, layer: int, text: Config) -> Sizes:
    """What the config says of the sizes of a layer's experts."""
    keys = (family.num_experts_keys, family.hidden_size_keys, family.intermediate_size_keys)
    return Sizes(*(number(text, of_size, layer) for of_size in keys))


def top_k(family: Family, name: str, layer: int, text: Config) -> int:
    """How many experts serve a token in one layer."""
    found = number(text, family.top_k_keys, layer)
    if found is None:
        keys = " or ".join(family.top_k_keys)
        raise contradiction("The config lacks the number of experts per token.", name, keys, "no such key")
    return found[1]


def activation_of(choice: Choice, text: Config) -> tuple[str, str]:
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
        "The experts' activation is not known.",
        where="config.json",
        expected=f"a name under {' or '.join(family.activation_keys)}, such as 'silu'",
        found=f"none ({choice.because})",
        remedy=f'Add "{family.activation_keys[0]}" to config.json.',
    )


def _refuse_unknown_bounds(choice: Choice, text: Config) -> None:
    """What other families bound their activation by means nothing certain in a model without a row of its own."""
    keys = {row.limit[0] for row in FAMILIES if row.limit[0]}
    key = next((key for key in sorted(keys) if text.get(key)), None)
    if key is not None:
        raise RequestError(
            "The experts' activation is not known.",
            where=f"config.json: {key}",
            expected=f"no bound, since the family is not known ({choice.because})",
            found=text[key],
            remedy="A new family needs a row in hqconv/schemas/families.py.",
        )


def bounded(family: Family, activation: str, layer: int, text: Config) -> str:
    """The activation of one layer, by the name that says its bound where the family has one; 0 and null are none."""
    key, name = family.limit
    limit = _of_layer(text.get(key), layer) if key else None
    if limit is None or limit == 0:
        return activation
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < float("inf"):
        raise contradiction("A value of config.json is not usable.", key, "a positive number", text[key])
    if not name.startswith(f"{activation}_"):
        what = "The experts' activation has a bound that is not known for it."
        raise contradiction(what, f"config.json: {key}", name.partition("_")[0], activation)
    return name.format(limit)


def _of_layer(value: object, layer: int) -> object:
    """A config's value for one layer; a list holds one per layer, and an MTP layer is built like the last one."""
    return value[min(layer, len(value) - 1)] if isinstance(value, list) and value else value


def number(text: Config, keys: tuple[str, ...], layer: int) -> Size | None:
    """The first key the config has, with its value; a list holds one value per layer."""
    for key in keys:
        if text.get(key) is None:
            continue
        value = _of_layer(text[key], layer)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise contradiction("A value of config.json is not usable.", key, "a positive integer", text[key])
        return key, value
    return None
