"""The source format that a checkpoint's quantization config declares for each module.

A *method* is the `quant_method` of a config (gptq, compressed-tensors, modelopt …). It gives each module its
`SourceFormat`; several methods may declare the same encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats.config_reader import ConfigReader, Keys, Text, check_keys, refuse_rotated_model
from hqconv.formats.encoding import load_formats
from hqconv.formats.module_rules import Matcher, Rule
from hqconv.formats.source_format import PLAIN, SourceFormat

Parser = Callable[
    [ConfigReader, Text], list[Rule]
]  # the first rule that gives a module a format counts


@dataclass(frozen=True)
class QuantMethod:
    """A quantization method. keys: the known keys of its config.

    undecided: modules that tools read as left out or as quantized, for one config. doubts: warnings about one config.
    """

    name: str
    parse: Parser
    keys: Keys
    undecided: Callable[[ConfigReader], Matcher] | None = None
    doubts: Callable[[ConfigReader], Iterable[str]] | None = None


# Keys that name modules with a format of their own, and modules without any, in the order in which messages name them.
_CHOOSING = (
    "config_groups",
    "quantized_layers",
    "modules_in_block_to_quantize",
    "block_name_to_quantize",
    "modules",
)
_LEAVING = (
    *(
        "ignore",
        "exclude_modules",
        "exclude",
        "modules_to_not_convert",
        "ignored_layers",
        "llm_int8_skip_modules",
    ),
    *("dynamic", "extra_config"),
)
METHODS: dict[str, QuantMethod] = {}  # by name
ALIASES: dict[str, str] = {}  # other spellings of a method's name


def quant_method(
    name: str,
    *aliases: str,
    keys: Keys,
    undecided: Callable[[ConfigReader], Matcher] | None = None,
    doubts: Callable[[ConfigReader], Iterable[str]] | None = None,
) -> Callable[[Parser], Parser]:
    """Register the decorated function as the parser of a method's config, whose known keys are `keys`."""

    def register(parse: Parser) -> Parser:
        METHODS[name] = QuantMethod(name, parse, keys, undecided, doubts)
        ALIASES.update(dict.fromkeys(aliases, name))
        return parse

    return register


def methods() -> dict[str, QuantMethod]:
    """Return the methods by name, sorted."""
    load_formats()
    return dict(sorted(METHODS.items()))


@dataclass(frozen=True)
class DeclaredFormats:
    """The formats that a config declares. method: its quant_method, "none" without one.

    undecided: modules that some tools read as left out and others as quantized. warnings: unknown keys, doubts.
    choosing_key, leaving_key: the keys that name the modules that have a format, and those that have none.
    """

    method: str
    rules: tuple[Rule, ...] = ()
    undecided: Matcher | None = None
    warnings: tuple[str, ...] = ()
    choosing_key: str = ""
    leaving_key: str = ""

    def of(self, module: str, *, is_stored_plain: bool = False) -> SourceFormat:
        """Return the format of a module's weight, by the module's dotted path; PLAIN where the config leaves it out.

        is_stored_plain: True if its tensors are all floats, which decides for modules that the config leaves ambiguous.
        """
        if is_stored_plain and self.undecided is not None and self.undecided(module):
            return PLAIN
        return self._by_rules(module) or PLAIN

    def of_single(self, module: str) -> SourceFormat | None:
        """Return the format that a rule gives one module of an experts layer, where rules are for layers as Humming's.

        None where only rules that leave modules out match, or the last one, which is for all modules.
        """
        own = (
            fmt
            for rule in self.rules[:-1]
            if (fmt := rule(module)) is not None and not fmt.is_float
        )
        return next(own, None)

    def leaves_out(self, module: str) -> bool:
        """Return True if an entry of the config says that a module is not quantized."""
        fmt = self._by_rules(module)
        return fmt is not None and fmt.is_float

    def _by_rules(self, module: str) -> SourceFormat | None:
        for rule in self.rules:
            fmt = rule(module)
            if fmt is not None:
                return fmt
        return None

    def remedy(self, module: str, *, is_left_over: bool) -> str:
        """Return what to do where a module's tensors and the config disagree about it being quantized.

        is_left_over: no tensor of the checkpoint is quantized.
        """
        if self.method == "none":
            return "Restore quantization_config in config.json (or hf_quant_config.json)."
        if is_left_over:
            return (
                "No tensor of the checkpoint is quantized: take quantization_config out of config.json (or the file "
                "hf_quant_config.json or quant_model_description.json away)."
            )
        fmt, config = self._by_rules(module), f"of the quantization config ({self.method})"
        if fmt is not None and not fmt.is_float:
            return f"List {module} under {self.leaving_key or 'the keys'} {config}, or restore its weight."
        if fmt is not None and self.leaving_key:
            return f"Correct {self.leaving_key} {config}, which leaves {module} out."
        return (
            f"Correct {self.choosing_key or 'the names'} {config}: no entry there matches {module}."
        )


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
    method, known = _method(reader), methods()
    if method == "hqconv":
        raise RequestError(
            "The checkpoint's experts are in the kernel layout.",
            where="quantization_config.quant_method",
            expected="a checkpoint to convert: the kernel layout is read through its manifest, hqconv.json",
            found=method,
            remedy="Give the artifact's whole folder; where its manifest is lost, convert the original model.",
        )
    if method not in known:
        raise RequestError(
            f"The quantization method '{method}' is not supported.",
            where="quantization_config.quant_method",
            expected=", ".join(known),
            found=method,
            remedy="Convert the original checkpoint that it was made from.",
        )
    own = known[method]
    rules = tuple(own.parse(reader, text))
    warnings = (*check_keys(reader, own.keys), *(own.doubts(reader) if own.doubts else ()))
    undecided = own.undecided(reader) if own.undecided else None
    holder = reader.table("quantization") if reader.has("quantization") else reader
    choosing, leaving = (
        [key for key in keys if key in own.keys.names] for keys in (_CHOOSING, _LEAVING)
    )
    return DeclaredFormats(
        method, rules, undecided, warnings, holder.first(*choosing, ""), holder.first(*leaving, "")
    )


def _method(config: ConfigReader) -> str:
    """Return the method under its usual name. Two old forms name none: bitsandbytes' and hf_quant_config.json."""
    if not config.has("quant_method"):
        if config.has("load_in_4bit", "load_in_8bit"):
            return "bitsandbytes"
        if config.has("quantization"):
            return "modelopt"
    name = config.text("quant_method")
    return ALIASES.get(name, name)
