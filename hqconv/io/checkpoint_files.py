"""The files of a checkpoint beside its weights: config, index of the shards, model card, and sidecar files.

Sidecar files belong to the model, and an artifact gets them unchanged: they are told by their names. Whatever else lies
in a folder, such as a trainer's states and logs, is not copied.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hqconv.errors import InputError, first_few
from hqconv.io.safetensors_header import RepeatedKey, keep_repeats
from hqconv.schemas.artifact_names import (
    CARD,
    CONFIG,
    EVALUATION,
    INDEX,
    JOURNAL,
    MANIFEST,
    SINGLE,
    SUMS,
)
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import (
    MAX_DOCUMENT_BYTES,
    MAX_LIST_BYTES,
    NOTHING,
    found_at,
    open_regular,
    parse_json,
    read_regular,
)

HF_QUANT_CONFIG = "hf_quant_config.json"
ASCEND_DESCRIPTION = "quant_model_description.json"
QUANTIZATION_FILES = (HF_QUANT_CONFIG, ASCEND_DESCRIPTION)
COPY_AGAIN = "Copy or download the checkpoint again."


@contextmanager
def readable(src: object) -> Iterator[None]:
    """Turn an OSError of a folder that is read into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "The checkpoint cannot be read.",
            where=error.filename or src,
            found=error.strerror or error,
            remedy=COPY_AGAIN,
        ) from error


def read_json(
    path: Path, hook: Any = None, max_bytes: int = MAX_DOCUMENT_BYTES
) -> tuple[dict[str, Any], bytes]:
    """Read a JSON object; return it and the file's bytes. Raises InputError for other content and for a larger file."""
    found: object
    try:
        raw = read_regular(path, max_bytes)
        value = parse_json(raw, hook)
    except OSError as error:
        raise InputError(
            "A file of the checkpoint cannot be read.",
            where=path,
            found=error.strerror,
            remedy=COPY_AGAIN,
        ) from error
    except ValueError as error:  # not UTF-8, not JSON, too deep
        raise InputError(
            "A file of the checkpoint is not valid JSON.",
            where=path,
            found=error,
            remedy=COPY_AGAIN,
        ) from error
    if not isinstance(value, dict):
        found = value if isinstance(value, RepeatedKey) else type(value).__name__
        raise InputError(
            "A file of the checkpoint is not a JSON object.",
            where=path,
            expected="an object with unique keys",
            found=found,
            remedy=COPY_AGAIN,
        )
    return value, raw


def check_text(text: str, where: str) -> None:
    """Refuse text that UTF-8 cannot hold, such as a file name in another encoding: a manifest could not store it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "A name or a word is no valid Unicode.",
            where=where,
            found=repr(text[max(0, error.start - 20) :][:60]),
            remedy="Rename or mend it.",
        ) from error


def read_config(root: Path) -> dict[str, Any]:
    """Read config.json. Raises InputError if it is missing."""
    if not (root / CONFIG).is_file():
        raise InputError(
            f"The checkpoint has no {CONFIG}.",
            where=root,
            found=listing(root),
            remedy="Give the folder of a transformers model.",
        )
    return read_document(root / CONFIG)


def check_regular(root: Path) -> None:
    """Refuse a folder with a non-regular file under the name of an input or output file. Raises InputError.

    Nothing is opened, so that a FIFO cannot block.
    """
    for name in (CONFIG, INDEX, SINGLE, MANIFEST, JOURNAL, *QUANTIZATION_FILES):
        path = root / name
        found = found_at(path)
        if found not in (None, NOTHING):
            raise InputError(
                "A name that files of models and artifacts have is of something else.",
                where=path,
                expected="a regular file",
                found=found,
                remedy="Remove it, or give it another name.",
            )


def read_document(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """Read a JSON object whose text a manifest can store."""
    document, _ = read_json(path, max_bytes=max_bytes)
    check_text(json.dumps(document, ensure_ascii=False), str(path))
    return document


def listing(root: Path) -> str:
    """List the names in a folder, for messages."""
    return first_few(sorted(path.name for path in root.iterdir())) or "an empty folder"


_NUMBERED = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


def is_shard(name: str) -> bool:
    """Return whether a file of a checkpoint's folder is a safetensors file."""
    return name.endswith(".safetensors") and "/" not in name


