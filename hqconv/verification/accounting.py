"""The `files` check's bookkeeping: every source tensor is converted, copied or dropped once, and as recorded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hqconv.artifact.opened import Artifact
from hqconv.checkpoint.folder import Checkpoint, TensorRef
from hqconv.checkpoint.safetensors import HeaderEntry
from hqconv.errors import HqconvError, VerificationError
from hqconv.experts.block import ExpertBlock
from hqconv.experts.map import ExpertMap, map_checkpoint, map_experts
from hqconv.formats.format import KNOWN_BY_SOURCE, conversion_of
from hqconv.pipeline.writer import sha256_of
from hqconv.schemas import artifact as names
from hqconv.verification.result import CheckResult

CHUNK_BYTES = 8 << 20
_FACTS = {
    "layer": "layer",
    "num_experts": "num_experts",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "activation": "activation",
    "gated": "gated",
    "top_k": "top_k",
    "source_dtype": "dtype",
}
Place = tuple[str, HeaderEntry]  # file, and where in it


def compare_names(
    where: str, kind: str, found: Collection[str], expected: Collection[str], result: CheckResult
) -> None:
    """Missing and unexpected names, each its own finding; `kind` says of what."""
    for name in sorted(set(expected) - set(found)):
        result.add(f"{where}, {kind} {name}", f"A {kind} is missing.", "present", "absent")
    for name in sorted(set(found) - set(expected)):
        result.add(f"{where}, {kind} {name}", f"A {kind} does not belong here.", "absent", "present")


def compare_words(
    where: str, what: str, expected: Mapping[str, Any], found: Any, result: CheckResult
) -> None:
    """Two JSON objects key by key; one finding for each key that differs."""
    if not isinstance(found, dict):
        result.add(where, what, "a JSON object", json.dumps(found))
        return
    for key in sorted(expected.keys() | found.keys()):
        texts = [json.dumps(w[key], sort_keys=True) if key in w else "no such key" for w in (expected, found)]
        if texts[0] != texts[1]:
            result.add(f"{where}: {key}", what, *texts)


def check_config(artifact: Artifact, source: Checkpoint | None, result: CheckResult) -> dict[str, Any] | None:
    """config.json is the source's plus the manifest's schema; returns it, None if it cannot be read."""
    config = read_json(artifact.root / names.CONFIG, result)
    if names.CONFIG not in artifact.manifest["files"]:
        result.add(names.CONFIG, "The manifest does not list the config.", "listed", "not listed")
    if config is None:
        return None
    where = f"{names.CONFIG}: quantization_config"
    try:
        request = artifact.request
    except VerificationError:  # reported already
        return config
    own = artifact.manifest["source"].get("quantization_config")
    expected = names.hqconv_quantization_config(request.schema, request.input_schema, request.sm_version, own)
    if request.layout == names.CHECKPOINT:
        expected = names.humming_quantization_config(request.schema, list(artifact.blocks))
    what = "The config does not describe the manifest's quantization."
    compare_words(where, what, expected, config.get("quantization_config"), result)
    if source is not None:
        ours, theirs = (
            {k: v for k, v in c.items() if k != "quantization_config"} for c in (config, source.config)
        )
        compare_words(names.CONFIG, "The config is not the source's.", theirs, ours, result)
    return config


def read_json(path: Path, result: CheckResult) -> dict[str, Any] | None:
    """The JSON object in a file of the artifact; None, and a finding, where there is none."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        result.add(path.name, "A file cannot be read as JSON.", "a JSON object", error)
        return None
    if not isinstance(words, dict):
        result.add(path.name, "A file cannot be read as JSON.", "a JSON object", type(words).__name__)
        return None
    return words


# --- the manifest in itself --------------------------------------------------------------------------------


