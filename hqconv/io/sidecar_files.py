"""The files beside a checkpoint's weights: those that an artifact copies verbatim, and the head of its model card.

Every problem that could stop a conversion at its end, when they are copied, raises an error here, before it begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hqconv.errors import InputError
from hqconv.io.checkpoint_files import COPY_AGAIN, check_text
from hqconv.schemas.artifact_names import CARD, CONFIG, MANIFEST, PARTIAL, SUMS
from hqconv.schemas.untrusted_files import found_at, open_regular, read_regular

# Weights in other formats (or duplicates in original/): neither read, copied nor downloaded.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHT_FOLDERS = ("original", "onnx")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", ".model", ".tiktoken", "tokenizer.tok.json")
_UNFINISHED = "an unfinished download or conversion"
_LINKED_FOLDER = "a link to a folder"
_MAX_CARD_BYTES = 16 << 20


@dataclass(frozen=True)
class SidecarFiles:
    """names: files for the artifact, POSIX paths relative to the source, sorted; num_bytes: their total size.

    left_out: path → reason of every other file beside them in the source. card: the bytes of its README.md, which
    becomes a part of the artifact's README.md; None without one.
    """

    names: tuple[str, ...] = ()
    num_bytes: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
    card: bytes | None = None

    @classmethod
    def of_folder(cls, root: Path) -> SidecarFiles:
        """List the loose files of a folder. Opens each, and reads only the card.

        Raises InputError, naming the file, for a file that is not regular, cannot be read, has a name that is not valid
        Unicode, or is a link that leads out of the source, and for a card larger than
        16 MiB; OSError for an unreadable folder.
        """
        sizes: dict[str, int] = {}
        left_out: dict[str, str] = {}
        for path, is_folder in _walk(root):
            check_text(path, str(root))
            if is_folder or path.endswith(PARTIAL):
                left_out[path] = _LINKED_FOLDER if is_folder else _UNFINISHED
            else:
                sizes[path] = _size(root, path)
        card = None if sizes.pop(CARD, None) is None else _read_card(root)
        return cls(tuple(sorted(sizes)), sum(sizes.values()), dict(sorted(left_out.items())), card)

    @classmethod
    def of_listing(cls, sizes: Mapping[str, int], root: Path) -> SidecarFiles:
        """List the loose files of a repo with only its small files and headers at `root`; sizes: of all its files."""
        found = sorted(name for name in sizes if _is_loose(name) and name != CARD)
        names = tuple(name for name in found if not name.endswith(PARTIAL))
        left_out = {name: _UNFINISHED for name in found if name.endswith(PARTIAL)}
        card = _read_card(root) if (root / CARD).is_file() else None
        return cls(names, sum(sizes[name] for name in names), left_out, card)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether one of some files is a tokenizer's."""
    return any(path.rpartition("/")[2].endswith(_TOKENIZERS) for path in names)


def _is_loose(path: str) -> bool:
    """Return True if a file is no weight file and none that an artifact writes itself."""
    *folders, name = path.split("/")
    if any(part.startswith(".") for part in (*folders, name)) or path in (CONFIG, MANIFEST, SUMS):
        return False
    is_other = folders[:1] and folders[0] in WEIGHT_FOLDERS
    return not is_other and not name.endswith((*WEIGHT_SUFFIXES, ".index.json"))


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield everything below a folder that is no weight, and True if it is a link to a folder."""
    for folder, folders, names in os.walk(root, onerror=_raise):  # by itself it passes over what it cannot read
        relative = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if _is_loose((relative / name / "file").as_posix())]
        for name in (*names, *folders):
            path, is_folder = (relative / name).as_posix(), name in folders
            if _is_loose(path) and (not is_folder or (root / path).is_symlink()):
                yield path, is_folder


def _raise(error: OSError) -> None:
    raise error


def _size(root: Path, path: str) -> int:
    """Return the size of a readable file that lies in the source."""
    full = root / path
    found = found_at(full)
    if found is not None:
        what, remedy = "This is not a file.", COPY_AGAIN
        raise InputError(what, where=str(full), expected="a regular file", found=found, remedy=remedy)
    if full.is_symlink():
        _check_link(root, full)
    try:
        descriptor = open_regular(full)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        what, found = "A file of the source cannot be read.", error.strerror or str(error)
        remedy = "Mend its permissions, or leave it out of the source."
        raise InputError(what, where=str(full), found=found, remedy=remedy) from error


def _read_card(root: Path) -> bytes:
    """Read the source's README.md, a regular file that was opened before."""
    try:
        return read_regular(root / CARD, _MAX_CARD_BYTES)
    except OSError as error:
        what, remedy = "The source's model card cannot be read.", "Shorten it, or leave it out of the source."
        found, where = error.strerror or str(error), str(root / CARD)
        raise InputError(what, where=where, found=found, remedy=remedy) from error


def _check_link(root: Path, link: Path) -> None:
    """Refuse a link that would copy a file from outside the source into the artifact.

    The Hub's cache has its files in `blobs`, beside `snapshots` with links to them, as in older downloads to a folder.
    """
    target = link.resolve()
    is_blob = target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()
    if not is_blob and not target.is_relative_to(root.resolve()):
        raise InputError(
            "A link leads out of the source: what it leads to would be copied into the artifact.",
            where=str(link),
            expected="a file in the source, or of the Hub's cache",
            found=str(target),
            remedy="Put a copy of the file in the link's place, or leave it out.",
        )


# --- front matter of a model card: the YAML between `---` lines at the head of a README.md, which the Hub reads

_FRONT = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_MAX_FRONT_BYTES = 4 << 20


@dataclass(frozen=True)
class FrontMatter:
    """Parsed front matter of a card.

    words: the document, keys and values, empty if it is missing or unreadable. raw: its lines without the `---`, None
    if it is missing. body: the text after it. problem: why it cannot be read, else "".
    """

    body: bytes
    words: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    problem: str = ""

    @classmethod
    def of(cls, card: bytes) -> FrontMatter:
        """Parse the front matter of a card's bytes, which may be anything."""
        found = _FRONT.match(card)
        if found is None:
            return cls(card)
        raw, body = found[1], card[found.end() :]
        document = _parsed(raw) if len(raw) <= _MAX_FRONT_BYTES else None
        if document is None:
            return cls(body, raw=raw, problem="it is no YAML of keys and values, or larger than 4 MiB")
        return cls(body, document, raw)

    def texts(self, key: str) -> str | list[str] | None:
        """Return a value that is a text or a list of texts; None for any other value and for a missing key."""
        value = self.words.get(key)
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return list(value)
        return value if isinstance(value, str) and value else None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Parse a YAML mapping; return None for anything else. The library's error text differs by its build."""
    import yaml

    try:
        document = yaml.load(raw.decode(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return document if isinstance(document, dict) else {} if document is None else None


def in_yaml(document: Mapping[str, Any]) -> bytes:
    """Write front matter with its `---` lines from texts and lists of texts, in their order."""
    import yaml

    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=10_000)
    return b"---\n" + text.encode() + b"---\n"