def set_of(name: str) -> tuple[str, str] | None:
    """Return what the shards of one checkpoint share, NAME and N of NAME-00001-of-0000N; None for another name."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], match[3])


def holds_safetensors(names: Collection[str]) -> bool:
    """Return True for the files of a folder or repo with a model in safetensors files."""
    return SINGLE in names or INDEX in names or are_all_shards(list(filter(is_shard, names)))


def are_all_shards(names: Collection[str]) -> bool:
    """Return whether names are those of all shards of one checkpoint, by their numbers: NAME-00001-of-00002 and so on.

    Only then no shard can be missing without an index.
    """
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if not found or len(found) != len(names):
        return False
    numbers = sorted(int(match[2]) for match in found)
    return len({(match[1], match[3]) for match in found}) == 1 and numbers == list(
        range(1, int(found[0][3]) + 1)
    )


# Names of files that hold parts of tensors for ranks: of Grok-2, vLLM's sharded_state, DeepSeek's own code, Megatron.
_OF_RANK = re.compile(r"(?:^|[-_.])(?:tp|mp|rank)[-_]?\d+|consolidated\.\d", re.IGNORECASE)
ONE_READING = (
    "Servers choose different files: keep those of one model. To take some files of a Hub repo, use `hf download` with "
    "--exclude, and give the folder."
)


def check_all_there(root: Path, shards: Sequence[str]) -> None:
    """Check that files without an index are all of a checkpoint: `SINGLE`, or a whole set of numbered shards.

    Raises InputError.
    """
    if SINGLE in shards or are_all_shards(shards):
        return
    if any(map(_OF_RANK.search, shards)):
        raise parts_of_ranks(str(root), first_few(shards))
    if shards:
        raise InputError(
            "The checkpoint has no index of its shards.",
            where=root,
            expected=f"{INDEX}, or all of the shards NAME-00001-of-0000N.safetensors",
            found=f"{len(shards)} shards: {first_few(shards)}",
            remedy=f"Download {INDEX} of the same checkpoint into the folder; a single file must be called {SINGLE}.",
        )
    raise InputError(
        "The folder holds no safetensors checkpoint.",
        where=root,
        expected=f"{SINGLE} or {INDEX}",
        found=listing(root),
        remedy='Convert other formats first: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{root}', dtype='auto').save_pretrained('OUT')\".",
    )


def parts_of_ranks(where: str, found: str) -> InputError:
    """Return the error for files that hold parts of tensors."""
    return InputError(
        "The files hold parts of tensors, cut for tensor-parallel ranks.",
        where=where,
        expected="whole tensors",
        found=found,
        remedy="Give the model as it was before it was cut; hqconv cuts it itself (--tp).",
    )


def tensor_in_two_files(tensor: str, first: str, second: str) -> InputError:
    """Return the error for a tensor that two files of a checkpoint hold."""
    where = f"tensor {tensor!r}"
    found = f"{first} and {second}"
    if _OF_RANK.search(first) and _OF_RANK.search(second):
        return parts_of_ranks(where, found)
    return InputError(
        "A tensor is in two files.", where=where, expected="one", found=found, remedy=ONE_READING
    )


def read_weight_map(root: Path) -> tuple[dict[str, str] | None, str | None]:
    """Return the index's weight map, checked in itself, and the index's sha256; two None without an index.

    Raises InputError for a broken index.
    """
    path = root / INDEX
    if not path.is_file():
        return None, None
    index, raw = read_json(path, keep_repeats, MAX_LIST_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = (
            repr(weight_map) if isinstance(weight_map, RepeatedKey) else type(weight_map).__name__
        )
        raise InputError(
            "The index has no usable weight_map.",
            where=path,
            expected="an object of tensor names with unique keys",
            found=found,
            remedy=COPY_AGAIN,
        )
    is_plain = functools.cache(is_plain_name)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain(name):
            raise InputError(
                "The index names a file that cannot be a shard.",
                where=f"{path}, tensor {tensor!r}",
                expected="a .safetensors file inside the folder",
                found=repr(name),
                remedy=COPY_AGAIN,
            )
    return weight_map, hashlib.sha256(raw).hexdigest()


def is_plain_name(name: str) -> bool:
    """Return True for a normalized relative path, so that no file is read twice or from outside the folder."""
    if not name.endswith(".safetensors") or not name.isprintable():
        return False
    return "\\" not in name and not {"", ".", ".."}.intersection(name.split("/"))


def check_weight_map(
    weight_map: Mapping[str, str], tensors: Mapping[str, TensorRef], files: tuple[str, ...]
) -> None:
    """Check that index and headers name the same tensors in the same files. Raises InputError for a difference."""
    for name, file in weight_map.items():
        ref = tensors.get(name)
        if ref is None or files[ref.file] != file:
            found = files[ref.file] if ref else "in no file"
            raise InputError(
                "A tensor is not where the index says.",
                where=f"{INDEX}, tensor {name!r}",
                expected=file,
                found=found,
                remedy=COPY_AGAIN,
            )
    if len(tensors) > len(weight_map):
        lost = [
            f"{name} ({files[ref.file]})" for name, ref in tensors.items() if name not in weight_map
        ]
        raise InputError(
            f"Tensors are in the files but not in the index: {len(lost)}.",
            where=INDEX,
            found=first_few(lost),
            remedy=COPY_AGAIN,
        )


# --- front matter of a model card: the YAML between `---` lines at the head of a README.md, which the Hub reads

_FRONT = re.compile(
    rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE
)
_MAX_FRONT_BYTES = 4 << 20


@dataclass(frozen=True)
class FrontMatter:
    """Parsed front matter of a card.

    document: keys and values, empty if it is missing or unreadable. problem: why it cannot be read, else "".
    """

    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def of(cls, card: bytes) -> FrontMatter:
        """Parse the front matter of a card's bytes, which may be anything."""
        found = _FRONT.match(card)
        if found is None:
            return cls()
        document = _parsed(found[1]) if len(found[1]) <= _MAX_FRONT_BYTES else None
        if document is None:
            return cls(problem="it is no YAML of keys and values, or larger than 4 MiB")
        return cls(document)

    def texts(self, key: str) -> str | list[str] | None:
        """Return a value that is a text or a list of texts; None for any other value and for a missing key."""
        value = self.document.get(key)
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
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


