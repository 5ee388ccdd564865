"""What a checkpoint's quantization config declares: the source format of each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats import ascend, floats, humming, methods, quark, schemes
from hqconv.formats.config_reader import ConfigReader, Matcher, Rule
from hqconv.formats.source_format import PLAIN, SourceFormat

Parser = Callable[[ConfigReader, Mapping[str, Any]], list[Rule]]

_PARSERS: dict[str, Parser] = {
    "ascend": ascend.ascend,
    "auto-round": methods.auto_round,
    "awq": methods.awq,
    "bitnet": methods.bitnet,
    "bitsandbytes": methods.bitsandbytes,
    "compressed-tensors": schemes.compressed_tensors,
    "fbgemm_fp8": floats.fbgemm_fp8,
    "fp8": floats.fp8,
    "gptq": methods.gptq,
    "humming": humming.humming,
    "modelopt": schemes.modelopt,
    "mxfp4": floats.mxfp4,
    "mxfp8": floats.mxfp8,
    "quark": quark.quark,
}
# What tools that write a method read otherwise than its rules: these modules may also be left out.
_DOUBTS: dict[str, Callable[[ConfigReader], Matcher]] = {"awq": methods.awq_doubts}
_OTHER_NAMES = {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}


@dataclass(frozen=True)
class DeclaredFormats:
    """The formats that a config declares. method: its quant_method, "none" without one.

    doubts: modules that the config leaves out or not, as one reads it.
    """

    method: str
    rules: tuple[Rule, ...] = ()
    doubts: Matcher | None = None

    def of(self, module: str, *, is_stored_plain: bool = False) -> SourceFormat:
        """The format of a module's weight, by the module's dotted path; PLAIN where the config leaves it out.

        is_stored_plain: whether its tensors are floats and nothing else, which decides where the config can be read
        both ways.
        """
        if is_stored_plain and self.doubts is not None and self.doubts(module):
            return PLAIN
        for rule in self.rules:
            found = rule(module)
            if found is not None:
                return found
        return PLAIN


def declared_formats(words: Mapping[str, Any] | None, text: Mapping[str, Any]) -> DeclaredFormats:
    """Read config.json's `quantization_config` or the content of hf_quant_config.json; None: not quantized.

    text: the language model's config. Nothing is compared with the tensors here.
    Raises RequestError for a method or variant that is not supported, InputError for values that make no sense.
    """
    if words is None:
        return DeclaredFormats("none")
    config = ConfigReader(words, "quantization_config")
    method = _method(config)
    if method == "hqconv":
        raise RequestError(
            "The checkpoint's experts are in the kernel layout.",
            where="quantization_config.quant_method",
            expected="a checkpoint to convert: the kernel layout is read through its manifest, hqconv.json",
            found=method,
            remedy="Give the artifact's whole folder; where its manifest is lost, convert the original model.",
        )
    if method not in _PARSERS:
        raise RequestError(
            f"The quantization method '{method}' is not supported.",
            where="quantization_config.quant_method",
            expected=", ".join(_PARSERS),
            found=method,
            remedy="Convert the original checkpoint that it was made from.",
        )
    doubts = _DOUBTS[method](config) if method in _DOUBTS else None
    return DeclaredFormats(method, tuple(_PARSERS[method](config, text)), doubts)


def _method(config: ConfigReader) -> str:
    """The method under its usual name. Two old forms name none: bitsandbytes' and hf_quant_config.json."""
    if not config.has("quant_method"):
        if config.has("load_in_4bit", "load_in_8bit"):
            return "bitsandbytes"
        if config.has("quantization"):
            return "modelopt"
    name = config.text("quant_method")
    return _OTHER_NAMES.get(name, name)
