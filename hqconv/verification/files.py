"""The `files` check: manifest, files, headers and source against each other; no weight is decoded.

It works on an artifact that somebody else made: what should be there is recomputed from the manifest's facts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hqconv.artifact.opened import Artifact, Header
from hqconv.backends.layout import KernelForm, TensorForm
from hqconv.checkpoint.folder import Checkpoint
from hqconv.errors import VerificationError
from hqconv.experts.block import ExpertBlock
from hqconv.pipeline.writer import sha256_of
from hqconv.schemas import artifact as names
from hqconv.verification.accounting import (
    check_accounting,
    check_config,
    check_source,
    compare_names,
    compare_words,
    read_json,
)
from hqconv.verification.result import CheckResult

SUFFIX = ".safetensors"
T = TypeVar("T")


def check_files(artifact: Artifact, source: Checkpoint | None, num_threads: int) -> CheckResult:
    """Everything but the weights' values: sizes, digests, headers, names, layout, config, copied tensors.

    Without `source`, what only the source can tell is left out, and a note says so. Raises nothing for a
    damaged artifact: whatever is wrong is a finding.
    """
    result = CheckResult("files")
    with ThreadPoolExecutor(max(1, num_threads), "hqconv-verify") as pool:
        _check_disk(artifact, result, pool)
        _check_stray(artifact, result)
        headers = _read_headers(artifact, result)
        blocks = _blocks(artifact, result)
        _note_versions(artifact, result)
        if artifact.manifest["layout"] == names.KERNEL:
            _check_ranks(artifact, blocks, headers, result)
        shards = {path: header for path, header in headers.items() if "/" not in path}
        _check_shards(artifact, shards, result)
        inside = {
            name: (path, entry) for path, (entries, _) in shards.items() for name, entry in entries.items()
        }
        experts = _check_packed(artifact, blocks, inside, result)
        copied = {name: place for name, place in inside.items() if name not in experts}
        config = check_config(artifact, source, result)
        check_accounting(artifact, blocks, copied, config if source is None else None, result)
        if source is None:
            result.notes.append(
                "copied tensors and files were not compared with the source: it was not given"
            )
        else:
            check_source(artifact, source, copied, pool, result)
    return result


# --- the disk ----------------------------------------------------------------------------------------------


def is_plain(path: str) -> bool:
    """A path downwards from the artifact in its one spelling."""
    return path == PurePosixPath(path).as_posix() and not {"", ".", ".."}.intersection(path.split("/"))


def _check_disk(artifact: Artifact, result: CheckResult, pool: ThreadPoolExecutor) -> None:
    """Every file of the manifest is there with its size and digest."""
    present = []
    for path, words in artifact.manifest["files"].items():
        hidden = any(part.startswith(".") for part in path.split("/"))
        if not is_plain(path) or hidden or path == names.MANIFEST or path.endswith(names.PARTIAL):
            result.add(path, "The manifest lists a file that no artifact has.")
            continue
        on_disk = artifact.root / path
        if not on_disk.is_file():
            result.add(
                path, "A file of the manifest is missing.", f"{words['size_bytes']} bytes", "no such file"
            )
        elif on_disk.stat().st_size != words["size_bytes"]:
            result.add(path, "A file has another size.", words["size_bytes"], on_disk.stat().st_size)
        else:
            present.append(path)

    def digest(path: str) -> str:
        try:
            return sha256_of(artifact.root / path)
        except OSError as error:
            return f"unreadable: {error.strerror}"

    for path, found in zip(present, pool.map(digest, present), strict=True):
        expected = artifact.manifest["files"][path]["sha256"]
        if found != expected:
            result.add(
                path, "A file's bytes are not those the manifest records.", f"sha256 {expected}", found
            )


def _check_stray(artifact: Artifact, result: CheckResult) -> None:
    """Nothing lies in the folder that the manifest does not list; links to folders are not looked into."""
    listed = {names.MANIFEST, *artifact.manifest["files"]}
    for path in sorted(_walk(artifact.root)):
        inside = (
            any(file.startswith(f"{path}/") for file in listed) if (artifact.root / path).is_dir() else False
        )
        if path not in listed and not inside:
            result.add(path, "A file is not in the manifest.", "no such file", "present")


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(root).as_posix()


# --- the layout that the manifest's facts imply ------------------------------------------------------------


def _blocks(artifact: Artifact, result: CheckResult) -> dict[str, ExpertBlock]:
    """The manifest's blocks, as many as can be true."""
    blocks = {}
    for name in artifact.blocks:
        try:
            blocks[name] = artifact.expert_block(name)
        except VerificationError as error:
            result.add(error.where, error.what, error.expected, error.found)
    if blocks:
        what, fields = "The manifest does not spell out its schema.", artifact.schema.humming_fields()
        where = f"{names.MANIFEST}: weight_schema"
        compare_words(where, what, fields, artifact.manifest["weight_schema"], result)
    return blocks