def check_accounting(
    artifact: Artifact,
    blocks: Mapping[str, ExpertBlock],
    copied: Mapping[str, Place],
    config: Mapping[str, Any] | None,
    result: CheckResult,
) -> None:
    """The manifest's `tensors` against its blocks and the shards; `copied` are the shards' ordinary tensors.

    With a `config` (given where there is no source), the names are mapped once more, as if they were a
    checkpoint's: the same blocks must come out.
    """
    words = _accounting(artifact, result)
    if words is None:
        return
    where = f"{names.MANIFEST}: tensors"
    seen: dict[str, str] = {}
    for kind, listed in words.items():
        for name in listed:
            if name in seen:
                result.add(f"{where}, tensor {name}", "A tensor is counted twice.", seen[name], kind)
            seen[name] = kind
    compare_names(f"{where}: copied", "tensor", words["copied"], copied, result)
    _check_converted(artifact, blocks, words["converted"], result)
    for name, block_words in artifact.blocks.items():
        order = ["gate", "up"] if block_words["gated"] else ["up"]
        if block_words.get("w13_order") != order:
            where, found = f"{names.MANIFEST}: {name}: w13_order", block_words.get("w13_order")
            result.add(where, "The rows of w13 are in another order.", order, found)
    # The tensors of rank files and GGUF files say nothing by their names: only a source of that kind can map them.
    if config is not None and any(_is_known_by_names(block) for block in blocks.values()):
        _map_again(artifact, blocks, words, copied, config, result)


def _is_known_by_names(block: ExpertBlock) -> bool:
    """Whether the block came from a checkpoint, whose tensors lie in the block's module."""
    templates = (part.template for parts in block.parts.values() for part in parts.values())
    inside = any(template.startswith(f"{block.name}.") for template in templates)
    return inside or block.format.decoder not in KNOWN_BY_SOURCE


def _check_converted(
    artifact: Artifact, blocks: Mapping[str, ExpertBlock], converted: Mapping[str, str], result: CheckResult
) -> None:
    where = f"{names.MANIFEST}: tensors: converted"
    by_block: dict[str, set[str]] = {name: set() for name in artifact.blocks}
    if not by_block:
        result.add(f"{names.MANIFEST}: blocks", "The artifact has no MoE block.", "at least one", "none")
    for name, block in converted.items():
        if block not in by_block:
            what = "A converted tensor belongs to a block that the manifest does not describe."
            result.add(f"{where}, tensor {name}", what, "one of its blocks", block)
        else:
            by_block[block].add(name)
    for block_name, one in blocks.items():
        compare_names(f"{where}: {block_name}", "tensor", by_block[block_name], one.tensor_names(), result)


def _accounting(artifact: Artifact, result: CheckResult) -> dict[str, Any] | None:
    words = artifact.manifest["tensors"]
    good = set(words) == {"converted", "copied", "dropped"}
    good = (
        good and isinstance(words["copied"], list) and all(isinstance(name, str) for name in words["copied"])
    )
    for kind in ("converted", "dropped"):
        good = (
            good and isinstance(words[kind], dict) and all(isinstance(v, str) for v in words[kind].values())
        )
    if not good:
        what = "The manifest does not account for the source's tensors."
        result.add(
            f"{names.MANIFEST}: tensors", what, "converted, copied and dropped", ", ".join(map(str, words))
        )
        return None
    return dict(words)


def _map_again(
    artifact: Artifact,
    blocks: Mapping[str, ExpertBlock],
    words: Mapping[str, Any],
    copied: Mapping[str, Place],
    config: Mapping[str, Any],
    result: CheckResult,
) -> None:
    known = {name: ref for block in blocks.values() for name, ref in source_tensors(block).items()}
    known |= {name: TensorRef(name, e.dtype, e.shape, 0, 0, 0) for name, (_, e) in copied.items()}
    block = next(iter(blocks.values()))
    # Of what was dropped only the names are recorded; one number for each expert fits in any block.
    unknown = (block.dtype, (block.num_experts, 1), 0, 0, 0)
    listed = (*words["converted"], *words["copied"], *words["dropped"])
    refs = {name: known.get(name) or TensorRef(name, *unknown) for name in listed}
    try:
        experts = map_experts(refs, config, artifact.manifest["source"].get("quantization_config"))
    except HqconvError as error:
        what = "The manifest's tensors and config.json contradict each other."
        result.add(f"{names.MANIFEST}: {error.where}", what, error.expected, f"{error.what}: {error.found}")
        return
    _compare_blocks(artifact, experts, "config.json and the tensors' names", result)


