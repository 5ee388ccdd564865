"""The `files` check of what an artifact takes unchanged: the source's identity, copied tensors, other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from hqconv.artifact.manifest import ManifestSource
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError, NetworkError, VerificationError
from hqconv.io.file_access import sha256_of
from hqconv.layout_decoder.codes import Array
from hqconv.models.source_protocol import Source
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import torch_dtype
from hqconv.schemas.tensors import TensorRef
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_json
from hqconv.verification.gguf_reference import PublishedModel, is_role
from hqconv.verification.result import OTHER_SOURCE, CheckResult, Finding

CHUNK_BYTES = 8 << 20
_NOT_CONVERTED = "The source is not the one that was converted."


def check_source_files(
    artifact: Artifact, source: Source, pool: ThreadPoolExecutor, result: CheckResult
) -> None:
    """Check the recorded digests of the source's files, every copied tensor byte for byte, and the copied files."""
    another = other_source(artifact.manifest.source, source)
    if another is not None:
        result.put_first(another)
    _check_identity(artifact.manifest.source, source, pool, result)
    stored = source.stored_model
    model = None if stored is None else PublishedModel(stored, source.config)
    _compare_copied(artifact, source, model, pool, result)
    if model is not None:
        _check_made_config(artifact, model, result)
        _check_gguf_roles(artifact, result)
    _compare_other_files(artifact, source, result)


def other_source(recorded: ManifestSource, source: Source) -> Finding | None:
    """Return the finding for a source that has none of the recorded files; None if it has one of them."""
    found = {file.name: (file.size_bytes, file.header_sha256) for file in source.files}
    for file in recorded.files:
        if found.get(file.name) == (file.size_bytes, file.header_sha256):
            return None
    expected_bytes = sum(file.size_bytes for file in recorded.files)
    found_bytes = sum(file.size_bytes for file in source.files)
    expected_text = f"{recorded.name}: {len(recorded.files)} weight files, {expected_bytes} bytes"
    name = source.repo_id or source.name
    found_text = f"{name}: {len(source.files)} weight files, {found_bytes} bytes"
    return Finding("--source", OTHER_SOURCE, expected_text, found_text)


def _check_identity(
    recorded: ManifestSource, source: Source, pool: ThreadPoolExecutor, result: CheckResult
) -> None:
    """Compare the bytes of the source's files for which the manifest has digests; headers are compared elsewhere."""
    present = {file.name for file in source.files}
    listed = []
    for file in recorded.files:
        for sha256 in dict.fromkeys((file.sha256, file.hub_sha256)):
            if file.name in present and sha256 is not None:
                listed.append((file.name, sha256))
    digests = pool.map(lambda name: _digest_of(source, name), [name for name, _ in listed])
    for (name, sha256), digest in zip(listed, digests, strict=True):
        if sha256 != digest:
            where = f"{names.MANIFEST}: source, file {name}"
            result.add(where, _NOT_CONVERTED, f"sha256 {sha256}", f"sha256 {digest}")


def _digest_of(source: Source, name: str) -> str:
    """Return a file's SHA-256: of the local file, else as the Hub lists it, else of bytes read by ranges."""
    if source.is_here(name) or source.listing is None:
        return sha256_of(source.root / name)
    return source.listing.digests.get(name) or source.listing.sha256(name)


# --- copied tensors ----------------------------------------------------------------------------------------


def _compare_copied(
    artifact: Artifact,
    source: Source,
    model: PublishedModel | None,
    pool: ThreadPoolExecutor,
    result: CheckResult,
) -> None:
    """Compare dtype, shape and bytes of every copied tensor; missing and extra names are differences of structure.

    model: of GGUF files, whose tensors no artifact has as they are: the reference's are compared, and each stored
    tensor beside the experts must be in one of them, or be left out with reason.
    """
    places: dict[str, tuple[str, TensorRef]] = {}
    for path in artifact.manifest.files:
        if artifact.is_shard(path):
            with suppress(VerificationError):  # a finding of the headers' check
                places |= {name: (path, ref) for name, ref in artifact.header(path)[0].items()}
    copied = {name: places[name] for name in artifact.manifest.tensors.copied if name in places}
    compared = sorted(copied.keys() & source.tensors.keys())
    by_size = sorted(compared, key=lambda name: -copied[name][1].num_bytes)
    faults = pool.map(
        lambda name: _difference(artifact, source, model, name, *copied[name]), by_size
    )
    for name, fault in sorted(zip(by_size, faults, strict=True)):
        if fault is not None:
            result.add(f"{copied[name][0]}, tensor {name}", *fault)
    if model is not None:
        _check_nothing_lost(artifact, model, compared, result)