# --- sidecar files

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
_TOKENIZERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    ".model",
    ".tiktoken",
    "tokenizer.tok.json",
)
# Names in lower case of the files that an artifact gets.
_NAMES = (
    "*tokenizer*.json",
    "*vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "added_tokens.json",
    "special_tokens*.json",
    "tekken.json",
    "normalizer.json",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "*.jinja",
    "chat_template*.json",
    "system_prompt*.txt",
    "generation_config.json",
    "*processor_config.json",
    "config_*.json",
    "configuration.json",
    "params.json",
    "modules.json",
    "sentence_bert_config.json",
    "*quant*.json",
    "recipe.y*ml",
    "*.md",
    "licen[cs]e*",
    "notice*",
    "copying*",
    "copyright*",
    "*use_policy*",
    "third*party*",
    # the model's own code, and numbers that it loads
    "*.py",
    "*.npz",
)
_NAMES_IN_FOLDERS = ("*/*.jinja", "*/*.py", "tokenizer/*", "?_pooling/config.json")
_MAX_CARD_BYTES = 16 << 20


@dataclass(frozen=True)
class SidecarFiles:
    """names: files for the artifact, POSIX paths relative to the source, sorted; num_bytes: their total size.

    left_out: other files beside the weights, and folders that hold some. card: the bytes of the source's README.md,
    from which the artifact's README.md is made; None without one. remarks: sentences for the manifest. generated: files
    that a source without them makes of its own bytes, such as a tokenizer of metadata; generate: return their contents
    by name, and a sentence for the manifest; no contents where it fails.
    """

    names: tuple[str, ...] = ()
    num_bytes: int = 0
    left_out: tuple[str, ...] = ()
    card: bytes | None = None
    remarks: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    generate: Callable[[], tuple[dict[str, bytes], str]] = lambda: ({}, "")

    @classmethod
    def of_folder(cls, root: Path) -> SidecarFiles:
        """List the sidecar files of a folder. Opens each of them, and reads only the card.

        Raises InputError, naming the file, for a file that is not regular, cannot be read, has a name that is not valid
        Unicode, or is a link that leads out of the source, and for a card larger than
        16 MiB; OSError for an unreadable folder.
        """
        names, left_out = _sorted_out(_paths(root))
        sizes = [_size(root, name) for name in names]
        return cls(names, sum(sizes), left_out, _read_card(root))

    @classmethod
    def of_listing(cls, sizes: Mapping[str, int], root: Path) -> SidecarFiles:
        """List the sidecar files of a repo with only its small files and headers at `root`; sizes: of all its files."""
        names, left_out = _sorted_out(sizes)
        return cls(names, sum(sizes[name] for name in names), left_out, _read_card(root))


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether one of some files is a tokenizer's."""
    return any(path.rpartition("/")[2].endswith(_TOKENIZERS) for path in names)


