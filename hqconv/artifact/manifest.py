"""Reads an artifact's manifest and says what is wrong with it; loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.lineage import DERIVED, is_lineage
from hqconv.artifact.manifest_digest import DIGEST, alteration
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.schemas import artifact_names
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import MAX_COUNT, MAX_SIZE
from hqconv.schemas.untrusted_files import (
    MAX_DOCUMENT_BYTES,
    MAX_LIST_BYTES,
    found_at,
    parse_json,
    read_regular,
)
from hqconv.schemas.weight_schema import WeightSchema

_BYTES_PER_NAME = 16  # of quotes, spaces and the like around it
_AGAIN = "Convert the source again, or copy the artifact again from where it is whole."

# What every reader relies on; more keys may be there.
_MANIFEST_KEYS: dict[str, type] = {
    "hqconv_version": str,
    "humming_kernels_version": str,
    "source": dict,
    "layout": str,
    "schema_name": str,
    "weight_schema": dict,
    "input_schema": str,
    "dtype": str,
    "target": str,
    "tp": int,
    "ep": int,
    "expert_placement": str,
    "redundant_experts": int,
    "family": str,
    "blocks": dict,
    "files": dict,
    "tensors": dict,
}
_BLOCK_KEYS: dict[str, type] = {
    "layer": int,
    "num_experts": int,
    "hidden_size": int,
    "intermediate_size": int,
    "activation": str,
    "gated": bool,
    "top_k": int,
    "source_dtype": str,
    "source_format": dict,
    "source_parts": dict,
    "conversion": str,
    "quantization_error": dict,
}
_FILE_KEYS: dict[str, type] = {"size_bytes": int, "sha256": str}
# What a block has for itself where it is made of something else than the others; all of these, or none.
_OWN_KEYS: dict[str, type] = {"schema_name": str, "weight_schema": dict, "input_schema": str, "target": str}
# What is there only where it says something, of the artifact and of such a block.
_OPTIONAL_KEYS: dict[str, type] = {"activation_schema": dict, "cuda": str}


def is_artifact(root: Path) -> bool:
    """Whether the folder holds a finished artifact, whole or not."""
    return (root / artifact_names.MANIFEST).is_file()


def is_unfinished(root: Path) -> bool:
    """Whether the folder holds a conversion that was interrupted (or is still running)."""
    return (root / artifact_names.JOURNAL).is_file() and not is_artifact(root)


def read_manifest(root: Path, *, is_sealed: bool = False) -> dict[str, Any]:
    """An artifact's `hqconv.json`, with every key that readers rely on present and of the right type.

    is_sealed: its bytes must be those of its own digest as well; `verify` lists that beside whatever else is wrong.

    Raises RequestError where `root` is no artifact or was made by a newer hqconv, VerificationError where
    the conversion is unfinished or the manifest is damaged.
    """
    path = root / artifact_names.MANIFEST
    if is_unfinished(root):
        raise VerificationError(
            "The conversion is unfinished: this is not an artifact yet.",
            where=str(root),
            remedy="Run the `hqconv convert` command that wrote it once more, with --resume.",
        )
    if not path.is_file():
        raise RequestError(
            "This is not an hqconv artifact.",
            where=str(root),
            expected=f"a folder with {artifact_names.MANIFEST}",
            found=found_at(path) if root.is_dir() else "no such folder",
            remedy="Give the OUT of `hqconv convert`; where the manifest is lost, convert again.",
        )
    try:
        raw = read_regular(path, MAX_LIST_BYTES)
        words = parse_json(raw)
    except OSError as error:
        raise _damaged(path, "a readable file", error.strerror) from error
    except ValueError as error:  # not UTF-8, not JSON, too deep
        raise _damaged(path, "a JSON document", error) from error
    _check(path, words)
    _check_size(path, len(raw), words)
    if is_sealed and (wrong := alteration(raw, words)) is not None:
        where, (what, expected, found) = f"{path}: {DIGEST}", wrong
        raise VerificationError(what, where=where, expected=expected, found=found, remedy=_AGAIN)
    return dict(words)


def _check_size(path: Path, num_bytes: int, words: Mapping[str, Any]) -> None:
    """Only the names of tensors may make a manifest large: there may be a million."""
    if num_bytes <= MAX_DOCUMENT_BYTES:
        return
    of_names = sum(
        _BYTES_PER_NAME + len(name) + len(str(names[name]) if isinstance(names, dict) else "")
        for names in words["tensors"].values()
        if isinstance(names, dict | list)
        for name in names
        if isinstance(name, str)
    )
    if num_bytes - of_names > MAX_DOCUMENT_BYTES:
        expected = f"at most {MAX_DOCUMENT_BYTES} bytes besides the names of tensors"
        raise _damaged(path, expected, f"{num_bytes} bytes")


def schema_of(root: Path, words: Mapping[str, Any], inside: str = "") -> WeightSchema:
    """The weight schema that a manifest names, or a block of it. Raises VerificationError where it is none.

    inside: where in the manifest, such as `blocks: NAME: `.
    """
    try:
        return WeightSchema(name=words["schema_name"], **words["weight_schema"])
    except (HqconvError, TypeError) as error:
        field, found = getattr(error, "where", ""), getattr(error, "found", error)
        where = f"{root / artifact_names.MANIFEST}: {inside}weight_schema{f': {field}' if field else ''}"
        raise _damaged(where, "the fields of a weight schema", found) from error


def check_details(root: Path, words: Mapping[str, Any]) -> None:
    """What a description relies on besides `read_manifest`; the checks of `verify` look at it one by one.

    Raises VerificationError.
    """
    path = root / artifact_names.MANIFEST
    _check_kinds(root, words)
    _check_numbers(path, words)
    if "importance" in words:
        _check_keys(path, "importance: ", words["importance"], {"sha256": str, "file": str})
    warnings = words.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
        raise _damaged(f"{path}: warnings", "a list of sentences", repr(warnings)[:80])
    if not is_lineage(words.get(DERIVED, [])):
        raise _damaged(f"{path}: {DERIVED}", "the artifacts that it comes from", repr(words[DERIVED])[:80])
    for kind, names in words["tensors"].items():
        if not isinstance(names, list | dict):
            raise _damaged(f"{path}: tensors: {kind}", "names", type(names).__name__)
    for name, block in words["blocks"].items():
        _check_keys(
            path, f"blocks: {name}: source_format: ", block["source_format"], {"name": str, "decoder": str}
        )
        try:
            Activation.from_dict(block)
        except ValueError as wrong:
            raise _damaged(f"{path}: blocks: {name}", "the activation's numbers", wrong) from wrong
        for role, error in block["quantization_error"].items():
            if not isinstance(error, dict) or not all(type(n) in (int, float) for n in error.values()):
                where = f"{path}: blocks: {name}: quantization_error: {role}"
                raise _damaged(where, "numbers by name", repr(error)[:80])


def _check_numbers(path: Path, words: Mapping[str, Any]) -> None:
    """Numbers that can be; whether they are those of this artifact is for `verify` to say."""
    ranges = {"tp": (1, MAX_COUNT), "ep": (1, MAX_COUNT), "redundant_experts": (0, MAX_COUNT)}
    of_block = {"num_experts": (1, MAX_COUNT), "top_k": (1, MAX_COUNT), "layer": (-1, MAX_SIZE)}
    of_block |= {"hidden_size": (1, MAX_SIZE), "intermediate_size": (1, MAX_SIZE)}
    places = [("", words, ranges), *((f"blocks: {n}: ", b, of_block) for n, b in words["blocks"].items())]
    places += [(f"files: {n}: ", f, {"size_bytes": (0, 1 << 60)}) for n, f in words["files"].items()]
    for inside, of, known in places:
        for key, (least, most) in known.items():
            if not least <= of[key] <= most:
                raise _damaged(f"{path}: {inside}{key}", f"from {least} to {most}", of[key])


def _check_kinds(root: Path, words: Mapping[str, Any]) -> None:
    """What the artifact and blocks that differ are made of."""
    own = {f"blocks: {n}: ": block for n, block in words["blocks"].items() if "weight_schema" in block}
    for inside, one in {"": words, **own}.items():
        try:
            artifact_names.kernel_spec_from_dict(one, schema_of(root, one, inside), words["dtype"])
        except (RequestError, KeyError, TypeError) as error:
            inside += getattr(error, "where", "activation_schema").removeprefix("--")
            expected, found = getattr(error, "expected", ""), getattr(error, "found", error)
            raise _damaged(f"{root / artifact_names.MANIFEST}: {inside}", expected, found) from error


def _check(path: Path, words: Any) -> None:
    if not isinstance(words, dict):
        raise _damaged(path, "a JSON object", type(words).__name__)
    version = words.get("format_version")
    if type(version) is int and version > artifact_names.MIXED_VERSION:
        raise RequestError(
            "The artifact was made by a newer hqconv.",
            where=f"{path}: format_version",
            expected=f"at most {artifact_names.MIXED_VERSION}",
            found=f"{version} (hqconv {words.get('hqconv_version', '?')})",
            remedy="Upgrade hqconv.",
        )
    if type(version) is not int or version not in (
        artifact_names.FORMAT_VERSION,
        artifact_names.MIXED_VERSION,
    ):
        raise _damaged(f"{path}: format_version", str(artifact_names.FORMAT_VERSION), repr(version))
    _check_keys(path, "", words, _MANIFEST_KEYS)
    quantization = words["source"].get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        where, found = f"{path}: source: quantization_config", type(quantization).__name__
        raise _damaged(where, "an object or null", found)
    for group, keys in (("blocks", _BLOCK_KEYS), ("files", _FILE_KEYS)):
        for name, entry in words[group].items():
            _check_keys(path, f"{group}: {name}: ", entry, keys)
    for name in words["blocks"]:  # which become names of files
        if not artifact_names.is_block_name(name):
            raise _damaged(f"{path}: blocks", "names of modules: words with dots between", repr(name))
    _check_mixed(path, words)


def _check_mixed(path: Path, words: dict[str, Any]) -> None:
    """What makes blocks differ from each other: said as it must be, and with the version that says so."""
    _check_optional(path, "", words)
    left = words.get("left_blocks", [])
    if not isinstance(left, list) or not all(
        isinstance(n, str) and artifact_names.is_block_name(n) for n in left
    ):
        raise _damaged(f"{path}: left_blocks", "a list of names of modules", repr(left)[:80])
    twice = [name for name, count in Counter([*left, *words["blocks"]]).items() if count > 1]
    if twice:
        expected = "each name once, and of no block that is there"
        raise _damaged(f"{path}: left_blocks", expected, repr(twice[0]))
    keys = {*_OWN_KEYS, *_OPTIONAL_KEYS}
    overridden = [name for name, block in words["blocks"].items() if not keys.isdisjoint(block)]
    for name in overridden:
        _check_own(path, f"blocks: {name}: ", words["blocks"][name], words)
    version = artifact_names.MIXED_VERSION if left or overridden else artifact_names.FORMAT_VERSION
    if words["format_version"] != version:
        raise _damaged(f"{path}: format_version", f"{version}, by its blocks", words["format_version"])
    if overridden and words["layout"] == artifact_names.CHECKPOINT:
        raise _damaged(f"{path}: layout", "kernel, where blocks differ", words["layout"])


def _check_own(path: Path, inside: str, block: Mapping[str, Any], words: Mapping[str, Any]) -> None:
    """A block that is made of something else than the others, for the same GPU."""
    _check_keys(path, inside, block, _OWN_KEYS)
    _check_optional(path, inside, block)
    for key in ("target", "cuda"):
        if block.get(key) != words.get(key):
            expected = f"{words.get(key, 'none')}, as of the artifact"
            raise _damaged(f"{path}: {inside}{key}", expected, repr(block.get(key)))


def _check_optional(path: Path, inside: str, words: Mapping[str, Any]) -> None:
    _check_keys(path, inside, words, {key: kind for key, kind in _OPTIONAL_KEYS.items() if key in words})


def _check_keys(path: Path, inside: str, words: Any, types: Mapping[str, type]) -> None:
    if not isinstance(words, dict):
        raise _damaged(f"{path}: {inside.rstrip(': ')}", "an object", type(words).__name__)
    for key, expected in types.items():
        value = words.get(key)
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            found = "no such key" if key not in words else type(value).__name__
            raise _damaged(f"{path}: {inside}{key}", expected.__name__, found)


def _damaged(where: object, expected: str, found: object) -> VerificationError:
    return VerificationError(
        "The artifact's manifest is damaged.", where=str(where), expected=expected, found=found, remedy=_AGAIN
    )