def _check_nothing_lost(
    artifact: Artifact, model: PublishedModel, compared: list[str], result: CheckResult
) -> None:
    used = {part.name for name in compared for part in model.parts(name)}
    tensors = artifact.manifest.tensors
    accounted = {*used, *tensors.converted, *tensors.dropped}
    for name, ref in model.stored.tensors.items():
        is_experts = "_exps." in name
        is_dropped = ref.name in tensors.dropped
        is_lost = is_dropped and not model.may_be_left_out(name) and not is_experts
        if is_lost or ref.name not in accounted:
            what = "A tensor of the GGUF files is in no tensor of the artifact."
            found = tensors.dropped.get(ref.name, "absent")
            result.add(f"source: {ref.name}", what, "in a model shard", found)


def _difference(
    artifact: Artifact,
    source: Source,
    model: PublishedModel | None,
    name: str,
    path: str,
    entry: TensorRef,
) -> tuple[str, str, str] | None:
    """Return the finding about a copied tensor, with the expected and found texts; None for one that is right."""
    ref = source.tensors[name]
    if model is not None and not model.parts(name):
        return "A tensor is in no GGUF file.", "one with its values", "none"
    dtype, shape = (ref.dtype, ref.shape) if model is None else model.form(name)
    if (dtype, shape) != (entry.dtype, entry.shape):
        what = "A copied tensor has another dtype or shape than the source's."
        return what, f"{dtype} {list(shape)}", f"{entry.dtype} {list(entry.shape)}"
    chunks = _source_bytes(source, ref)
    if model is not None:
        chunks = _published_bytes(model, ref.name, dtype)
    start = num_wrong = first_wrong = 0
    try:
        for expected in chunks:
            found = np.empty(len(expected), np.uint8)
            artifact.read(path, found.data, entry.offset_bytes + start)
            wrong = np.flatnonzero(found != expected)
            if len(wrong) and not num_wrong:
                first_wrong = start + int(wrong[0])
            num_wrong += len(wrong)
            start += len(expected)
    except NetworkError:
        raise
    except HqconvError as error:
        return f"A copied tensor cannot be compared: {error.what}", "", str(error.found)
    if not num_wrong:
        return None
    text = f"{num_wrong} bytes differ, the first at byte {first_wrong}"
    return "A copied tensor is not the source's.", "the source's bytes", text


def _source_bytes(source: Source, ref: TensorRef) -> Iterator[Array]:
    for start in range(0, ref.num_bytes, CHUNK_BYTES):
        data = np.empty(min(CHUNK_BYTES, ref.num_bytes - start), np.uint8)
        source.read_into(ref, data.data, start)
        yield data


def _published_bytes(model: PublishedModel, name: str, dtype: str) -> Iterator[Array]:
    for values in model.values(name):
        tensor = torch.from_numpy(values).to(torch_dtype(dtype))
        yield tensor.view(torch.uint8).numpy().reshape(-1)


def _check_made_config(artifact: Artifact, model: PublishedModel, result: CheckResult) -> None:
    """Check a config.json that was made of a GGUF file's metadata."""
    config = read_json(artifact.fetched(names.CONFIG), MAX_LIST_BYTES)
    config["rope_scaling.factor"] = (config.get("rope_scaling") or {}).get("factor")
    for key, expected in {} if model.stored.has_config else model.config().items():
        found = config.get(key, expected)
        pair = (expected, found)
        if isinstance(expected, float) and isinstance(found, float):
            pair = (float(np.float32(expected)), float(np.float32(found)))
        if pair[0] != pair[1]:
            what = "The config is not that of the GGUF files' metadata."
            result.add(f"{names.CONFIG}: {key}", what, expected, found)


def _check_gguf_roles(artifact: Artifact, result: CheckResult) -> None:
    """Check that gate, up and down are the GGUF tensors of these names."""
    for name in artifact.layers:
        with suppress(VerificationError):  # a finding of the structure's check
            for role, parts in artifact.moe_layer(name).parts.items():
                template = parts["weight"].template
                if ".gguf:" in template and not is_role(role, template, parts["weight"].view.index):
                    where = f"{names.MANIFEST}: {name}: source_parts: {role}"
                    what = "A projection is another tensor of the GGUF files."
                    result.add(where, what, role, template)


# --- other files -------------------------------------------------------------------------------------------


def _compare_other_files(artifact: Artifact, source: Source, result: CheckResult) -> None:
    """Compare the files beside the weights, e.g. the tokenizer's; those made of GGUF metadata are not made again."""
    own = (names.CONFIG, names.INDEX, names.CARD, names.SUMS)
    listed: Mapping[str, object] = artifact.manifest.files
    others = {path for path in listed if path not in own and Path(path).suffix != ".safetensors"}
    others -= set(source.made.names)
    theirs = set(source.other_files)
    for path in sorted(theirs - others):
        result.add(path, "A file of the source was not copied.", "in the manifest", "absent")
    for path in sorted(others - theirs):
        result.add(path, "A copied file is not the source's.", "absent", "in the manifest")
    source.fetch(sorted(others & theirs))
    for path in sorted(others & theirs):
        expected, found = sha256_of(source.root / path), artifact.manifest.files[path].sha256
        if expected != found:
            result.add(path, "A file is not the source's.", f"sha256 {expected}", found)
