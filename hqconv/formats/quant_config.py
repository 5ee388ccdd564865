"""The source format that a checkpoint's quantization config declares for each module.

A *method* is the `quant_method` of a config (gptq, compressed-tensors, modelopt …). Its parser returns rules: names and
patterns of modules, and the format that they give. Several methods may declare the same encoding.

Patterns of untrusted configs are matched by RE2, in time that is linear in the name; Python's `re` knows no limit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import re2  # type: ignore[import-untyped]

from hqconv.errors import RequestError
from hqconv.formats.config_reader import (
    COMMON,
    ConfigReader,
    Keys,
    TextConfig,
    check_keys,
    refuse_rotated_model,
)
from hqconv.formats.encoding import load_formats
from hqconv.formats.source_format import PLAIN, SourceFormat
from hqconv.schemas.artifact_names import DENSE_CONFIG, split_dense

# --- rules ---------------------------------------------------------------------------------------------------

Matcher = Callable[[str], bool]
# A module's format by one rule of a config; None where the rule does not apply. The first rule that applies counts.
ModuleRule = Callable[[str], SourceFormat | None]

_OPTIONS = re2.Options()
_OPTIONS.max_mem = 64 << 20  # bytes, most of them for what was matched before
_OPTIONS.never_capture = True
_OPTIONS.log_errors = False
_MAX_INSTRUCTIONS = 100_000  # of a pattern or a list of them: a character is one, a repetition many


def when(matches: Matcher, gives: SourceFormat = PLAIN) -> ModuleRule:
    """Return the rule that gives a format to the modules that match."""
    return lambda module: gives if matches(module) else None


def always(gives: SourceFormat) -> ModuleRule:
    """Return the rule that gives a format to every module."""
    return lambda _module: gives


def parents(module: str) -> Iterator[str]:
    """Yield the module's own name, then the names of the modules around it, innermost first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def regex_matcher(patterns: Iterable[str], where: str, *, ending: str = "") -> Matcher:
    """Match names from their start with regular expressions of a config.

    ending: what must follow a match, an expression of ours. Of Python's syntax lookarounds and backreferences take more
    than linear time; a negative lookahead at the start, `(?!…)`, is matched apart, and the others are refused.
    Raises RequestError.
    """
    matchers: list[Matcher] = []
    plain: list[str] = []
    for pattern in sorted(patterns):
        forbidden, rest = _split_lookahead(pattern)
        matches = _compiled(f"(?:{rest}){ending}", pattern, where)
        if forbidden:
            matchers.append(_without(_compiled(forbidden, pattern, where), matches))
        else:
            plain.append(f"(?:{rest})")
    if plain:  # at once, since there may be hundreds
        matchers.append(_compiled(f"(?:{'|'.join(plain)}){ending}", plain[0], where))
    return lambda name: any(matches(name) for matches in matchers)


def _compiled(regex: str, pattern: str, where: str) -> Matcher:
    try:
        compiled = re2.compile(regex, _OPTIONS)
        problem = "" if compiled.programsize <= _MAX_INSTRUCTIONS else "it is too large"
    except re2.error as error:
        problem = error.args[0].decode()
    if problem:
        raise RequestError(
            "A pattern of the quantization config cannot be matched in linear time.",
            where=where,
            expected="RE2's syntax: no backreferences, and of lookarounds only (?!…) at the start",
            found=f"{pattern!r}: {problem}",
            remedy="Write shorter patterns without it, or list the modules by name.",
        )
    matcher: Matcher = compiled.match
    return matcher


def _without(forbidden: Matcher, matches: Matcher) -> Matcher:
    return lambda name: bool(matches(name)) and not forbidden(name)


