"""Reading of a quantization config: typed values, unknown keys, rotations. Every error names the key.

Each method lists the keys that it knows. The name of any other key decides: a name that speaks of how bytes are stored,
or of inputs that are rotated, is refused; every other one is passed over. A null, false, 0 or empty value changes
nothing under any name.

Experts whose inputs are rotated at run time are refused: their kernels would multiply with inputs that are not. A
rotation that was fused into the weights before they were stored converts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hqconv.errors import InputError, RequestError

TextConfig = Mapping[str, Any]  # the language model's config
LARGEST = 1 << 24


class ConfigReader:
    """One JSON object of a config; null counts as absent. path: the object's name in errors."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(
                "The quantization config has a value of the wrong type.",
                where=path,
                expected="an object",
                found=repr(values),
            )
        self.values: Mapping[str, Any] = values
        self.path = path

    def where(self, key: str) -> str:
        """Return a key's path for errors."""
        return f"{self.path}.{key}"

    def has(self, *keys: str) -> bool:
        """Return True if one of the keys holds a value."""
        return any(self.values.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str:
        """Return the first of several names of one key that holds a value; the first name if none does."""
        return next((key for key in keys if self.has(key)), keys[0])

    def agreed(self, *keys: str) -> str:
        """Return `first` of names whose values must be equal but for case. Raises RequestError for two that differ."""
        chosen = self.first(*keys)
        for key in filter(self.has, keys):
            if str(self.values[key]).lower() != str(self.values[chosen]).lower():
                raise self.unsupported(key, f"{self.values[chosen]!r}, as {chosen} says")
        return chosen

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as it is; the default where it is null."""
        value = self.values.get(key)
        return default if value is None else value

    def wrong(self, key: str, expected: object) -> InputError:
        """Return the error for an invalid value."""
        found = repr(self.values[key]) if key in self.values else "nothing"
        return InputError(
            "The quantization config has a value that makes no sense.",
            where=self.where(key),
            expected=expected,
            found=found,
        )

    def unsupported(self, key: str, expected: object) -> RequestError:
        """Return the error for a valid value that is not supported."""
        found = repr(self.values.get(key))
        return RequestError(
            "The checkpoint is quantized in a way that is not supported.",
            where=self.where(key),
            expected=expected,
            found=found,
        )

    def integer(self, key: str, low: int, high: int = LARGEST, default: int | None = None) -> int:
        """Return a whole number in low … high; without a default the key must be there."""
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number, {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, choices: Collection[str] = (), default: str | None = None) -> str:
        """Return a string in lower case; without a default it must be there.

        Raises RequestError for one that is not among the choices, where there are any.
        """
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        if choices and value.lower() not in choices:
            raise self.unsupported(key, ", ".join(choices))
        return value.lower()

    def names(self, *keys: str) -> list[str]:
        """Return a list of module names or patterns under the first key that holds one; [] where none does."""
        key = self.first(*keys)
        value = self.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return list(value)

    def pair(self, key: str) -> tuple[int, int]:
        """Return rows and columns of a block, both at least 1."""
        value = self.get(key)
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
        return ConfigReader(self.get(key), self.where(key))

    def tables(self, key: str) -> Iterator[tuple[str, ConfigReader]]:
        """Yield the objects of an object under a key, in order; none where the key is absent."""
        if self.has(key):
            outer = self.table(key)
            for name in outer.values:
                yield name, outer.table(name)

    def overridden(self, by: ConfigReader) -> ConfigReader:
        """Return this object with another's values written over them; errors name the other one."""
        return ConfigReader({**self.values, **by.values}, by.path)

    def replaced(self, **values: Any) -> ConfigReader:
        """Return this object with some values replaced."""
        return ConfigReader({**self.values, **values}, self.path)


# --- known keys ----------------------------------------------------------------------------------------------


class Keys:
    """Known keys of one object of a config: names with blanks between.

    inside: key → keys of its object, or of each object of its list. entries: key → keys of each object under the names
    of its object (module names, patterns). Below any other key nothing is looked at.
    """

    def __init__(
        self,
        names: str = "",
        *,
        inside: Mapping[str, Keys] | None = None,
        entries: Mapping[str, Keys] | None = None,
    ) -> None:
        self.inside = inside or {}
        self.entries = entries or {}
        self.names = {*names.split(), *self.inside, *self.entries}

    def __or__(self, more: Keys) -> Keys:
        """Return the keys of both objects."""
        return Keys(
            " ".join(self.names | more.names),
            inside={**self.inside, **more.inside},
            entries={**self.entries, **more.entries},
        )


# Keys that every method may have.
COMMON = Keys("quant_method producer version quantization_version creator library tool")

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
    r"lora|adapter|low_rank|svd|(?:^|_)rank|residual|outlier|axis|encod|codec|mantissa|exponent|nested|double|super|affine|"
    r"normaliz|smooth|shift|invert|inverse|mirror|endian|trellis|vector|lattice|mixed|hybrid|prun|merge|fus(?:e|ion)"
)


