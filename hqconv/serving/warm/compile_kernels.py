"""`hqconv warm`: compilation of the kernels that a server of an artifact needs, on any machine with the CUDA compiler.

Loads no torch before it is called.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.errors import OutputError, RequestError, plural
from hqconv.io.durable_files import output_errors, write_whole
from hqconv.schemas import artifact_names as names
from hqconv.serving.warm.gpus import Gpu, choose_gpu
from hqconv.serving.warm.kernel_store import (
    FORMAT_VERSION,
    MANIFEST,
    STORED,
    VARIABLE,
    UnusableError,
    check_signature,
    folder_beside,
    read_kernel,
    read_store_manifest,
    signed,
    tuning_tables,
)

if TYPE_CHECKING:
    from hqconv.artifact.reader import Artifact
    from hqconv.kernel_layout.kernel_sources import ComputeSettings, KernelSource
    from hqconv.schemas.activation import Activation

_LOG = logging.getLogger(__name__)


def warm(
    out: str | Path,
    *,
    gpu: str | None = None,
    tp: int = 1,
    ep: int = 1,
    quantization: str | None = None,
    moe_backend: str | None = None,
    kernels: str | Path | None = None,
    jobs: int | None = None,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compile the kernels that vLLM requests of Humming when it serves a model. No GPU needed.

    out: an artifact in the kernel layout, whose kernels go to a folder beside it; or any checkpoint that vLLM serves
    with Humming by itself, a folder or a Hub repo, whose kernels go into Humming's cache (HUMMING_CACHE_DIR): vLLM must
    be installed, and be the server's installation. No weights are read. gpu: the server's: a name such as h200 or l40s,
    or a JSON file of facts; None: the one here. tp, ep, quantization, moe_backend: of the server of a checkpoint: TP
    ranks, EP ranks and vLLM's options of these names; an artifact has its own. kernels: the folder of an artifact's;
    None is `OUT-kernels`. jobs: compilers at once; None: as many as processors. announce: callback with a line about
    the next step. As vLLM does, it heeds VLLM_HUMMING_MOE_GEMM_TYPE, VLLM_HUMMING_USE_F16_ACCUM and
    VLLM_BATCH_INVARIANT. Kernels of the same compiler that are there stay.

    Returns a document: the folder, the GPU, and counts. Raises RequestError for other ranks than an artifact's, another
    GPU than its target's, a checkpoint that vLLM does not serve with Humming, or without a compiler; VerificationError
    of a damaged artifact; OutputError, also where others can write into Humming's cache.
    """
    from hqconv.artifact.reader import Artifact

    started = time.monotonic()
    announce = announce or (lambda _: None)
    num_jobs = (
        jobs
        or (os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count())
        or 1
    )
    if _is_checkpoint(Path(out)):
        from hqconv.serving.vllm.stock_checkpoint import warm_checkpoint

        if kernels is not None:
            what, remedy = (
                "A checkpoint's kernels go into Humming's cache.",
                "Set HUMMING_CACHE_DIR instead.",
            )
            raise RequestError(what, where="--kernels", found=str(kernels), remedy=remedy)
        server = {"tp": tp, "ep": ep, "quantization": quantization, "moe_backend": moe_backend}
        return warm_checkpoint(str(out), _prepared(gpu, None), server, num_jobs, announce)
    with Artifact(Path(out), is_sealed=True) as artifact:
        _check_ranks(artifact, tp, ep, quantization or moe_backend)
        folder = _check_folder(
            Path(out), folder_beside(Path(out)) if kernels is None else Path(kernels)
        )
        chosen = _prepared(gpu, artifact.manifest.layer_spec.target.sm_version)
        counts = _warm(artifact, chosen, folder, num_jobs, announce)
    variable = f"{VARIABLE}={'1' if kernels is None else folder.absolute()}"
    told = {"folder": str(folder), "variable": variable, "seconds": time.monotonic() - started}
    return {"kind": "warm", **told, **counts}


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is no artifact in the kernel layout, but a checkpoint that vLLM may serve by itself."""
    from hqconv.artifact.manifest import read_manifest
    from hqconv.io.hub import is_repo_id

    if (path / names.MANIFEST).exists():
        return not read_manifest(path).is_kernel
    return (path / "config.json").exists() or (not path.exists() and is_repo_id(str(path)))


def _check_ranks(artifact: Artifact, tp: int, ep: int, method: str | None) -> None:
    grid = artifact.grid
    if (tp, ep) not in ((1, 1), (grid.tp, grid.ep)) or method is not None:
        raise RequestError(
            "An artifact has its own ranks and schema.",
            where=str(artifact.root),
            expected=f"no --tp, --ep, --quantization, --moe-backend: its kernels are for tp {grid.tp}, ep {grid.ep}",
            found=f"tp {tp}, ep {ep}" if method is None else method,
        )


def _prepared(gpu: str | None, sm_version: int | None) -> Gpu:
    """Import Humming and return the GPU to compile for; of any architecture where `sm_version` is None."""
    import torch

    from hqconv.kernel_layout.kernel_sources import current_device

    if (
        not torch.cuda.is_available()
    ):  # on import Humming would start a compiler for what only a GPU needs
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    current_device()
    return choose_gpu(gpu, sm_version)


def _check_folder(out: Path, folder: Path) -> Path:
    """Refuse a path that holds anything but kernels, or lies in the artifact."""
    with output_errors(folder):
        if folder.resolve().is_relative_to(out.resolve()):
            raise OutputError(
                "The kernels would lie inside the artifact.",
                where=str(folder),
                remedy="Give a folder beside it.",
            )
        there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    stray = next((name for name in there if not STORED.fullmatch(name)), None)
    if stray is not None:
        raise OutputError(
            "The folder for the kernels holds something else.",
            where=str(folder),
            expected="no such folder, or one that `hqconv warm` made",
            found=stray,
            remedy="Give another folder with --kernels.",
        )
    return folder


def _warm(
    artifact: Artifact, gpu: Gpu, folder: Path, jobs: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    from hqconv.kernel_layout.kernel_sources import identity, standing_in, toolkit
    from hqconv.serving.vllm.kernel_requests import compute_settings

    settings = compute_settings(artifact.grid.ep > 1)
    with standing_in(gpu.facts()), toolkit():
        agreed = identity(gpu.sm_version)
        sources, unknown = _sources(artifact, settings)
        known = _own_manifest(folder)
        entries = _there(folder, known, agreed)
        missing = [source for name, source in sources.items() if name not in entries]
        announce(
            f"Compiling {len(missing)} of {plural(len(sources), 'kernel')} for {gpu.name} with {agreed['compiler']}."
        )
        num_bytes = _compile(missing, entries, folder, jobs)
        tables = _tables(artifact, settings, gpu, tuning_tables(known))
    lists = {"tuning": tables, "kernels": dict(sorted(entries.items()))}
    manifest = {"format_version": FORMAT_VERSION, **agreed, **lists}
    unsigned = None
    try:
        manifest = signed(manifest)
    except UnusableError as error:
        unsigned = str(error)
    write_whole(folder, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return {
        "not_signed_because": unsigned,
        "gpu": gpu.to_dict(),
        "compiler": agreed["compiler"],
        "asking": settings.to_dict(),
        "num_kernels": len(sources),
        "num_compiled": len(missing),
        "num_bytes": num_bytes,
        "activations_left_out": unknown,
    }


def _layer_configs(
    artifact: Artifact,
) -> Iterator[tuple[str, Activation, bool, int, int, dict[str, Any]]]:
    """GEMM, activation, gated, top-k, rotation and LayerConfig of every layer and rank."""
    for name, layer in artifact.layers.items():
        schema, activation = artifact.schema_of(name), artifact.activation_of(name)
        for rank in artifact.grid.ranks:
            for gemm in names.GEMMS:
                config = artifact.rank_file(name, *rank).configs[gemm]
                yield gemm, activation, layer.gated, layer.top_k, schema.of(gemm).rotation, config


def _sources(
    artifact: Artifact, settings: ComputeSettings
) -> tuple[dict[str, KernelSource], list[str]]:
    """Distinct kernels of all layers and ranks by name, and activations whose kernels are not known here."""
    from hqconv.kernel_layout.kernel_sources import gemm_kernels, input_kernels
    from hqconv.serving.vllm.kernel_requests import kernel_activation

    found: dict[str, KernelSource] = {}
    seen: set[str] = set()
    unknown: set[str] = set()
    for gemm, activation, gated, top_k, rotation, config in _layer_configs(artifact):
        key = json.dumps(
            [gemm, activation.to_dict(gated), gated, top_k, rotation, config], sort_keys=True
        )
        if key in seen:
            continue
        seen.add(key)
        arguments = kernel_activation(activation, gated) if gemm == "w2" else None
        kernels = gemm_kernels(config, settings)
        if gemm == "w2" and arguments is None:
            unknown.add(activation.describe())
        else:
            kernels += input_kernels(config, settings, arguments, top_k, rotation)
        found |= {kernel.name: kernel for kernel in kernels}
    return found, sorted(unknown)


def _tables(
    artifact: Artifact, settings: ComputeSettings, gpu: Gpu, known: dict[str, Any]
) -> dict[str, Any]:
    """Tuning of every GEMM, and the `known` tables for other GPUs."""
    from hqconv.kernel_layout.kernel_sources import tuning_table
    from hqconv.serving.vllm.tuning import tuning_key

    found = dict(known)
    seen: set[str] = set()
    for *_, document in _layer_configs(artifact):
        if (text := json.dumps(document, sort_keys=True)) not in seen:
            seen.add(text)
            config, table = tuning_table(document, settings)
            found[tuning_key(config, settings.to_dict(), gpu)] = table
    return dict(sorted(found.items()))


def _own_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that this user's `hqconv warm` made; {} of any other, whose kernels are made anew."""
    try:
        document = read_store_manifest(folder)
        check_signature(folder, document)
    except UnusableError:
        return {}
    return document


