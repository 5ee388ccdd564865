"""The JSON files of a checkpoint: config.json, the quantization config, and the index of its shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hqconv.errors import InputError, first_few
from hqconv.io.safetensors_header import RepeatedKey, keep_repeats
from hqconv.schemas.artifact_names import CONFIG, INDEX, JOURNAL, MANIFEST, SINGLE
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import (
    MAX_DOCUMENT_BYTES,
    MAX_LIST_BYTES,
    NOTHING,
    found_at,
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
        what, where = "The checkpoint cannot be read.", str(error.filename or src)
        raise InputError(what, where=where, found=error.strerror or error, remedy=COPY_AGAIN) from error


def read_json(path: Path, hook: Any = None, max_bytes: int = MAX_DOCUMENT_BYTES) -> tuple[dict[str, Any], bytes]:
    """Read a JSON object; return it and the file's bytes. Raises InputError for other content and for a larger file."""
    found: object
    try:
        raw = read_regular(path, max_bytes)
        value = parse_json(raw, hook)
    except OSError as error:
        what, found = "A file of the checkpoint cannot be read.", error.strerror
        raise InputError(what, where=str(path), found=found, remedy=COPY_AGAIN) from error
    except ValueError as error:  # not UTF-8, not JSON, too deep
        what = "A file of the checkpoint is not valid JSON."
        raise InputError(what, where=str(path), found=error, remedy=COPY_AGAIN) from error
    if not isinstance(value, dict):
        found = value if isinstance(value, RepeatedKey) else type(value).__name__
        what, expected = "A file of the checkpoint is not a JSON object.", "an object with unique keys"
        raise InputError(what, where=str(path), expected=expected, found=found, remedy=COPY_AGAIN)
    return value, raw


def check_text(text: str, where: str) -> None:
    """Refuse text that UTF-8 cannot hold, such as a file name in another encoding: a manifest could not store it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what, found = "A name or a word is no valid Unicode.", repr(text[max(0, error.start - 20) :][:60])
        raise InputError(what, where=where, found=found, remedy="Rename or mend it.") from error


def read_config(root: Path) -> dict[str, Any]:
    """Read config.json. Raises InputError if it is missing."""
    if not (root / CONFIG).is_file():
        what, remedy = f"The checkpoint has no {CONFIG}.", "Give the folder of a transformers model."
        raise InputError(what, where=str(root), found=listing(root), remedy=remedy)
    return read_document(root / CONFIG)


def check_regular(root: Path) -> None:
    """Refuse a folder with a non-regular file under the name of an input or output file. Raises InputError.

    Nothing is opened, so that a FIFO cannot block.
    """
    for name in (CONFIG, INDEX, SINGLE, MANIFEST, JOURNAL, *QUANTIZATION_FILES):
        path = root / name
        found = found_at(path)
        if found not in (None, NOTHING):
            what = "A name that files of models and artifacts have is of something else."
            remedy = "Remove it, or give it another name."
            raise InputError(what, where=str(path), expected="a regular file", found=found, remedy=remedy)


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


def are_all_shards(names: Collection[str]) -> bool:
    """Return whether names are those of all shards of one checkpoint, by their numbers: NAME-00001-of-00002 and so on.

    Only then no shard can be missing without an index.
    """
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if not found or len(found) != len(names):
        return False
    numbers = sorted(int(match[2]) for match in found)
    return len({(match[1], match[3]) for match in found}) == 1 and numbers == list(range(1, int(found[0][3]) + 1))


def read_weight_map(root: Path, names: Collection[str]) -> tuple[dict[str, str] | None, str | None]:
    """Return the index's weight map, checked in itself, and the index's sha256; two None without an index in use.

    names: of the checkpoint's files. Raises InputError for a broken index, and where there is neither an index nor a
    single file nor a complete set of numbered shards.
    """
    if SINGLE in names:  # before the index: transformers' _get_resolved_checkpoint_files
        return None, None
    path = root / INDEX
    if not path.is_file():
        shards = sorted(filter(is_shard, names))
        if are_all_shards(shards):
            return None, None
        if shards:
            what, found = "The checkpoint has no index of its shards.", f"{len(shards)} shards: {first_few(shards)}"
            expected = f"{INDEX}, or all of the shards NAME-00001-of-0000N.safetensors"
            remedy = f"Download {INDEX} of the same checkpoint into the folder; a single file must be called {SINGLE}."
            raise InputError(what, where=str(root), expected=expected, found=found, remedy=remedy)
        what, expected = "The folder holds no safetensors checkpoint.", f"{SINGLE} or {INDEX}"
        remedy = "Convert other weight formats to safetensors first."
        raise InputError(what, where=str(root), expected=expected, found=listing(root), remedy=remedy)
    index, raw = read_json(path, keep_repeats, MAX_LIST_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what, expected = "The index has no usable weight_map.", "an object of tensor names with unique keys"
        found = repr(weight_map) if isinstance(weight_map, RepeatedKey) else type(weight_map).__name__
        raise InputError(what, where=str(path), expected=expected, found=found, remedy=COPY_AGAIN)
    plain = set(filter(is_plain_name, {name for name in weight_map.values() if isinstance(name, str)}))
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name not in plain:
            where, expected = f"{path}, tensor {tensor!r}", "a .safetensors file inside the folder"
            what = "The index names a file that cannot be a shard."
            raise InputError(what, where=where, expected=expected, found=repr(name), remedy=COPY_AGAIN)
    return weight_map, hashlib.sha256(raw).hexdigest()


def is_plain_name(name: object) -> bool:
    """Return True for a normalized relative path, so that no file is read twice or from outside the folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable():
        return False
    return "\\" not in name and not {"", ".", ".."}.intersection(name.split("/"))


def check_weight_map(weight_map: Mapping[str, str], tensors: Mapping[str, TensorRef], files: tuple[str, ...]) -> None:
    """Check that index and headers name the same tensors in the same files. Raises InputError for a difference."""
    for name, file in weight_map.items():
        ref = tensors.get(name)
        if ref is None or files[ref.file] != file:
            found = files[ref.file] if ref else "in no file"
            what, where = "A tensor is not where the index says.", f"{INDEX}, tensor {name!r}"
            raise InputError(what, where=where, expected=file, found=found, remedy=COPY_AGAIN)
    if len(tensors) > len(weight_map):
        lost = [f"{name} ({files[ref.file]})" for name, ref in tensors.items() if name not in weight_map]
        what = f"Tensors are in the files but not in the index: {len(lost)}."
        raise InputError(what, where=INDEX, found=first_few(lost), remedy=COPY_AGAIN)
