"""Another artifact for a server that runs: comparison with the served one before any weight is replaced. No torch.

Everything must be equal but the values: kernels, CUDA graphs and the server's own settings stay as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import HqconvError, InputError, RequestError, VerificationError
from hqconv.io.safetensors_header import read_header
from hqconv.schemas import artifact_names as names
from hqconv.schemas.tensors import TensorRef
from hqconv.serving.artifact_view import ArtifactView
from hqconv.serving.rank_file import RankFile, check_sha256, open_rank_file

# Keys of config.json that say who wrote it, and nothing about the model.
_REMARKS = ("_name_or_path", "transformers_version")
_NUM_THREADS = 8


@dataclass(frozen=True)
class Replacement:
    """Files of an artifact that were checked against the served one. files: rank file of each layer, by its name."""

    view: ArtifactView
    files: dict[str, RankFile]


def check_replacement(
    served: ArtifactView, view: ArtifactView, held: Iterable[RankFile], *, cache_dir: str | None, digests: bool
) -> Replacement:
    """Check that an artifact can take the place of the served one in the layers that hold the rank files `held`.

    Compares grid, dtype, target, layers and their numbers, config.json, tensors and kernel configs of every file; with
    `digests` also every byte. Raises RequestError where the artifacts differ in more than values,
    VerificationError where a file is missing, cut off or damaged, and the errors of `ArtifactLocation.fetch`.
    """
    held = list(held)
    check_views(served, view)
    shards = [path for path in view.others if is_shard(path)]
    paths = view.location.fetch_all([*(file.name for file in held), *shards], cache_dir)
    files = {file.layer: open_rank_file(view, paths[file.name], file.layer, file.name) for file in held}
    for file in held:
        _check_rank_file(view, file, files[file.layer])
    check_config(served, view)
    _check_shards(served, view, {path: paths[path] for path in shards}, cache_dir)
    if digests:
        listed = {**view.files, **view.others}
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            list(pool.map(lambda path: check_sha256(paths[path], path, listed[path][1]), paths))
    return Replacement(view, files)


def check_views(served: ArtifactView, view: ArtifactView) -> None:
    """Compare ranks, schemas, target, layers and their numbers. Raises RequestError for a difference."""
    facts: dict[str, tuple[object, object]] = {
        "ranks": (served.grid, view.grid),
        "schemas and target": (served.kernel_spec, view.kernel_spec),
        "layers": (list(served.layers), list(view.layers)),
        "layers that were left as they are": (served.left, view.left),
    }
    for name in served.layers.keys() & view.layers.keys():
        for field in vars(served.layers[name]):
            facts[f"{name}: {field}"] = (getattr(served.layers[name], field), getattr(view.layers[name], field))
    _check_equal(view, facts)


def _check_rank_file(view: ArtifactView, held: RankFile, file: RankFile) -> None:
    facts: dict[str, tuple[object, object]] = {
        f"{file.name}: tensors": (_forms(held.tensors.values()), _forms(file.tensors.values()))
    }
    for gemm, config in held.configs.items():
        facts[f"{file.name}: kernel config of {gemm}"] = (config, file.configs[gemm])
    _check_equal(view, facts)


def check_config(served: ArtifactView, view: ArtifactView) -> None:
    """Compare config.json, the text of which may differ in remarks. Raises RequestError for a difference."""
    if served.others.get(names.CONFIG) == view.others.get(names.CONFIG):
        return
    mine, other = (_config(one) for one in (served, view))
    keys = sorted((mine.keys() | other.keys()) - set(_REMARKS))
    _check_equal(view, {f"{names.CONFIG}: {key}": (mine.get(key), other.get(key)) for key in keys})


def _config(view: ArtifactView) -> dict[str, Any]:
    path = view.location.fetch(names.CONFIG)
    check_sha256(path, names.CONFIG, view.others[names.CONFIG][1])
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _check_shards(served: ArtifactView, view: ArtifactView, paths: dict[str, Path], cache_dir: str | None) -> None:
    """Compare the tensors outside of the experts, by their headers, if the served artifact is still there."""
    found = dict(_tensors(view, paths))
    before = [path for path in served.others if is_shard(path)]
    try:
        held = dict(_tensors(served, served.location.fetch_all(before, cache_dir)))
    except HqconvError:  # deleted or replaced meanwhile
        return
    missing, more = sorted(held.keys() - found.keys()), sorted(found.keys() - held.keys())
    facts: dict[str, tuple[object, object]] = {"tensors that only one has": (missing, more)}
    facts |= {f"tensor {name}": (held[name], found[name]) for name in held.keys() & found.keys()}
    _check_equal(view, facts)


def _tensors(view: ArtifactView, paths: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Tensors of shards with their dtype and shape. Raises VerificationError for a damaged or foreign file."""
    for name, path in paths.items():
        try:
            if (size_bytes := path.stat().st_size) != view.others[name][0]:
                raise _damaged(view, name, f"{view.others[name][0]} bytes", f"{size_bytes} bytes")
            entries, _, _ = read_header(path)
        except (OSError, InputError) as error:
            raise _damaged(view, name, "a readable safetensors file", error) from error
        for ref in entries.values():
            yield ref.name, _form(ref)