def _note_versions(artifact: Artifact, result: CheckResult) -> None:
    """The layout is recomputed by the Humming that is installed, whichever it was made with."""
    made_with = artifact.manifest["humming_kernels_version"]
    with suppress(PackageNotFoundError):
        installed = version("humming-kernels")
        if made_with != installed:
            note = f"made with humming-kernels {made_with}, checked against the layout of {installed}"
            result.notes.append(note)


def _forms(of_block: Callable[[ExpertBlock], T], block: ExpertBlock, result: CheckResult) -> T | None:
    """Humming's layout of a block; None where Humming is not here (noted) or has none (a finding)."""
    try:
        return of_block(block)
    except ModuleNotFoundError:
        note = "rank files were compared with each other only: Humming cannot be imported"
        if note not in result.notes:
            result.notes.append(note)
    except VerificationError as error:
        result.add(error.where, error.what, error.expected, error.found)
    return None


def _read_headers(artifact: Artifact, result: CheckResult) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for path in artifact.manifest["files"]:
        if path.endswith(SUFFIX) and is_plain(path) and (artifact.root / path).is_file():
            try:
                headers[path] = artifact.header(path)
            except VerificationError as error:
                result.add(
                    path, "A safetensors file is damaged.", error.expected, f"{error.what}: {error.found}"
                )
    return headers


def _check_ranks(
    artifact: Artifact, blocks: Mapping[str, ExpertBlock], headers: Mapping[str, Header], result: CheckResult
) -> None:
    """Every rank has one file of every block, with the tensors and LayerConfigs that the facts imply."""
    expected_paths: set[str] = set()
    for block in blocks.values():
        grid, form = artifact.grid, _forms(artifact.kernel_forms, block, result)
        if form is not None:
            _check_gemm_words(artifact, block, form, result)
        for tp_rank, ep_rank in grid.ranks:
            path = names.rank_file(block.name, tp_rank, ep_rank)
            num_local = len(grid.local_experts(block.num_experts, ep_rank))
            expected_paths.add(path)
            if path not in artifact.manifest["files"]:
                result.add(path, "A rank has no file of a block.", "listed in the manifest", "not listed")
            elif path in headers:
                form = form if form is not None else _form_of_file(block.name, headers[path])
                _compare_with_form(path, headers[path], block.name, form, num_local, result)
    for path in artifact.manifest["files"]:
        if blocks and "/" in path and path.endswith(SUFFIX) and path not in expected_paths:
            what = "A weight file belongs to no rank and block of the manifest."
            result.add(path, what, "not listed", "listed")


def _form_of_file(block: str, header: Header) -> dict[str, KernelForm]:
    """Without Humming: the first rank's file, as what the others must look like."""
    forms = {}
    for gemm in names.GEMMS:
        prefix = f"{block}.{gemm}_"
        tensors = {
            name.removeprefix(prefix): TensorForm(entry.dtype, entry.shape[1:], 0)
            for name, entry in header[0].items()
            if name.startswith(prefix)
        }
        words: Any = None
        with suppress(KeyError, ValueError, RecursionError):  # reported where the file is compared
            words = json.loads(header[1][gemm])
        forms[gemm] = KernelForm(tensors, words if isinstance(words, dict) else {}, {})
    return forms


def _check_gemm_words(
    artifact: Artifact, block: ExpertBlock, form: Mapping[str, KernelForm], result: CheckResult
) -> None:
    sizes = ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")
    for gemm, one in form.items():
        expected = {**{key: one.config[key] for key in sizes}, **one.flags}
        found = artifact.blocks[block.name].get(gemm)
        if isinstance(found, dict) and isinstance(found.get("flags"), dict):
            found = {**found, **found["flags"]}
            del found["flags"]
        where = f"{names.MANIFEST}: {block.name}: {gemm}"
        compare_words(where, "The manifest's words on a GEMM are not Humming's.", expected, found, result)


