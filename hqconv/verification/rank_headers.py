"""The `files` check of headers: rank files and packed experts against the layout that the manifest implies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from hqconv.artifact.reader import Artifact, Header
from hqconv.errors import VerificationError
from hqconv.kernel_layout.transform import KernelForm
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorSpec
from hqconv.verification.check_input_scales import is_static, static_names
from hqconv.verification.result import CheckResult, compare_dicts, compare_names

SUFFIX = ".safetensors"
T = TypeVar("T")
Stored = tuple[str, tuple[int, ...]]  # dtype, shape


def _forms(of_layer: Callable[[MoeLayer], T], layer: MoeLayer, result: CheckResult) -> T | None:
    """Layout of a layer by Humming; None without Humming (noted), or if it has no such layout (a finding)."""
    try:
        return of_layer(layer)
    except ModuleNotFoundError:
        note = "rank files were compared with each other only: Humming cannot be imported"
        if note not in result.notes:
            result.notes.append(note)
    except VerificationError as error:
        result.add(error.where, error.what, error.expected, error.found)
    return None


def check_ranks(
    artifact: Artifact, layers: Mapping[str, MoeLayer], headers: Mapping[str, Header], result: CheckResult
) -> None:
    """Check that every rank has one file of every layer, with the tensors and LayerConfigs that the facts imply."""
    expected_paths: set[str] = set()
    for layer in layers.values():
        grid, form = artifact.grid, _forms(artifact.kernel_forms, layer, result)
        if form is not None:
            _check_gemm_metadata(artifact, layer, form, result)
        for tp_rank, ep_rank in grid.ranks:
            path = names.rank_file(layer.name, tp_rank, ep_rank)
            num_local = len(grid.local_experts(layer.num_experts, ep_rank))
            expected_paths.add(path)
            if path not in artifact.manifest.files:
                result.add(path, "A rank has no file of a layer.", "listed in the manifest", "not listed")
            elif path in headers:
                form = form if form is not None else _form_of_file(layer.name, headers[path])
                extra = dict.fromkeys(static_names(artifact, layer.name), ("F32", (1,)))
                _compare_with_form(path, headers[path], layer.name, form, num_local, extra, result)
                _check_rank(path, headers[path][1], artifact.manifest.digest is not None, result)
    for path in artifact.manifest.files:
        if layers and "/" in path and path.endswith(SUFFIX) and path not in expected_paths:
            what = "A weight file belongs to no rank and layer of the manifest."
            result.add(path, what, "not listed", "listed")


def _form_of_file(layer: str, header: Header) -> dict[str, KernelForm]:
    """Kernel forms of the first rank's file, which the other files must match if there is no Humming."""
    forms = {}
    for gemm in names.GEMMS:
        prefix = f"{layer}.{gemm}_"
        tensors = {
            name.removeprefix(prefix): TensorSpec(name, ref.dtype, ref.shape[1:])
            for name, ref in header[0].items()
            if name.startswith(prefix) and not names.is_input_scale(name)
        }
        document: Any = None
        with suppress(KeyError, ValueError, RecursionError):  # reported by the comparison of the file
            document = json.loads(header[1][gemm])
        forms[gemm] = KernelForm(tensors, document if isinstance(document, dict) else {}, {})
    return forms


def _check_gemm_metadata(
    artifact: Artifact, layer: MoeLayer, form: Mapping[str, KernelForm], result: CheckResult
) -> None:
    sizes = ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k")
    for gemm, one in form.items():
        expected = {**{key: one.config[key] for key in sizes}, **one.flags}
        entry = artifact.layers[layer.name].gemm(gemm)
        found = {} if entry is None else {**entry.to_dict(), **entry.flags}
        found.pop("flags", None)
        if is_static(artifact, layer.name):  # its scale is checked separately
            found.pop(names.INPUT_SCALE, None)
        where = f"{names.MANIFEST}: {layer.name}: {gemm}"
        compare_dicts(where, "The manifest's words on a GEMM are not Humming's.", expected, found, result)


def _compare_with_form(
    path: str,
    header: Header,
    layer: str,
    form: Mapping[str, KernelForm],
    num_local: int,
    extra: Mapping[str, Stored],
    result: CheckResult,
) -> None:
    """Compare a file's header with a form; `extra`: dtype and shape of tensors that the form does not know."""
    expected: dict[str, Stored] = {
        f"{layer}.{gemm}_{name}": (tensor.dtype, (num_local, *tensor.shape))
        for gemm, one in form.items()
        for name, tensor in one.tensors.items()
    }
    _compare_tensors(path, header, {**expected, **extra}, result)
    if header[1].get("format") != "pt":
        result.add(path, "The file's metadata does not name its format.", "pt", header[1].get("format"))
    for gemm, one in form.items():
        where = f"{path}, metadata {gemm}"
        try:
            document = json.loads(header[1][gemm])
        except (KeyError, ValueError, RecursionError) as error:
            result.add(where, "The file holds no layer config.", "a JSON object", repr(error))
            continue
        what = "A layer config is not the one of the manifest's facts."
        compare_dicts(where, what, {**one.config, "num_experts": num_local}, document, result)


def _check_rank(path: str, metadata: Mapping[str, str], says: bool, result: CheckResult) -> None:
    """Check the rank that a file's metadata names. `says`: true for manifest versions whose files name it."""
    where, own = f"{path}, metadata rank", path.split("/")[-2]
    if (other := names.other_rank(path, metadata)) is not None:
        result.add(where, "This is the file of another rank.", own, other)
    elif says and "rank" not in metadata:
        result.add(where, "The file does not say which rank's it is.", own, "nothing")


def _compare_tensors(path: str, header: Header, expected: Mapping[str, Stored], result: CheckResult) -> None:
    entries = header[0]
    compare_names(path, "tensor", entries, expected, result)
    for name, (dtype, shape) in expected.items():
        if name in entries and (entries[name].dtype, entries[name].shape) != (dtype, shape):
            found = f"{entries[name].dtype} {list(entries[name].shape)}"
            where = f"{path}, tensor {name}"
            result.add(where, "A tensor has another dtype or shape.", f"{dtype} {list(shape)}", found)


def check_packed(
    artifact: Artifact, layers: Mapping[str, MoeLayer], inside: Mapping[str, tuple[str, Any]], result: CheckResult
) -> set[str]:
    """Check the experts' packed tensors of the checkpoint layout; return their names (none in the kernel layout)."""
    found: set[str] = set()
    if artifact.manifest.is_kernel:
        return found
    for layer in layers.values():
        prefix, form = f"{layer.name}.", _forms(artifact.packed_forms, layer, result)
        of_layer = {name for name in inside if name.startswith(prefix) and name[len(prefix) :][:1].isdigit()}
        found |= of_layer
        if form is None:
            continue
        expected = {
            f"{layer.module(expert, role)}.{name}": (tensor.dtype, tensor.shape)
            for expert in range(layer.num_experts)
            for role in layer.roles
            for name, tensor in form[role].items()
        }
        compare_names(f"layer {layer.name}", "tensor", of_layer, expected, result)
        for name in sorted(of_layer & expected.keys()):
            path, entry = inside[name]
            _compare_tensors(path, ({name: entry}, {}), {name: expected[name]}, result)
    return found
