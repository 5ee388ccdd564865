"""Typed reading of a quantization config: every error names the key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hqconv.errors import InputError, RequestError

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
        origins = {key: self._origins.get(key, self.path) for key in self.values if key not in by.values}
        return ConfigReader({**self.values, **by.values}, by.path, origins)

    def replaced(self, **values: Any) -> ConfigReader:
        """Return this object with some values replaced."""
        return ConfigReader({**self.values, **values}, self.path, self._origins)