def source_tensors(block: ExpertBlock) -> dict[str, TensorRef]:
    """A block's source tensors by name, as the manifest describes them; file and offset mean nothing."""
    return {
        part.template.format(expert=e): TensorRef(
            part.template.format(expert=e), part.dtype, part.shape, 0, 0, 0
        )
        for parts in block.parts.values()
        for part in parts.values()
        for e in (range(1) if part.is_stacked else range(block.num_experts))
    }


def _compare_blocks(artifact: Artifact, experts: ExpertMap, origin: str, result: CheckResult) -> None:
    """The manifest's blocks with those of a mapping, fact by fact."""
    if artifact.manifest["family"] != experts.family:
        found = artifact.manifest["family"]
        result.add(f"{names.MANIFEST}: family", f"The family is not that of {origin}.", experts.family, found)
    mapped = {block.name: block for block in experts.blocks}
    for name in artifact.blocks:
        if name not in mapped:
            result.add(f"{names.MANIFEST}: {name}", f"A block is not in {origin}.", "absent", "present")
    for name, block in mapped.items():
        words = artifact.blocks.get(name)
        if words is None:
            expected = f"layer {block.layer}, {block.num_experts} experts"
            result.add(
                f"block {name}",
                f"A MoE block of {origin} is missing in the artifact.",
                expected,
                "no such block",
            )
            continue
        facts = _facts(block, artifact)
        found = {key: words[key] for key in facts}
        what = f"A block's fact is not that of {origin}."
        compare_words(f"{names.MANIFEST}: {name}", what, facts, found, result)


def _facts(block: ExpertBlock, artifact: Artifact) -> dict[str, Any]:
    """What the manifest must say of a mapped block."""
    facts = {key: getattr(block, attribute) for key, attribute in _FACTS.items()}
    facts["source_format"] = block.format.words()
    facts["source_parts"] = block.parts_words()
    with suppress(VerificationError):  # reported already
        schema, dtype = artifact.request.schema, artifact.param_dtype
        facts["conversion"] = conversion_of(block.format, schema, dtype)
    return facts


# --- against the source ------------------------------------------------------------------------------------


