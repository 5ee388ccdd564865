"""Files of a checkpoint beside its weights: those that belong to the model, which an artifact gets unchanged.

They are told by name and kind, and by what the model's own code imports and names. Whatever else lies in a folder, such
as a trainer's states and logs, is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hqconv.errors import InputError
from hqconv.io.checkpoint_files import COPY_AGAIN, check_text
from hqconv.schemas.artifact_names import CARD, CONFIG, EVALUATION, MANIFEST, PARTIAL, SUMS
from hqconv.schemas.untrusted_files import found_at, open_regular, read_regular

# Weights in other formats (or duplicates in original/): neither read, copied nor downloaded.
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
WEIGHT_FOLDERS = ("original", "onnx")
# A folder with one of these holds another model, an adapter or a state; but 1_Pooling is of sentence-transformers.
_MODULE = re.compile(r"(?:\d+_[A-Za-z]+)?")
_STATES = (f"/{CONFIG}", "/adapter_config.json", "/trainer_state.json", ".distcp")
_TOKENIZERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    ".model",
    ".tiktoken",
    "tokenizer.tok.json",
)
_UNFINISHED = "an unfinished download or conversion"
_LINKED_FOLDER = "a link to a folder"
FOREIGN = "no part of the model"
_MAX_CARD_BYTES = 16 << 20
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
MAX_CODE_BYTES = 4 << 20  # of a file of the model's own code, and of a config that names one

_ROWS = (
    # templates; tokenizers of sentencepiece, tiktoken and others; documents
    r".*\.(?:jinja2?|model|tiktoken|spm|bpe|vocab|codes|md)",
    r"(?:.*[-_.])?(?:tokenizer|vocab|merges|added_tokens|special_tokens|tekken|normalizer|unigram|chat_template|system_prompt|dict)[-\w.]*"
    r"\.(?:json|txt)",
    # configs of generation, tokenizer, processors, encoders, quantization; not those of training
    r"(?!.*(?:^|[-_.])(?:adapter|lora|peft|train\w*|ds|deepspeed|zero\d*|accelerate|fsdp|optim\w*|sched\w*|sweep|wandb|"
    r"data\w*|eval\w*|run|experiment|launch|megatron)(?:[-_.]|$)).*config(?:uration)?[-\w]*\.json",
    r"params\.json|quant_model_description[-\w]*\.json|recipe\.ya?ml|modules\.json",
    r"(?:licen[cs]e|notice|copying|copyright|third[-_]party|use_policy|usage_policy|acceptable_use)[-\w]*"
    r"(?:\.(?:txt|pdf|html|rst))?",
    # code that transformers loads, and parsers that a server is given
    r"(?:(?:image_|video_)?processing|modeling|modular|configuration|tokenization|encoding|feature_extraction)[-\w]*\.py",
    r".*parser[-\w]*\.py",
)
_BELONGS = re.compile("|".join(_ROWS), re.IGNORECASE)
_FOREIGN_FOLDER = re.compile(
    r"(?:checkpoint|global_step|epoch|step|iter)[-_]?\d.*|runs|wandb|.*logs?|tensorboard|mlruns|outputs?|results?|samples|"
    r"optimizer.*|.*fsdp.*|__pycache__|venv|node_modules",
    re.IGNORECASE,
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+\.(?:[^\n(]*\([^)]*\)|[^\n]*)", re.MULTILINE
)  # of its own modules
_CLASS = re.compile(r"\"(?:[^\"\s]*--)?([\w./]+)\.\w+\"")  # of a config's auto_map


def no_files() -> tuple[dict[str, bytes], str]:
    """Generate nothing; see `SidecarFiles.generate`."""
    return {}, ""


@dataclass(frozen=True)
class SidecarFiles:
    """names: files for the artifact, POSIX paths relative to the source, sorted; num_bytes: their total size.

    left_out: path → reason of every other file or folder beside them in the source. card: the bytes of its README.md,
    which becomes a part of the artifact's README.md; None without one. generated: files that a source without them
    makes of its own bytes, such as a tokenizer of metadata; generate: return their contents by name, and a sentence for
    the manifest; no contents where it fails.
    """

    names: tuple[str, ...] = ()
    num_bytes: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
    card: bytes | None = None
    generated: tuple[str, ...] = ()
    generate: Callable[[], tuple[dict[str, bytes], str]] = no_files

    @classmethod
    def of_folder(cls, root: Path) -> SidecarFiles:
        """List the sidecar files of a folder. Opens each of them, and reads only the card and the model's own code.

        Raises InputError, naming the file, for a file that is not regular, cannot be read, has a name that is not valid
        Unicode, or is a link that leads out of the source, and for a card larger than
        16 MiB; OSError for an unreadable folder.
        """
        left_out: dict[str, str] = {}
        paths = list(_walk(root, left_out))
        card = None
        if CARD in paths:
            _size(root, CARD)
            card = _read_card(root)
        names = _belonging(root, paths, card, left_out)
        return cls(
            names, sum(_size(root, name) for name in names), dict(sorted(left_out.items())), card
        )

    @classmethod
    def of_listing(cls, sizes: Mapping[str, int], root: Path) -> SidecarFiles:
        """List the sidecar files of a repo with only its small files and headers at `root`; sizes: of all its files."""
        card = _read_card(root) if (root / CARD).is_file() else None
        left_out: dict[str, str] = {}
        names = _belonging(root, sizes, card, left_out)
        return cls(names, sum(sizes[name] for name in names), dict(sorted(left_out.items())), card)


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether one of some files is a tokenizer's."""
    return any(path.rpartition("/")[2].endswith(_TOKENIZERS) for path in names)


