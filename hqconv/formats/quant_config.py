"""The source format that a checkpoint's quantization config declares for each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats import registry
from hqconv.formats.config_reader import ConfigReader, check_keys, refuse_rotated_model
from hqconv.formats.module_rules import Matcher, Rule
from hqconv.formats.source_format import PLAIN, SourceFormat


@dataclass(frozen=True)
class DeclaredFormats:
    """The formats that a config declares. method: its quant_method, "none" without one.

    undecided: modules that some tools read as left out and others as quantized. warnings: unknown keys of the config.
    """

    method: str
    rules: tuple[Rule, ...] = ()
    undecided: Matcher | None = None
    warnings: tuple[str, ...] = ()

    def of(self, module: str, *, is_stored_plain: bool = False) -> SourceFormat:
        """Return the format of a module's weight, by the module's dotted path; PLAIN where the config leaves it out.

        is_stored_plain: True if its tensors are all floats, which decides for modules that the config leaves ambiguous.
        """
        if is_stored_plain and self.undecided is not None and self.undecided(module):
            return PLAIN
        for rule in self.rules:
            fmt = rule(module)
            if fmt is not None:
                return fmt
        return PLAIN


def declared_formats(config: Mapping[str, Any] | None, text: Mapping[str, Any]) -> DeclaredFormats:
    """Read config.json's `quantization_config` or the content of hf_quant_config.json; None: not quantized.

    text: the language model's config. Nothing is compared with the tensors here.
    Raises RequestError for a method or variant that is not supported and for unknown keys that may change what the
    weights mean, InputError for values that make no sense.
    """
    refuse_rotated_model(text)
    if config is None:
        return DeclaredFormats("none")
    reader = ConfigReader(config, "quantization_config")
    method, methods = _method(reader), registry.methods()
    if method == "hqconv":
        raise RequestError(
            "The checkpoint's experts are in the kernel layout.",
            where="quantization_config.quant_method",
            expected="a checkpoint to convert: the kernel layout is read through its manifest, hqconv.json",
            found=method,
            remedy="Give the artifact's whole folder; where its manifest is lost, convert the original model.",
        )
    if method not in methods:
        raise RequestError(
            f"The quantization method '{method}' is not supported.",
            where="quantization_config.quant_method",
            expected=", ".join(methods),
            found=method,
            remedy="Convert the original checkpoint that it was made from.",
        )
    known = methods[method]
    rules = tuple(known.parse(reader, text))
    warnings = check_keys(reader, known.keys)
    return DeclaredFormats(method, rules, known.undecided(reader) if known.undecided else None, warnings)


def _method(config: ConfigReader) -> str:
    """Return the method under its usual name. Two old forms name none: bitsandbytes' and hf_quant_config.json."""
    if not config.has("quant_method"):
        if config.has("load_in_4bit", "load_in_8bit"):
            return "bitsandbytes"
        if config.has("quantization"):
            return "modelopt"
    name = config.text("quant_method")
    return registry.ALIASES.get(name, name)