def is_shard(path: str) -> bool:
    """Return whether a file of an artifact holds tensors of other layers."""
    return "/" not in path and path.endswith(".safetensors") and path != names.IMPORTANCE


def _forms(refs: Iterable[TensorRef]) -> list[str]:
    return sorted(f"{ref.name}: {_form(ref)}" for ref in refs)


def _form(ref: TensorRef) -> str:
    return f"{ref.dtype} {list(ref.shape)}"


def _check_equal(view: ArtifactView, facts: dict[str, tuple[object, object]]) -> None:
    for what, (expected, found) in facts.items():
        if expected != found:
            raise RequestError(
                "The artifact differs from the served one in more than the values of weights.",
                where=f"{view.location.name}: {what}",
                expected=expected,
                found=found,
                remedy="Start a server with it. This server has its weights of before.",
            )


def _damaged(view: ArtifactView, name: str, expected: str, found: object) -> VerificationError:
    return VerificationError(
        "A file of the artifact is damaged, or belongs to another one.",
        where=f"{view.location.name}: {name}",
        expected=expected,
        found=found,
        remedy="Copy the artifact again from where it is whole. This server has its weights of before.",
    )


def not_replaced(name: str, error: str) -> HqconvError:
    """Error for weights that could not be loaded, after the old ones were put back."""
    return VerificationError(
        "The new weights could not be loaded; the server has its weights of before again.",
        where=name,
        found=error,
        remedy="Copy the artifact again from where it is whole, and load it again.",
    )


def not_on_base(root: Path, name: str) -> HqconvError:
    """Error for parameters that are not those of a delta's base: after a deep sleep, say."""
    return RequestError(
        "The server's parameters are not those on which the delta belongs.",
        where=str(root),
        expected=f"the bytes of {name}",
        found="others",
        remedy="After a deep sleep call `reload_weights` without a path first, then with the delta.",
    )


def half_replaced(name: str, error: str, again: str) -> HqconvError:
    """Error for weights that could not be loaded, where the old ones cannot be put back either."""
    return VerificationError(
        "This server must not serve any more: its weights are part old, part new.",
        where=name,
        expected="the new weights, or again the old ones",
        found=f"{error}; then, for the old ones: {again}",
        remedy="Stop the server and start it with a whole artifact.",
    )


def other_rank_failed(name: str, error: str) -> HqconvError:
    """Error of a rank that could load its weights while another could not."""
    return VerificationError(
        "Another rank of the server cannot load the artifact, so that no rank does.",
        where=name,
        found=error,
        remedy="Mend the artifact as the other rank's error says. This server has its weights of before.",
    )


def wants_digests() -> bool:
    """Return whether HQCONV_VERIFY asks for the digests of all files."""
    return os.environ.get("HQCONV_VERIFY") == "1"