def is_code_or_config(name: str) -> bool:
    """Return True for a file that may be, or name, a part of the model's own code."""
    return name.endswith(".py") or ("/" not in name and name.endswith("config.json"))


def _belonging(
    root: Path, paths: Iterable[str], card: bytes | None, left_out: dict[str, str]
) -> tuple[str, ...]:
    """Return those of a source's files that belong to the model, sorted; note the others, and why, in `left_out`."""
    others = {path.rpartition("/")[0] for path in paths if path.endswith(_STATES)}
    others = {folder for folder in others if not _MODULE.fullmatch(folder)}
    found, open_ = set[str](), set[str]()
    for path in paths:
        if _is_skipped(path):
            continue
        check_text(path, str(root))
        folder = next(
            (f"{one}/" for one in _parents(path) if one in others or _is_foreign_folder(one)), None
        )
        if path.endswith(PARTIAL):
            left_out[path] = _UNFINISHED
        elif folder is not None:
            left_out[folder] = FOREIGN
        elif _BELONGS.fullmatch(path.rpartition("/")[2]):
            found.add(path)
        else:
            open_.add(path)
    found |= _named(root, found, open_, (card or b"").decode(errors="replace"))
    left_out |= dict.fromkeys(open_ - found, FOREIGN)
    return tuple(sorted(found))


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in reversed(PurePosixPath(path).parents)][1:]


def _is_foreign_folder(path: str) -> bool:
    return _FOREIGN_FOLDER.fullmatch(path.rpartition("/")[2]) is not None


def _named(root: Path, found: Iterable[str], others: Iterable[str], card: str) -> set[str]:
    """Return the files that the model's own code imports or names, and pictures that its card names."""
    todo = [CONFIG, *(name for name in found if is_code_or_config(name))]
    named = {path for path in others if path.lower().endswith(_PICTURES) and path in card}
    code = ""
    while todo:
        try:
            text = read_regular(root / todo[-1], MAX_CODE_BYTES).decode(errors="replace")
        except OSError:
            text = ""
        is_code = todo.pop().endswith(".py")
        words = set(
            re.findall(r"\w+", " ".join(_IMPORT.findall(text) if is_code else _CLASS.findall(text)))
        )
        code += text if is_code else ""
        for path in sorted(set(others) - named):
            folder, _, name = f"/{path}".rpartition("/")
            stem = folder.rpartition("/")[2] if name == "__init__.py" else name.removesuffix(".py")
            if name.endswith(".py") and stem in words:
                named.add(path)
                todo.append(path)
    texts = set(re.findall(r"([^\"'/\s]+\.\w+)[\"']", code))  # files that the code names
    return named | {path for path in others if path.rpartition("/")[2] in texts}


def _is_skipped(path: str) -> bool:
    """Return True for a weight file, a hidden one, and one that an artifact writes itself."""
    *folders, name = path.split("/")
    if any(part.startswith(".") for part in (*folders, name)) or path in (
        CONFIG,
        MANIFEST,
        SUMS,
        CARD,
        EVALUATION,
    ):
        return True
    is_other = folders[:1] and folders[0] in WEIGHT_FOLDERS
    return bool(is_other) or name.endswith((*WEIGHT_SUFFIXES, ".index.json"))


def _walk(root: Path, left_out: dict[str, str]) -> Iterator[str]:
    """Yield all files below a folder, but of hidden folders and those of others; links to folders are noted."""
    for folder, folders, names in os.walk(
        root, onerror=_raise
    ):  # by itself it passes over what it cannot read
        relative = Path(folder).relative_to(root)
        for name in list(folders):
            path = (relative / name).as_posix()
            is_link, is_foreign = (root / path).is_symlink(), _is_foreign_folder(path)
            if _is_skipped(f"{path}/file") or is_link or is_foreign:
                folders.remove(name)
            if not _is_skipped(f"{path}/file") and (is_link or is_foreign):
                check_text(path, str(root))
                left_out[path if is_link else f"{path}/"] = _LINKED_FOLDER if is_link else FOREIGN
        yield from ((relative / name).as_posix() for name in names)


def _raise(error: OSError) -> None:
    raise error


def _size(root: Path, path: str) -> int:
    """Return the size of a readable file that lies in the source."""
    full = root / path
    found = found_at(full)
    if found is not None:
        raise InputError(
            "This is not a file.",
            where=str(full),
            expected="a regular file",
            found=found,
            remedy=COPY_AGAIN,
        )
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
        what, remedy = (
            "The source's model card cannot be read.",
            "Shorten it, or leave it out of the source.",
        )
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