def check_source(
    artifact: Artifact,
    source: Checkpoint,
    copied: Mapping[str, Place],
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Source identity, its blocks and accounting, copied tensors byte for byte, and the other files."""
    _check_identity(artifact, source, result)
    try:
        experts = map_checkpoint(source)
    except HqconvError as error:
        what = f"The source cannot be mapped: {error.what}"
        result.add(f"source: {error.where}", what, error.expected, error.found)
        return
    _compare_blocks(artifact, experts, "the source", result)
    _compare_accounting(artifact, experts, result)
    _compare_copied(artifact, source, experts.copied, copied, pool, result)
    others = {
        path
        for path in artifact.manifest["files"]
        if path not in (names.CONFIG, names.INDEX) and not path.endswith(".safetensors")
    }
    compare_names("files copied from the source", "file", others, source.other_files, result)
    for path in sorted(others.intersection(source.other_files)):
        expected, found = sha256_of(source.root / path), artifact.manifest["files"][path]["sha256"]
        if expected != found:
            result.add(path, "A file is not the source's.", f"sha256 {expected}", found)


def _check_identity(artifact: Artifact, source: Checkpoint, result: CheckResult) -> None:
    """The source is the one that the manifest records; its name and folder do not matter."""
    words, what = artifact.manifest["source"], "The source is not the one that was converted."
    where = f"{names.MANIFEST}: source"
    if words.get("quantization_config") != source.quantization:
        texts = [json.dumps(one) for one in (source.quantization, words.get("quantization_config"))]
        result.add(f"{where}: quantization_config", what, *texts)
    if words.get("index_sha256") != source.index_sha256:
        result.add(f"{where}: index_sha256", what, words.get("index_sha256"), source.index_sha256)
    recorded = words.get("files")
    if not isinstance(recorded, list) or not all(isinstance(file, dict) for file in recorded):
        result.add(f"{where}: files", "The manifest does not record the source's files.", "a list", recorded)
        return
    found = {
        file.name: {"name": file.name, "size_bytes": file.size_bytes, "header_sha256": file.header_sha256}
        for file in source.files
    }
    expected = {str(file.get("name")): file for file in recorded}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            result.add(f"{where}, file {name}", what, expected.get(name), found.get(name))


def _compare_accounting(artifact: Artifact, experts: ExpertMap, result: CheckResult) -> None:
    words = artifact.manifest["tensors"]
    expected = {"converted": experts.converted, "copied": experts.copied, "dropped": experts.dropped}
    for kind, listed in expected.items():
        found = words.get(kind)
        if not isinstance(found, list if kind == "copied" else dict):
            continue  # reported by `_accounting`
        what = f"{names.MANIFEST}: tensors: {kind} (against the source)"
        compare_names(what, "tensor", [str(name) for name in found], listed, result)
    found = words.get("converted")
    for name, block in experts.converted.items():
        if isinstance(found, dict) and found.get(name, block) != block:
            where = f"{names.MANIFEST}: tensors: converted, tensor {name}"
            result.add(where, "A tensor was converted for another block.", block, found[name])


def _compare_copied(
    artifact: Artifact,
    source: Checkpoint,
    expected: Collection[str],
    copied: Mapping[str, Place],
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Dtype, shape and bytes of every copied tensor, in chunks; names are compared elsewhere."""
    tasks: list[tuple[str, int]] = []
    for name in expected:
        if name not in copied:
            result.add(
                f"tensor {name}", "A tensor of the source was not copied.", "in a model shard", "absent"
            )
            continue
        ref, (path, entry) = source.tensors[name], copied[name]
        if (ref.dtype, ref.shape) != (entry.dtype, entry.shape):
            found = f"{entry.dtype} {list(entry.shape)}"
            what = "A copied tensor has another dtype or shape than the source's."
            result.add(f"{path}, tensor {name}", what, f"{ref.dtype} {list(ref.shape)}", found)
        if ref.num_bytes == entry.end - entry.begin:
            tasks += [(name, start) for start in range(0, ref.num_bytes, CHUNK_BYTES)]

    def compare(task: tuple[str, int]) -> tuple[int, int] | HqconvError:
        name, start = task
        return _differing(artifact, source, source.tensors[name], copied[name], start)

    first: dict[str, int] = {}
    counts: dict[str, int] = {}
    for (name, start), outcome in zip(tasks, pool.map(compare, tasks), strict=True):
        if isinstance(outcome, HqconvError):
            result.add(
                f"tensor {name}", f"A copied tensor cannot be compared: {outcome.what}", "", outcome.found
            )
        elif outcome[0]:
            counts[name] = counts.get(name, 0) + outcome[0]
            first.setdefault(name, start + outcome[1])
    for name, count in counts.items():
        where = f"{copied[name][0]}, tensor {name}"
        found = f"{count} bytes differ, the first at byte {first[name]}"
        result.add(where, "A copied tensor is not the source's.", "the source's bytes", found)


def _differing(
    artifact: Artifact, source: Checkpoint, ref: TensorRef, place: Place, start: int
) -> tuple[int, int] | HqconvError:
    """How many bytes of a chunk differ, and the first of them."""
    size = min(CHUNK_BYTES, ref.num_bytes - start)
    ours, theirs = np.empty(size, np.uint8), np.empty(size, np.uint8)
    try:
        artifact.read(place[0], ours.data, place[1].begin + start)
        source.read_into(ref, theirs.data, start)
    except HqconvError as error:
        return error
    wrong = np.flatnonzero(ours != theirs)
    return len(wrong), int(wrong[0]) if len(wrong) else 0
