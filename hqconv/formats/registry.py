"""Registry of checkpoint formats: quantization methods of configs, and stored encodings of matrices.

A *method* is the `quant_method` of a config (gptq, compressed-tensors, modelopt …). It gives each module its
`SourceFormat`. An *encoding* is the storage of one matrix in a format (packed_int, fp8, nvfp4 …); several methods may
declare the same one. Every module of this folder may register either: a new format needs only a new module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from hqconv import formats
from hqconv.errors import InputError
from hqconv.formats.config_reader import ConfigReader, Keys, Text
from hqconv.formats.encoding import Encoding
from hqconv.formats.module_rules import Matcher, Rule

E = TypeVar("E", bound=Encoding)
Parser = Callable[[ConfigReader, Text], list[Rule]]  # the first rule that gives a module a format counts


@dataclass(frozen=True)
class QuantMethod:
    """A quantization method. keys: the known keys of its config.

    undecided: modules that tools read as left out or as quantized, for one config.
    """

    name: str
    parse: Parser
    keys: Keys
    undecided: Callable[[ConfigReader], Matcher] | None = None


METHODS: dict[str, QuantMethod] = {}  # by name
ALIASES: dict[str, str] = {}  # other spellings of a method's name
ENCODINGS: dict[str, Encoding] = {}  # by name


def quant_method(
    name: str, *aliases: str, keys: Keys, undecided: Callable[[ConfigReader], Matcher] | None = None
) -> Callable[[Parser], Parser]:
    """Register the decorated function as the parser of a method's config, whose known keys are `keys`."""

    def register(parse: Parser) -> Parser:
        METHODS[name] = QuantMethod(name, parse, keys, undecided)
        ALIASES.update(dict.fromkeys(aliases, name))
        return parse

    return register


def register_encoding(kind: type[E]) -> type[E]:
    """Register the decorated class as a stored encoding."""
    ENCODINGS[kind.name] = kind()
    return kind


@cache
def load_formats() -> None:
    """Import every module of this folder, so that it registers its methods and encodings."""
    for module in sorted(info.name for info in pkgutil.iter_modules(formats.__path__)):
        importlib.import_module(f"{formats.__name__}.{module}")


def methods() -> dict[str, QuantMethod]:
    """Return the methods by name, sorted."""
    load_formats()
    return dict(sorted(METHODS.items()))


def encoding(name: str) -> Encoding:
    """Return an encoding by its name; InputError for an unknown name (a manifest of a later hqconv)."""
    load_formats()
    if name not in ENCODINGS:
        raise InputError("The stored encoding is not known.", expected=", ".join(sorted(ENCODINGS)), found=name)
    return ENCODINGS[name]


def weight_names() -> tuple[str, ...]:
    """Return the raw names that a tensor of codes may have in any encoding, "weight" first."""
    load_formats()
    names = {name for one in ENCODINGS.values() for name in one.weight_names}
    return tuple(sorted(names, key=lambda name: (name != "weight", name)))


def part_names() -> tuple[str, ...]:
    """Return the raw part names of all encodings, names of codes first."""
    first = weight_names()
    others = {name for one in ENCODINGS.values() for name in one.part_names}
    return (*first, *sorted(others - set(first)), "bias", *UNUSED_PARTS)


_ACTIVATIONS = "activation scale, not used by 16-bit activations"
# Parts that no encoding needs -> reason for dropping them.
UNUSED_PARTS = {
    "input_scale": _ACTIVATIONS,
    "input_scale_2": _ACTIVATIONS,
    "input_global_scale": _ACTIVATIONS,
    "input_zero_point": _ACTIVATIONS,
    "activation_scale": _ACTIVATIONS,
    "output_scale": _ACTIVATIONS,
    "output_zero_point": _ACTIVATIONS,
    "weight_shape": "shape of the packed weight: implied",
}