def _there(folder: Path, known: dict[str, Any], agreed: dict[str, Any]) -> dict[str, Any]:
    """Intact kernels that a folder with the manifest `known` holds; files of another compiler or maker are removed."""
    whole: dict[str, Any] = {}
    for name, entry in known.get("kernels", {}).items():
        with suppress(UnusableError):
            read_kernel(folder, name, entry)
            whole[name] = entry
    if known and all(known.get(key) == value for key, value in agreed.items()):
        return whole
    with output_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)  # first: without it the folder is none
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()  # `_check_folder` has seen their names
    return {}


def _compile(missing: list[KernelSource], entries: dict[str, Any], folder: Path, jobs: int) -> int:
    """Compile in parallel; each kernel is on the disk before it is listed. Returns the bytes of all kernels."""
    from hqconv.kernel_layout.kernel_sources import compile_kernel, kernel_compiler

    compiler = kernel_compiler()

    def make(source: KernelSource) -> tuple[str, dict[str, Any]]:
        cubin = compile_kernel(source, compiler)
        write_whole(folder, f"{source.name}.cu", source.code.encode())
        write_whole(folder, f"{source.name}.cubin", cubin)
        _LOG.info("Compiled kernel %s.", source.name)
        return source.name, {
            "expression": source.expression,
            "architecture": source.architecture,
            "without_fast_math": source.without_fast_math,
            "cubin_sha256": sha256(cubin).hexdigest(),
            "cubin_bytes": len(cubin),
        }

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = [pool.submit(make, source) for source in missing]
        try:
            for future in futures:
                name, entry = future.result()
                entries[name] = entry
        except BaseException:
            pool.shutdown(cancel_futures=True)  # unlisted kernels are compiled again next time
            raise
    return sum(entry["cubin_bytes"] for entry in entries.values())
