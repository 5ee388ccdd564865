"""The files beside a checkpoint's weights: which of them belong in an artifact as they are, and which do not.

Whatever could stop a conversion at its end, when they are copied, is refused here, before it begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hqconv.errors import InputError
from hqconv.io.checkpoint_files import COPY_AGAIN, check_text
from hqconv.schemas.artifact_names import CARD, CONFIG, MANIFEST, PARTIAL, SUMS
from hqconv.schemas.untrusted_files import found_at, open_regular, read_regular

# Weights in other formats (or the same ones once more, in original/): neither read, copied nor downloaded.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
WEIGHT_FOLDERS = ("original", "onnx")
_UNFINISHED = "an unfinished download or conversion"
_LINKED_FOLDER = "a link to a folder"
_MAX_CARD_BYTES = 16 << 20


@dataclass(frozen=True)
class SidecarFiles:
    """names: what belongs in an artifact, POSIX paths relative to the source, sorted; num_bytes: of all of them.

    left_out: what lies in the source beside them and does not, and why. card: the bytes of its README.md, which becomes
    a part of the artifact's; None where there is none.
    """

    names: tuple[str, ...] = ()
    num_bytes: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
    card: bytes | None = None

    @classmethod
    def of_folder(cls, root: Path) -> SidecarFiles:
        """The loose files of a folder. Opens each, and reads none but the card.

        Raises InputError, naming the file, where one is no regular file, cannot be read, has a name that is no
        Unicode, or is a link that leads out of the source, or where the card is larger than
        16 MiB; OSError where a folder cannot be read.
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
        """The loose files of a repo of which only words and headers are here, at `root`; sizes: of all its files."""
        found = sorted(name for name in sizes if _is_loose(name) and name != CARD)
        names = tuple(name for name in found if not name.endswith(PARTIAL))
        left_out = {name: _UNFINISHED for name in found if name.endswith(PARTIAL)}
        card = _read_card(root) if (root / CARD).is_file() else None
        return cls(names, sum(sizes[name] for name in names), left_out, card)


def _is_loose(path: str) -> bool:
    """Whether a file is no weight and none that an artifact has its own of."""
    *folders, name = path.split("/")
    if any(part.startswith(".") for part in (*folders, name)) or path in (CONFIG, MANIFEST, SUMS):
        return False
    is_other = folders[:1] and folders[0] in WEIGHT_FOLDERS
    return not is_other and not name.endswith((*WEIGHT_SUFFIXES, ".index.json"))


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """What lies below a folder and is no weight, in folders that may hold some; whether it is a link to a folder."""
    for folder, folders, names in os.walk(
        root, onerror=_raise
    ):  # by itself it passes over what it cannot read
        relative = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if _is_loose((relative / name / "file").as_posix())]
        for name in (*names, *folders):
            path, is_folder = (relative / name).as_posix(), name in folders
            if _is_loose(path) and (not is_folder or (root / path).is_symlink()):
                yield path, is_folder


def _raise(error: OSError) -> None:
    raise error


def _size(root: Path, path: str) -> int:
    """Bytes of a file that can be read, and lies in the source."""
    full = root / path
    found = found_at(full)
    if found is not None:
        what, remedy = "This is not a file.", COPY_AGAIN
        raise InputError(what, where=str(full), expected="a regular file", found=found, remedy=remedy)
    if full.is_symlink():
        _check_link(root, full)
    try:
        descriptor = open_regular(full)
    except OSError as error:
        what, found = "A file of the source cannot be read.", error.strerror or str(error)
        remedy = "Mend its permissions, or leave it out of the source."
        raise InputError(what, where=str(full), found=found, remedy=remedy) from error
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _read_card(root: Path) -> bytes:
    """The bytes of the source's README.md, a regular file that was opened before."""
    try:
        return read_regular(root / CARD, _MAX_CARD_BYTES)
    except OSError as error:
        what, remedy = "The source's model card cannot be read.", "Shorten it, or leave it out of the source."
        found, where = error.strerror or str(error), str(root / CARD)
        raise InputError(what, where=where, found=found, remedy=remedy) from error


def _check_link(root: Path, link: Path) -> None:
    """Refuse a link that would put a file of somebody else into the artifact.

    The Hub's cache has its files in `blobs`, beside `snapshots` with links to them; so do older downloads to a folder.
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
