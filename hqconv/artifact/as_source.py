"""An artifact that is read as a source: what is wrong with it is wrong with the input, for the exit code too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hqconv.errors import InputError, VerificationError

_AGAIN = "Verify the artifact; copy it again from where it is whole, or convert the original model again."


@contextmanager
def as_source() -> Iterator[None]:
    """Turn a VerificationError into an InputError that says the same; also as a decorator."""
    try:
        yield
    except VerificationError as error:
        words = {"where": error.where, "expected": error.expected, "found": error.found}
        raise InputError(error.what, **words, remedy=error.remedy or _AGAIN) from error