def _split_lookahead(pattern: str) -> tuple[str, str]:
    """Split `(?!forbidden)rest`; "" and the pattern for any other."""
    start = pattern.removeprefix("^")
    if not start.startswith("(?!"):
        return "", pattern
    depth = 0
    end = 0
    for token in re.finditer(r"\\.|[()|]", start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[0] == "|":
            return "", pattern
        if depth == 0 and not end:
            end = token.end()
    return start[3 : end - 1], start[end:]


def named_in(
    entries: Iterable[str],
    where: str,
    *,
    to_regex: Callable[[str], str] = lambda name: f"{re.escape(name)}$",
    with_parents: bool = False,
) -> Matcher:
    """Match names that equal an entry, or match one that begins with "re:" from their start.

    to_regex: the pattern of an entry without "re:". with_parents: also names of modules inside one that matches.
    """
    patterns = [entry[3:] if entry.startswith("re:") else to_regex(entry) for entry in entries]
    is_named = cache(regex_matcher(patterns, where))
    if not with_parents:
        return is_named
    return lambda module: any(map(is_named, parents(module)))


def globbed_in(entries: Iterable[str], where: str, *, with_parents: bool = False) -> Matcher:
    """Match names that match a shell pattern as a whole, or an entry that begins with "re:" from their start."""
    return named_in(entries, where, to_regex=_glob_regex, with_parents=with_parents)


def _glob_regex(pattern: str) -> str:
    """Return Python's translation of a shell pattern in RE2's syntax: without atomic groups, `$` for `\\Z`."""
    return f"{fnmatch.translate(pattern)[:-2]}$".replace("(?>", "(?:")


def containing(entries: Iterable[str]) -> Matcher:
    """Match names that contain one of the strings."""
    entries = list(entries)
    return lambda module: any(entry in module for entry in entries)


def on_path(entries: Iterable[str]) -> Matcher:
    """Match names that have an entry among their components: "gate" is on mlp.gate.x, not on mlp.gate_proj."""
    paths = [f".{entry.strip('.')}." for entry in entries if entry.strip(".")]
    return lambda module: any(path in f".{module}." for path in paths)


def skipped_by_transformers(entries: Iterable[str], where: str) -> Matcher:
    """Match names that transformers leaves unconverted: a pattern covers a whole path from the start, or ends it.

    Source: `should_convert_module` of transformers.quantizers.quantizers_utils.
    """
    endings = set(entries)
    sizes = {len(entry) for entry in endings}
    # A pattern may also cover the dot after a path, and then anything may follow.
    paths = {entry.rstrip("\\.") for entry in endings if entry.endswith(".")}
    dotted = {rf"(?:{path})\..*" for path in paths}
    covers = regex_matcher(endings | dotted, where, ending=r"(?:\..*)?$")
    return lambda module: (
        any(module[len(module) - size :] in endings for size in sizes) or covers(module)
    )


def skipped_names(config: ConfigReader, *keys: str) -> ModuleRule:
    """Return the rule for modules that a config leaves out, as transformers reads its keys."""
    names = [name for key in keys for name in config.names(key)]
    return when(skipped_by_transformers(names, config.where(config.first(*keys))))


# --- methods -------------------------------------------------------------------------------------------------

Parser = Callable[[ConfigReader, TextConfig], list[ModuleRule]]


@dataclass(frozen=True)
class QuantMethod:
    """A quantization method. keys: the known keys of its config.

    undecided: modules that tools read as left out or as quantized, for one config.
    """

    parse: Parser
    keys: Keys
    undecided: Callable[[ConfigReader], Matcher] | None


METHODS: dict[str, QuantMethod] = {}  # by name
ALIASES: dict[str, str] = {}  # other spellings of a method's name


def quant_method(
    name: str, *aliases: str, keys: Keys, undecided: Callable[[ConfigReader], Matcher] | None = None
) -> Callable[[Parser], Parser]:
    """Register the decorated function as the parser of a method's config, whose known keys are `keys`."""

    def register(parse: Parser) -> Parser:
        METHODS[name] = QuantMethod(parse, keys, undecided)
        ALIASES.update(dict.fromkeys(aliases, name))
        return parse

    return register


def methods() -> dict[str, QuantMethod]:
    """Return the methods by name, sorted."""
    load_formats()
    return dict(sorted(METHODS.items()))


_MLX = ("group_size", "bits", "mode")  # its only keys that are no modules


@dataclass(frozen=True)
class DeclaredFormats:
    """The formats that a config declares. method: its quant_method, "none" without one.

    undecided: modules that some tools read as left out and others as quantized.
    """

    method: str
    rules: tuple[ModuleRule, ...] = ()
    undecided: Matcher | None = None

    def of(self, module: str, *, is_stored_plain: bool = False) -> SourceFormat:
        """Return the format of a module's weight, by the module's dotted path; PLAIN where the config leaves it out.

        is_stored_plain: True if its tensors are all floats, which decides for modules that the config leaves ambiguous.
        """
        if is_stored_plain and self.undecided is not None and self.undecided(module):
            return PLAIN
        return _first_format(self.rules, module) or PLAIN

    def of_single(self, module: str) -> SourceFormat | None:
        """Return the format that a rule gives one module of an experts layer, where rules are for layers as Humming's.

        None where only rules that leave modules out match, or the last one, which is for all modules.
        """
        formats = (rule(module) for rule in self.rules[:-1])
        return next((fmt for fmt in formats if fmt is not None and not fmt.is_float), None)

    def leaves_out(self, module: str) -> bool:
        """Return True if an entry of the config says that a module is not quantized."""
        return _first_format(self.rules, module) == PLAIN

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
        return (
            f"Correct the names of modules in the quantization config ({self.method}), or restore the weights of "
            f"{module}."
        )


def _first_format(rules: Iterable[ModuleRule], module: str) -> SourceFormat | None:
    return next((fmt for rule in rules if (fmt := rule(module)) is not None), None)


def declared_formats(config: Mapping[str, Any] | None, text: Mapping[str, Any]) -> DeclaredFormats:
    """Read config.json's `quantization_config` or the content of hf_quant_config.json; None: not quantized.

    In an artifact's, a config at DENSE_CONFIG counts for modules that the rest leaves out.
    text: the language model's config. Nothing is compared with the tensors here.
    Raises RequestError for a method or variant that is not supported and for unknown keys that may change what the
    weights mean, InputError for values that make no sense.
    """
    refuse_rotated_model(text)
    if config is None:
        return DeclaredFormats("none")
    source, dense = split_dense(ConfigReader(config, "quantization_config").values)
    declared = _declared_formats(source, text, "quantization_config")
    if dense is None:
        return declared
    added = _declared_formats(dense, text, f"quantization_config.{DENSE_CONFIG}")

    def rule(module: str) -> SourceFormat | None:
        is_ours = declared.of(module, is_stored_plain=True).is_float
        fmt = added.of(module)
        return fmt if is_ours and not fmt.is_float else None

    return replace(declared, rules=(rule, *declared.rules))


def _declared_formats(
    config: Mapping[str, Any], text: Mapping[str, Any], where: str
) -> DeclaredFormats:
    reader = ConfigReader(config, where)
    name = _method_name(reader)
    known = methods()
    if name == "hqconv":
        raise RequestError(
            "The checkpoint's experts are in the kernel layout.",
            where=reader.where("quant_method"),
            expected="a checkpoint to convert: the kernel layout is read through its manifest, hqconv.json",
            found=name,
            remedy="Give the artifact's whole folder; where its manifest is lost, convert the original model.",
        )
    if name not in known:
        raise RequestError(
            f"The quantization method '{name}' is not supported.",
            where=reader.where("quant_method"),
            expected=", ".join(known),
            found=name,
            remedy="Convert the original checkpoint that it was made from.",
        )
    method = known[name]
    rules = tuple(method.parse(reader, text))
    check_keys(reader.values, COMMON | method.keys, reader.path)
    return DeclaredFormats(name, rules, method.undecided(reader) if method.undecided else None)


def _method_name(config: ConfigReader) -> str:
    """Return the method under its usual name. Two old forms name none: bitsandbytes' and hf_quant_config.json."""
    if not config.has("quant_method"):
        if config.has("load_in_4bit", "load_in_8bit"):
            return "bitsandbytes"
        if config.has("quantization"):
            return "modelopt"
        if config.has("bits") and all(key in _MLX or "." in key for key in config.values):
            raise RequestError(
                "This is an MLX checkpoint: its quantization is for Apple's library alone.",
                where="quantization_config",
                expected=", ".join(methods()),
                found=", ".join(key for key in config.values if key in _MLX),
                remedy="Convert the original checkpoint that it was made from.",
            )
    name = config.text("quant_method")
    return ALIASES.get(name, name)
