"""Calibration of the quantizer gptq: the text whose tokens decide codes and scales."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hqconv.calibration.transformers_model import (
    BUILTIN_TEXT,
    LEAST_TOKENS,
    MAX_TEXT_BYTES,
    check_counts,
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

DEVICES = ("cpu", "cuda")
_MAX_FILES = 10_000


@dataclass(frozen=True)
class Calibration:
    """A calibration, on which codes and scales depend: as a manifest records it.

    name, sha256: of the text. num_tokens: that are read of it; before `counted`, at most. device: its type. torch,
    transformers: versions.
    root, files: the text; none of a calibration that was read from a manifest.
    """

    name: str
    sha256: str
    num_tokens: int
    context_length: int
    device: str
    torch: str
    transformers: str
    root: Path = field(default=Path(), compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False, repr=False)

    @property
    def longest(self) -> int:
        """Largest number of tokens in a sequence."""
        return min(self.num_tokens, self.context_length)

    @classmethod
    def from_dict(cls, document: Any) -> Calibration:
        """Read a manifest's entry. Raises RequestError for one that no conversion writes."""
        kinds = {one.name: int if one.type == "int" else str for one in fields(cls) if one.compare}
        if (
            not isinstance(document, Mapping)
            or {key: type(value) for key, value in document.items()} != kinds
        ):
            found = sorted(document) if isinstance(document, Mapping) else type(document).__name__
            what, expected = "A recorded calibration has other keys or types.", ", ".join(kinds)
            raise RequestError(what, where="calibration", expected=expected, found=found)
        made = cls(**document)
        is_possible = {
            "name": made.name != "",
            "sha256": re.fullmatch("[0-9a-f]{64}", made.sha256) is not None,
            "num_tokens": made.num_tokens >= LEAST_TOKENS,
            "context_length": made.context_length >= LEAST_TOKENS,
            "device": made.device in DEVICES,
            "torch": made.torch != "",
            "transformers": made.transformers != "",
        }
        for key, is_good in is_possible.items():
            if not is_good:
                what = "A recorded calibration has an impossible value."
                raise RequestError(what, where="calibration", found=f"{key}: {document[key]!r}")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.compare}

    def begin_of_rest(self, num_in_text: int) -> int:
        """Return how many of a text's tokens stand before those that no calibration reads.

        They are the last eighth of the text that hqconv ships, and what follows the tokens that were read of any other.
        """
        return (
            _num_readable(self.files, num_in_text)
            if self.files == (BUILTIN_TEXT,)
            else self.num_tokens
        )

    def counted(self, source: Source) -> Calibration:
        """Return the calibration with the number of tokens that are read, of at most as many as were asked for.

        Raises as `read_text`, and RequestError for a text of less than two tokens.
        """
        transformers = import_transformers("A calibration runs the model")
        source.fetch(source.sidecar_files.names)  # the tokenizer's among them
        with quiet_loading(transformers), folder_of(source) as folder:
            words = read_text(
                transformers, folder, self.files, sys.maxsize, "--calibrate", str(source.place)
            )
        self.check_unchanged()
        num_tokens = min(self.num_tokens, _num_readable(self.files, len(words.ids)))
        if num_tokens < LEAST_TOKENS:
            expected, found = "two tokens at least", plural(num_tokens, "token")
            raise RequestError(
                "The text is too short.",
                where=f"--calibrate {self.files[0]}",
                expected=expected,
                found=found,
            )
        return replace(self, num_tokens=num_tokens)

    def check_unchanged(self) -> None:
        """Raise RequestError where the text is not what it was when the conversion was planned."""
        found = _digest(self.root, self.files)
        if found != self.sha256:
            raise RequestError(
                "The text changed while it was read.",
                where=f"--calibrate {self.root}",
                expected=f"sha256 {self.sha256}",
                found=f"sha256 {found}",
                remedy="Start again when nothing writes to it.",
            )


@dataclass(frozen=True)
class CalibrationText:
    """Options of a calibration: a text, the number of its tokens that are read at most, and of those in a sequence.

    path: a file, or a folder of files; BUILTIN_TEXT for the text that hqconv ships.
    """

    path: Path
    num_tokens: int
    context_length: int

    @classmethod
    def parse(cls, arguments: ConversionArguments) -> CalibrationText | None:
        """Parse arguments of the API; None without `calibrate`. Raises RequestError."""
        tokens, context = arguments["calibrate_tokens"], arguments["calibrate_context"]
        check_counts({"--calibrate-tokens": tokens, "--calibrate-context": context})
        text = arguments["calibrate"]
        if text is None:
            return None
        if arguments["quantizer"] == MSE:
            raise RequestError(
                "--calibrate and --quantizer mse exclude each other.",
                remedy="Leave --quantizer out: a calibration chooses scales and codes by the error of outputs.",
            )
        path = (
            BUILTIN_TEXT if text == BUILTIN else Path(text)
        )  # a Path, or ./builtin, is a user's own file
        found = cls(path, tokens, context)
        found.files()
        return found

    def files(self) -> list[Path]:
        """Return the files of the text, in their order. Raises RequestError if there is none, or too much."""
        where, size_bytes, files = f"--calibrate {self.path}", 0, list[Path]()
        try:
            found = found_at(self.path)
            for path in (
                self.path.rglob("*") if self.path.is_dir() else [self.path] if found is None else ()
            ):
                if path.is_file():
                    files.append(path)
                    size_bytes += path.stat().st_size
                if size_bytes > MAX_TEXT_BYTES or len(files) > _MAX_FILES:
                    raise RequestError(
                        "The text is too large: all of it is cut into tokens, to hold some out.",
                        where=where,
                        expected=f"at most {MAX_TEXT_BYTES >> 20} MiB in {_MAX_FILES} files",
                        found=f"{size_bytes / 2**20:.1f} MiB in {plural(len(files), 'file')}, or more",
                        remedy="Give a part of it: --calibrate-tokens tells how much is read.",
                    )
        except OSError as error:
            raise RequestError("The text cannot be read.", where=where, found=error) from error
        if not files:
            raise RequestError(
                "There is no text to calibrate with.",
                where=where,
                expected=f"a file, a folder with files, or {BUILTIN}",
                found=found if found != "a folder" else "a folder without files",
                remedy="Write the text to a file: it is read several times.",
            )
        return sorted(files)

    def calibration(self, device: str) -> Calibration:
        """Return the calibration on a device, cpu or cuda:N. Raises RequestError for an unreadable text.

        The digest of a folder is that of the digests, sizes and names of its files.
        """
        files = tuple(self.files())
        sha256 = _digest(self.path, files)
        kind, versions = device.partition(":")[0], (_version("torch"), _version("transformers"))
        name = BUILTIN if self.path == BUILTIN_TEXT else self.path.name or self.path.resolve().name
        return Calibration(
            name, sha256, self.num_tokens, self.context_length, kind, *versions, self.path, files
        )


def _num_readable(files: tuple[Path, ...], num_in_text: int) -> int:
    return num_in_text - num_in_text // 8 if files == (BUILTIN_TEXT,) else num_in_text


def _digest(root: Path, files: Sequence[Path]) -> str:
    digests = {path: _sha256(path) for path in files}
    if root in digests:
        return next(iter(digests.values()))
    lines = (f"{digest} {path.relative_to(root).as_posix()}\n" for path, digest in digests.items())
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise RequestError(
            "The text cannot be read.", where=f"--calibrate {path}", found=error
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        remedy = f"pip install {package}"
        raise RequestError(
            "A calibration needs a package.", expected=package, found="none", remedy=remedy
        ) from error