def _paths(root: Path) -> Iterator[str]:
    """Yield the files in a folder and in the folders of it; links to folders are not followed."""
    for path in root.iterdir():
        if path.is_symlink() or not path.is_dir():
            yield path.name
        elif not _is_skipped(path.name):
            yield from (f"{path.name}/{file.name}" for file in path.iterdir() if not file.is_dir())


def _sorted_out(paths: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sidecar files, and files and folders that are not copied, each sorted."""
    names = []
    left_out = set[str]()
    for path in paths:
        if _is_skipped(path) or path.count("/") > 1:
            continue
        check_text(path, path)
        folder, slash, _ = path.partition("/")
        patterns = _NAMES_IN_FOLDERS if slash else _NAMES
        if any(fnmatchcase(path.lower(), pattern) for pattern in patterns):
            names.append(path)
        else:
            left_out.add(folder + slash)
    return tuple(sorted(names)), tuple(sorted(left_out))


def _is_skipped(path: str) -> bool:
    """Return True for a weight file, a hidden one, and one that an artifact writes itself."""
    components = path.split("/")
    if components[0] in WEIGHT_FOLDERS or any(name.startswith(".") for name in components):
        return True
    return path in (CONFIG, MANIFEST, SUMS, CARD, EVALUATION) or path.endswith(
        (*WEIGHT_SUFFIXES, ".index.json")
    )


def _size(root: Path, name: str) -> int:
    """Return the size of a readable file that lies in the source, or in the Hub's cache that has a link to it.

    The Hub's cache has its files in `blobs`, beside `snapshots` with links to them, as in older downloads to a folder.
    """
    path = root / name
    found = found_at(path)
    if found is None:
        target = path.resolve()
        is_blob = target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()
        if not is_blob and not target.is_relative_to(root.resolve()):
            found = f"a link that leads out of the source, to {target}: that file would be copied"
    if found is None:
        try:
            descriptor = open_regular(path)
            os.close(descriptor)
            return path.stat().st_size
        except OSError as error:
            found = error.strerror or str(error)
    raise InputError(
        "A file of the source cannot be copied.",
        where=path,
        expected="a regular file",
        found=found,
        remedy="Put a copy of the file in its place, or leave it out of the source.",
    )


def _read_card(root: Path) -> bytes | None:
    if not os.path.lexists(root / CARD):
        return None
    _size(root, CARD)
    try:
        return read_regular(root / CARD, _MAX_CARD_BYTES)
    except OSError as error:
        raise InputError(
            "The source's model card cannot be read.",
            where=root / CARD,
            found=error.strerror or error,
            remedy="Shorten it, or leave it out of the source.",
        ) from error
