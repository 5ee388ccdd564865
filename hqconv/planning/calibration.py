"""Calibration of the quantizer gptq: the text whose tokens decide codes and scales."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hqconv.calibration.transformers_model import (
    BUILTIN_TEXT,
    LEAST_TOKENS,
    MAX_TEXT_BYTES,
    folder_of,
    import_transformers,
    quiet_loading,
    read_text,
)
from hqconv.errors import RequestError, plural
from hqconv.io.file_access import sha256_of
from hqconv.models.source_protocol import Source
from hqconv.schemas.options import BUILTIN, MSE, ConversionArguments
from hqconv.schemas.untrusted_files import found_at

_NEEDS = "A calibration runs the model"


@dataclass(frozen=True)
class Calibration:
    """A calibration, on which codes and scales depend: as a manifest records it.

    name, sha256: of the text. num_tokens: that are read of it; before `counted`, at most. device: its type. torch,
    transformers: versions. lines: the sketch of the lines that are read (`line_sketch`); "" before `counted`. path: of
    the text; None of a calibration that was read from a manifest.
    """

    name: str
    sha256: str
    num_tokens: int
    context_length: int
    device: str
    torch: str
    transformers: str
    lines: str = ""
    path: Path | None = field(default=None, compare=False, repr=False)

    @property
    def longest(self) -> int:
        """Largest number of tokens in a sequence."""
        return min(self.num_tokens, self.context_length)

    @classmethod
    def from_dict(cls, document: Any) -> Calibration:
        """Read a manifest's entry. Raises RequestError for other keys or types than a conversion writes."""
        recorded = [item for item in fields(cls) if item.compare]
        kinds = {item.name: int if item.type == "int" else str for item in recorded}
        if isinstance(document, Mapping):
            found = {key: type(value) for key, value in document.items()}
            if found == kinds:
                return cls(**document)
        raise RequestError(
            "A recorded calibration has other keys or types.",
            where="calibration",
            expected=", ".join(kinds),
            found=str(document),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.compare}

    def begin_of_rest(self, num_in_text: int) -> int:
        """Return how many of a text's tokens stand before those that no calibration reads.

        They are the last eighth of the text that hqconv ships, and what follows the tokens that were read of any other.
        """
        return self._num_readable(num_in_text) if self.path == BUILTIN_TEXT else self.num_tokens

    def _num_readable(self, num_in_text: int) -> int:
        return num_in_text - num_in_text // 8 if self.path == BUILTIN_TEXT else num_in_text

    def counted(self, source: Source) -> Calibration:
        """Return the calibration with the number of tokens that are read, of at most as many as were asked for.

        Raises as `read_text`, and RequestError for a text of less than two tokens.
        """
        assert self.path is not None
        transformers = import_transformers(_NEEDS)
        option = "--calibrate"
        source.fetch(source.sidecar_files.names)  # the tokenizer's among them
        with quiet_loading(transformers), folder_of(source) as folder:
            place = str(source.place)
            text = read_text(transformers, folder, self.path, sys.maxsize, option, place)
        self.check_unchanged()
        num_tokens = min(self.num_tokens, self._num_readable(len(text.ids)))
        if num_tokens < LEAST_TOKENS:
            raise RequestError(
                "The text is too short.",
                where=f"--calibrate {self.path}",
                expected="two tokens at least",
                found=plural(num_tokens, "token"),
            )
        whole = text.raw.decode()
        read = whole[: len(whole) * num_tokens // len(text.ids)]  # about
        return replace(self, num_tokens=num_tokens, lines=line_sketch(read))

    def check_unchanged(self) -> None:
        """Raise RequestError where the text is not what it was when the conversion was planned."""
        assert self.path is not None
        if _digest(self.path) != self.sha256:
            raise RequestError(
                "The text changed while it was read.",
                where=f"--calibrate {self.path}",
                remedy="Start again when nothing writes to it.",
            )


_NUM_LINES = 128  # of a sketch
_HASH = 8  # hexadecimal digits of a line's hash


def _line_hashes(text: str) -> set[str]:
    """Return a hash of each distinct line, but of short ones, which texts share by chance."""
    lines = {line.strip() for line in text.splitlines()}
    return {sha256(line.encode()).hexdigest()[:_HASH] for line in lines if len(line) >= 20}


def line_sketch(text: str) -> str:
    """Return the smallest hashes of a text's lines, joined: enough to tell how many of its lines another text has."""
    return "".join(sorted(_line_hashes(text))[:_NUM_LINES])


def common_lines(sketch: str, text: str) -> float:
    """Return about which share of a text's lines the text of a sketch has too."""
    known = {sketch[begin : begin + _HASH] for begin in range(0, len(sketch), _HASH)}
    hashes = _line_hashes(text)
    if len(known) == _NUM_LINES:
        hashes = {line_hash for line_hash in hashes if line_hash <= max(known)}
    return len(hashes & known) / max(1, len(hashes))


@dataclass(frozen=True)
class CalibrationText:
    """Options of a calibration: a text, the number of its tokens that are read at most, and of those in a sequence.

    path: of a file; BUILTIN_TEXT for the text that hqconv ships.
    """

    path: Path
    num_tokens: int
    context_length: int

    @classmethod
    def parse(cls, arguments: ConversionArguments) -> CalibrationText | None:
        """Parse arguments of the API; None without `calibrate`. Raises RequestError."""
        text = arguments.calibrate
        if text is None:
            return None
        if arguments.quantizer == MSE:
            raise RequestError(
                "--calibrate and --quantizer mse exclude each other.",
                remedy="Leave --quantizer out: a calibration chooses scales and codes by the error of outputs.",
            )
        # A Path, or ./builtin, is a user's own file.
        path = BUILTIN_TEXT if text == BUILTIN else Path(text)
        try:
            found = found_at(path)
            is_large = path.is_file() and path.stat().st_size > MAX_TEXT_BYTES
        except OSError as error:
            raise _unreadable(path, error) from error
        if found is not None:
            raise RequestError(
                "There is no text to calibrate with.",
                where=f"--calibrate {path}",
                expected=f"a file, or {BUILTIN}",
                found=found,
                remedy="Write the text to one file: it is read several times.",
            )
        if is_large:
            raise RequestError(
                "The text is too large: all of it is cut into tokens, to hold some out.",
                where=f"--calibrate {path}",
                expected=f"at most {MAX_TEXT_BYTES >> 20} MiB",
                remedy="Give a part of it: --calibrate-tokens tells how much is read.",
            )
        return cls(path, arguments.calibrate_tokens, arguments.calibrate_context)

    def calibration(self, device: str) -> Calibration:
        """Return the calibration on a device, cpu or cuda:N. Raises RequestError for an unreadable text."""
        import_transformers(_NEEDS)
        return Calibration(
            BUILTIN if self.path == BUILTIN_TEXT else self.path.name,
            _digest(self.path),
            self.num_tokens,
            self.context_length,
            device.partition(":")[0],
            version("torch"),
            version("transformers"),
            path=self.path,
        )


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RequestError:
    return RequestError("The text cannot be read.", where=f"--calibrate {path}", found=error)
