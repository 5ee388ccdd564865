"""Known keys of quantization configs, and the verdict on unknown ones: a warning, or a refusal.

Each method lists its keys, with their meaning, in its own module. The name of any other key decides: a name that speaks
of how bytes are stored, or of inputs that are rotated, is refused; every other one is a warning. A null, false or empty
value changes nothing under any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hqconv.errors import RequestError, printable
from hqconv.formats.config_reader import ConfigReader

Keys = Mapping[str, "Key"]


@dataclass(frozen=True)
class Key:
    """A known key of a config's object.

    meaning: for documents. is_read: its value decides the format, or is compared with it; otherwise the key says
    nothing about the stored weights. inside: keys of its object, or of each object of its list. entries: keys of each
    object under the names of its object (module names, patterns).
    """

    meaning: str
    is_read: bool = True
    inside: Keys | None = None
    entries: Keys | None = None


def read(meaning: str, *, inside: Keys | None = None, entries: Keys | None = None) -> Key:
    """Return a key whose value is read."""
    return Key(meaning, True, inside, entries)


def unused(meaning: str) -> Key:
    """Return a key that says nothing about the stored weights; all below it is passed over."""
    return Key(meaning, False)


def all_unused(meaning: str, names: str) -> dict[str, Key]:
    """Return unused keys of one meaning; names: with blanks between."""
    return {name: unused(meaning) for name in names.split()}


# Keys that every method may have.
COMMON: Keys = {
    "quant_method": read("name of the method"),
    **all_unused("name or version of a tool", "producer version quantization_version creator library tool"),
}

# --- names of unknown keys ---------------------------------------------------------------------------------

_ROTATION = re.compile(
    r"rotat(?!ry)|hadamard|(?:^|_)had(?:_|$)|quarot|spin_?quant|flat_?quant|ost_?quant|butterfly|kronecker|"
    r"online_(?:r[1-4]|had)|(?:^|_)transforms?(?:_config|s?$)|pre_?(?:quant_)?scale|input_scaling|smoothed_inputs"
)
# What a key speaks of besides the stored weights. It goes before the words for bytes.
_ELSEWHERE = re.compile(
    r"(?:^|_)(?:act|acts|activation|activations|input|inputs|output|outputs|kv|cache|attn|attention|softmax|query|rope|"
    r"calib\w*|dataset|datasets|data|observer|sampl\w*|nsamples|seq\w*|seed|iter|iters|iterations|epochs?|lr|train\w*|"
    r"tun\w*|optim\w*|loss|damp\w*|percdamp|batch|version|producer|meta|metadata|comment|note|author|date|time|device|"
    r"gpu|cpu|cuda|mem|memory|vram|offload|log|logging|debug|kernel|kernels|compute|runtime|backend|tokenizer|embed\w*|"
    r"lm_head|head|vision|visual|audio|image|fallback|telemetry|search|candidates|exclude\w*|ignore\w*|skip\w*|name|uri|"
    r"url|path|license)(?:_|$)"
)
_BYTES = re.compile(
    r"pack|d?types?(?:_|$)|bits?(?:_|$)|^w?bits|zero|(?:^|_)zp(?:_|$)|offset|order|perm|g_idx|group|block|tile|scale|"
    r"layout|format|fmt|swizzl|interleav|shuffl|transpos|signed|(?:^|_)sym|sparse|sparsity|codebook|centroid|lut|"
    r"lora|low_rank|svd|(?:^|_)rank|residual|outlier|axis|encod|codec|mantissa|exponent|nested|double|super|affine|"
    r"normaliz|smooth|shift|invert|inverse|mirror|endian|trellis|vector|lattice|mixed|hybrid|prun|merge|fus(?:e|ion)"
)

WARNING, REFUSAL = "warning", "refusal"


def verdict(name: str) -> str:
    """Return what an unknown key with a value is: WARNING, or REFUSAL if it may change the meaning of the bytes."""
    word = _as_words(name)
    if _ROTATION.search(word):
        return REFUSAL
    return REFUSAL if _BYTES.search(word) and not _ELSEWHERE.search(word) else WARNING


def speaks_of_rotations(name: str) -> bool:
    """Return True if a key's name speaks of inputs that are rotated or scaled at run time."""
    return bool(_ROTATION.search(_as_words(name)))


def _as_words(name: str) -> str:
    """Return a name in lower case with "_" between its words: actBits → act_bits."""
    return re.sub(r"[\s.-]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


# --- check -------------------------------------------------------------------------------------------------


def check_keys(config: ConfigReader, keys: Keys) -> tuple[str, ...]:
    """Return warnings about unknown keys. Raises RequestError for one that may change what the bytes mean."""
    warnings = []
    for where, name, value in _unknown(config.values, {**COMMON, **keys}, config.path):
        if verdict(name) == REFUSAL:
            raise RequestError(
                "The quantization config has an unknown key that may change what the weights mean.",
                where=where,
                expected=", ".join(name for name, key in keys.items() if key.is_read),
                found=_short(value),
                remedy="Convert the original checkpoint; where the key changes nothing, remove it from the config.",
            )
        warnings.append(
            f"{where} is unknown and passed over: by its name it does not change what the stored weights mean."
        )
    return tuple(warnings)


def _unknown(values: Mapping[str, Any], keys: Keys, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of the unknown keys of an object, at all depths."""
    for name, value in values.items():
        where, key = f"{path}.{printable(str(name))}", keys.get(name)
        if key is None:
            if _says_something(value):
                yield where, str(name), value
                # A harmless name may hold an object that is not.
                if isinstance(value, Mapping) and not _ELSEWHERE.search(_as_words(str(name))):
                    yield from _unknown(value, {}, where)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Mapping) and key.inside is not None:
                yield from _unknown(item, key.inside, where)
            elif isinstance(item, Mapping) and key.entries is not None:
                for inner, one in item.items():
                    if isinstance(one, Mapping):
                        yield from _unknown(one, key.entries, f"{where}.{printable(str(inner))}")


def _says_something(value: object) -> bool:
    """Return False for null, false and empty values."""
    return value is not None and value is not False and value not in ("", [], {}, ())


def _short(value: object) -> str:
    text = printable(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