def _compare_with_form(
    path: str, header: Header, block: str, form: Mapping[str, KernelForm], num_local: int, result: CheckResult
) -> None:
    expected = {
        f"{block}.{gemm}_{name}": (tensor.dtype, (num_local, *tensor.shape))
        for gemm, one in form.items()
        for name, tensor in one.tensors.items()
    }
    _compare_tensors(path, header, expected, result)
    if header[1].get("format") != "pt":
        result.add(path, "The file's metadata does not name its format.", "pt", header[1].get("format"))
    for gemm, one in form.items():
        where = f"{path}, metadata {gemm}"
        try:
            words = json.loads(header[1][gemm])
        except (KeyError, ValueError, RecursionError) as error:
            result.add(where, "The file holds no LayerConfig.", "a JSON object", repr(error))
            continue
        what = "A LayerConfig is not the one of the manifest's facts."
        compare_words(where, what, {**one.config, "num_experts": num_local}, words, result)


def _compare_tensors(
    path: str, header: Header, expected: Mapping[str, tuple[str, tuple[int, ...]]], result: CheckResult
) -> None:
    entries = header[0]
    compare_names(path, "tensor", entries, expected, result)
    for name, (dtype, shape) in expected.items():
        if name in entries and (entries[name].dtype, entries[name].shape) != (dtype, shape):
            found = f"{entries[name].dtype} {list(entries[name].shape)}"
            where = f"{path}, tensor {name}"
            result.add(where, "A tensor has another dtype or shape.", f"{dtype} {list(shape)}", found)


def _check_packed(
    artifact: Artifact,
    blocks: Mapping[str, ExpertBlock],
    inside: Mapping[str, tuple[str, Any]],
    result: CheckResult,
) -> set[str]:
    """The experts' packed tensors of the checkpoint layout; returns their names (none in the kernel layout)."""
    found: set[str] = set()
    if artifact.manifest["layout"] != names.CHECKPOINT:
        return found
    for block in blocks.values():
        prefix, form = f"{block.name}.", _forms(artifact.packed_forms, block, result)
        of_block = {name for name in inside if name.startswith(prefix) and name[len(prefix) :][:1].isdigit()}
        found |= of_block
        if form is None:
            continue
        expected = {
            f"{block.module(expert, role)}.{name}": (tensor.dtype, tensor.shape)
            for expert in range(block.num_experts)
            for role in block.roles
            for name, tensor in form[role].items()
        }
        compare_names(f"block {block.name}", "tensor", of_block, expected, result)
        for name in sorted(of_block & expected.keys()):
            path, entry = inside[name]
            _compare_tensors(path, ({name: entry}, {}), {name: expected[name]}, result)
    return found


# --- index and config --------------------------------------------------------------------------------------


def _check_shards(artifact: Artifact, shards: Mapping[str, Header], result: CheckResult) -> None:
    """Ordinary shards are numbered without gaps, and the index names exactly their tensors."""
    listed = sorted(path for path in artifact.manifest["files"] if "/" not in path and path.endswith(SUFFIX))
    total = len(listed)
    expected = (
        [names.shard_name(i, total) for i in range(1, total + 1)] if total != 1 else ["model.safetensors"]
    )
    compare_names(names.MANIFEST, "file", listed, expected, result)
    if names.INDEX not in artifact.manifest["files"]:
        if total > 1:
            result.add(
                names.INDEX, "There is no index of the shards.", "listed in the manifest", "not listed"
            )
        return
    index = read_json(artifact.root / names.INDEX, result)
    if index is None:
        return
    found = index.get("weight_map")
    weight_map = {name: path for path, (entries, _) in shards.items() for name in entries}
    what = "The index and the shards disagree."
    compare_words(f"{names.INDEX}: weight_map", what, weight_map, found, result)
    size = sum(entry.end - entry.begin for entries, _ in shards.values() for entry in entries.values())
    compare_words(f"{names.INDEX}: metadata", what, {"total_size": size}, index.get("metadata"), result)
