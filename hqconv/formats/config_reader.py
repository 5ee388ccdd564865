"""Reading of a quantization config: typed values, unknown keys, rotations. Every error names the key.

Each method lists the keys that it knows. The name of any other key decides: a name that speaks of how bytes are stored,
or of inputs that are rotated, is refused; every other one is a warning. A null, false or empty value changes nothing
under any name.

Experts whose inputs are rotated at run time are refused: their kernels would multiply with inputs that are not. A
rotation that was fused into the weights before they were stored converts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hqconv.errors import InputError, RequestError, printable

Text = Mapping[str, Any]  # the language model's config
LARGEST = 1 << 24


class ConfigReader:
    """One JSON object of a config; null counts as absent.

    path: the object's name in errors. origins: the paths of keys that come from another object.
    """

    def __init__(self, values: object, path: str, origins: Mapping[str, str] | None = None) -> None:
        if not isinstance(values, Mapping):
            raise InputError(
                "The quantization config has a value of the wrong type.",
                where=path,
                expected="an object",
                found=repr(values),
            )
        self.values: Mapping[str, Any] = values
        self.path = path
        self._origins = origins or {}

    def where(self, key: str) -> str:
        """Return a key's path for errors."""
        return f"{self._origins.get(key, self.path)}.{key}"

    def has(self, *keys: str) -> bool:
        """Return True if one of the keys holds a value."""
        return any(self.values.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str:
        """Return the first of several names of one key that holds a value; the first name if none does."""
        return next((key for key in keys if self.has(key)), keys[0])

    def agreed(self, *keys: str) -> str:
        """Return the first of several names of one key that holds a value, as `first`; all must hold the same value.

        Raises RequestError that names the key which differs; upper and lower case are the same.
        """
        named = [key for key in keys if self.has(key)]
        for key in named[1:]:
            one, other = (
                value.lower() if isinstance(value, str) else value
                for value in (self.values[named[0]], self.values[key])
            )
            if one != other:
                raise self.unsupported(key, f"{self.values[named[0]]!r}, as {named[0]} says")
        return named[0] if named else keys[0]

    def wrong(self, key: str, expected: object) -> InputError:
        """Return the error for an invalid value."""
        found = repr(self.values[key]) if key in self.values else "nothing"
        what = "The quantization config has a value that makes no sense."
        return InputError(what, where=self.where(key), expected=expected, found=found)

    def unsupported(self, key: str, expected: object) -> RequestError:
        """Return the error for a valid value that is not supported."""
        what = "The checkpoint is quantized in a way that is not supported."
        found = repr(self.values.get(key))
        return RequestError(what, where=self.where(key), expected=expected, found=found)

    def integer(self, key: str, low: int, high: int = LARGEST, default: int | None = None) -> int:
        """Return a whole number in low … high; without a default the key must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"a whole number, {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, choices: Collection[str] = (), default: str | None = None) -> str:
        """Return a string, in lower case, one of `choices` if there are any; without a default it must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or (choices and value.lower() not in choices):
            raise self.wrong(key, "one of " + ", ".join(choices) if choices else "a string")
        return value.lower()

    def one_of(self, key: str, *choices: str) -> str:
        """Return a string in lower case; RequestError unless it is one of `choices`, in any case."""
        value = self.text(key)
        if value not in (choice.lower() for choice in choices):
            raise self.unsupported(key, " or ".join(choices))
        return value

    def names(self, *keys: str) -> list[str]:
        """Return a list of module names or patterns under the first key that holds one; [] where none does."""
        key = self.first(*keys)
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return list(value)

    def pair(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a block, both at least 1."""
        value = self.values.get(key)
        if isinstance(value, list | tuple) and len(value) == 2:
            rows, columns = value
            if all(type(size) is int and 1 <= size <= LARGEST for size in value):
                return int(rows), int(columns)
        raise self.wrong(key, "two whole numbers, at least 1: rows and columns of a block")

    def group_size(self, *keys: str) -> int:
        """Return the columns that share a scale: at least 1, or 0 where the config says -1 (all of them)."""
        key = self.first(*keys)
        size = self.integer(key, -1)
        if size == 0:
            raise self.wrong(key, "-1 (all columns) or at least 1")
        return max(size, 0)

    def table(self, key: str) -> ConfigReader:
        """Return the object under a key, which must be there."""
        return ConfigReader(self.values.get(key), self.where(key))

    def tables(self, key: str) -> Iterator[tuple[str, ConfigReader]]:
        """Yield the objects of an object under a key, in order; none where the key is absent."""
        if self.has(key):
            outer = self.table(key)
            for name in outer.values:
                yield name, outer.table(name)

    def overridden(self, by: ConfigReader) -> ConfigReader:
        """Return this object with another's values written over them; errors name the object a key comes from."""
        origins = {
            key: self._origins.get(key, self.path) for key in self.values if key not in by.values
        }
        return ConfigReader({**self.values, **by.values}, by.path, origins)

    def replaced(self, **values: Any) -> ConfigReader:
        """Return this object with some values replaced."""
        return ConfigReader({**self.values, **values}, self.path, self._origins)


# --- known keys ----------------------------------------------------------------------------------------------


class Keys:
    """Known keys of one object of a config. Each argument has names with blanks between.

    read: their values decide the format, or are compared with it. unused: they say nothing about the stored weights,
    and nothing below them is looked at. inside: key → keys of its object, or of each object of its list. entries: key
    → keys of each object under the names of its object (module names, patterns).
    """

    def __init__(
        self,
        read: str = "",
        unused: str = "",
        *,
        inside: Mapping[str, Keys] | None = None,
        entries: Mapping[str, Keys] | None = None,
    ) -> None:
        self.inside, self.entries = inside or {}, entries or {}
        self.read = [*read.split(), *self.inside, *self.entries]
        self.unused = unused.split()
        self.names = {*self.read, *self.unused}

    def __or__(self, more: Keys) -> Keys:
        """Return the keys of both objects."""
        read, unused = dict.fromkeys(self.read + more.read), self.unused + more.unused
        inside, entries = {**self.inside, **more.inside}, {**self.entries, **more.entries}
        return Keys(" ".join(read), " ".join(unused), inside=inside, entries=entries)


# Keys that every method may have.
COMMON = Keys("quant_method", "producer version quantization_version creator library tool")

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


def check_keys(config: ConfigReader, keys: Keys) -> tuple[str, ...]:
    """Return warnings about unknown keys. Raises RequestError for one that may change what the bytes mean."""
    warnings = []
    for where, name, value in _unknown(config.values, COMMON | keys, config.path):
        if verdict(name) == REFUSAL:
            raise RequestError(
                "The quantization config has an unknown key that may change what the weights mean.",
                where=where,
                expected=", ".join(keys.read),
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
        where = f"{path}.{printable(str(name))}"
        if name not in keys.names:
            if _says_something(value):
                yield where, str(name), value
                # A harmless name may hold an object that is not.
                if isinstance(value, Mapping) and not _ELSEWHERE.search(_as_words(str(name))):
                    yield from _unknown(value, Keys(), where)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Mapping) and name in keys.inside:
                yield from _unknown(item, keys.inside[name], where)
            elif isinstance(item, Mapping) and name in keys.entries:
                for inner, one in item.items():
                    if isinstance(one, Mapping):
                        yield from _unknown(
                            one, keys.entries[name], f"{where}.{printable(str(inner))}"
                        )


def _says_something(value: object) -> bool:
    """Return False for null, false and empty values."""
    return value is not None and value is not False and value not in ("", [], {}, ())


def _short(value: object) -> str:
    text = printable(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- rotations -----------------------------------------------------------------------------------------------

# Keys of config.json, beside quantization_config, under which tools keep a rotation. Source: `save_spinquant_config` of
# auto_round.algorithms.transforms.spinquant.serialize and `save_config` of its transforms.hadamard.apply.
_IN_CONFIG = ("spinquant_config", "rotation_config")
_REMEDY = "Convert the original checkpoint, or one whose rotations are fused into the weights."


def rotated(config: ConfigReader, key: str, expected: str) -> RequestError:
    """Return the error for a key that declares a rotation at run time."""
    return RequestError(
        "The checkpoint's inputs are rotated at run time, which the kernel does not do.",
        where=config.where(key),
        expected=expected,
        found=repr(config.values.get(key)),
        remedy=_REMEDY,
    )


def refuse_rotation(config: ConfigReader, *keys: str) -> None:
    """Raise RequestError if one of the keys holds anything but null, false or an empty value."""
    for key in keys:
        if config.values.get(key):
            raise rotated(config, key, "nothing: inputs that are not rotated")


def is_online_spinquant(values: Mapping[str, Any], *, online_r1: bool) -> bool:
    """Return True if SpinQuant's R1 (before gate and up) or R4 (before down) is applied to activations.

    online_r1: the default of `online_r1_rotation`. R2 is always fused; R3 is in the attention. A flag that is missing
    counts as set.
    """
    is_r1_online = values.get("online_r1_rotation")
    is_r1_online = online_r1 if is_r1_online is None else is_r1_online
    return bool(values.get("r4", True)) or bool(values.get("r1", True) and is_r1_online)


def refuse_spinquant(config: ConfigReader, key: str) -> None:
    """Raise RequestError for AutoRound's spinquant_config unless its rotations are all fused.

    Source: `preregister_spinquant_buffers` of auto_round.algorithms.transforms.spinquant.serialize.
    """
    if config.has(key):
        own = config.table(key)
        if own.values and (is_online_spinquant(own.values, online_r1=True) or own.values.get("r3")):
            raise rotated(
                config, key, "rotations that are fused: r3, r4 and online_r1_rotation false"
            )


def refuse_rotated_model(text: Mapping[str, Any]) -> None:
    """Raise RequestError if config.json itself, outside of its quantization config, declares rotated inputs."""
    config = ConfigReader(text, "config.json")
    refuse_spinquant(config, _IN_CONFIG[0])
    refuse_rotation(config, _IN_CONFIG[1])