def check_keys(values: Mapping[str, Any], keys: Keys, path: str) -> None:
    """Raise RequestError for an unknown key, at any depth of an object, that may change what the weights mean."""
    for name, value in values.items():
        where = f"{path}.{name}"
        if name not in keys.names:
            _check_unknown(name, value, where)
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, Mapping):
                continue
            if name in keys.inside:
                check_keys(item, keys.inside[name], where)
            for inner, entry in item.items() if name in keys.entries else ():
                if isinstance(entry, Mapping):
                    check_keys(entry, keys.entries[name], f"{where}.{inner}")


def _check_unknown(name: str, value: object, where: str) -> None:
    snake = _snake_case(name)
    is_elsewhere = _ELSEWHERE.search(snake) is not None
    is_about_bytes = _BYTES.search(snake) is not None and not is_elsewhere
    if value and (is_about_bytes or speaks_of_rotations(name)):
        raise RequestError(
            "The quantization config has an unknown key that may change what the weights mean.",
            where=where,
            expected="known keys, and weights whose inputs are neither scaled nor rotated at run time",
            found=repr(value),
            remedy="Convert the original checkpoint; where the key changes nothing, remove it from the config.",
        )
    # A harmless name may hold an object that is not.
    if isinstance(value, Mapping) and not is_elsewhere:
        check_keys(value, Keys(), where)


def speaks_of_rotations(name: str) -> bool:
    """Return True if a key's name speaks of inputs that are rotated or scaled at run time."""
    return _ROTATION.search(_snake_case(name)) is not None


def _snake_case(name: str) -> str:
    """Return a name in lower case with "_" between its words: actBits → act_bits."""
    return re.sub(r"[\s.-]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


# --- rotations -----------------------------------------------------------------------------------------------


def rotated(config: ConfigReader, key: str, expected: str) -> RequestError:
    """Return the error for a key that declares a rotation at run time."""
    return RequestError(
        "The checkpoint's inputs are rotated at run time, which the kernel does not do.",
        where=config.where(key),
        expected=expected,
        found=repr(config.values.get(key)),
        remedy="Convert the original checkpoint, or one whose rotations are fused into the weights.",
    )


def is_online_spinquant(values: Mapping[str, Any], *, online_r1: bool) -> bool:
    """Return True if SpinQuant's R1 (before gate and up) or R4 (before down) is applied to activations.

    online_r1: the default of `online_r1_rotation`. R2 is always fused; R3 is in the attention. A flag that is missing
    counts as set.
    """
    is_r1_online = values.get("online_r1_rotation")
    is_r1_online = online_r1 if is_r1_online is None else is_r1_online
    return bool(values.get("r4", True)) or bool(values.get("r1", True) and is_r1_online)


def refuse_spinquant(config: ConfigReader) -> None:
    """Raise RequestError for AutoRound's spinquant_config unless its rotations are all fused.

    Source: `preregister_spinquant_buffers` of auto_round.algorithms.transforms.spinquant.serialize.
    """
    key = "spinquant_config"
    flags = config.table(key).values if config.has(key) else {}
    if flags and (is_online_spinquant(flags, online_r1=True) or flags.get("r3")):
        raise rotated(config, key, "rotations that are fused: r3, r4 and online_r1_rotation false")


def refuse_rotated_model(text: Mapping[str, Any]) -> None:
    """Raise RequestError if config.json itself, outside of its quantization config, declares rotated inputs.

    Source: `save_spinquant_config` of auto_round.algorithms.transforms.spinquant.serialize and `save_config` of its
    transforms.hadamard.apply.
    """
    config = ConfigReader(text, "config.json")
    refuse_spinquant(config)
    if config.values.get("rotation_config"):
        raise rotated(config, "rotation_config", "nothing: inputs that are not rotated")
