"""`hqconv warm`: compilation of the kernels that a server of an artifact needs, on any machine with the CUDA compiler.

Which variants vLLM 0.33 requests from Humming (compute settings, activation sources) is known here, without vLLM; it
follows vLLM's `fused_moe/experts/fused_humming_moe.py`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.reader import Artifact
from hqconv.errors import OutputError, RequestError, plural
from hqconv.io.durable_files import output_errors, write_whole
from hqconv.io.hub import is_repo_id
from hqconv.kernel_layout.kernel_sources import (
    CONTIGUOUS,
    INDEXED,
    MASKED,
    ComputeSettings,
    KernelSource,
    compile_kernel,
    current_device,
    gemm_kernels,
    identity,
    input_kernels,
    kernel_compiler,
    standing_in,
    toolkit,
    tuning_table,
)
from hqconv.kernel_layout.transform import packed_values, prepare_linear
from hqconv.schemas import artifact_names as names
from hqconv.schemas.activation import Activation
from hqconv.schemas.engine import ENGINE, attention_heads
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_json
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.serving.vllm.translation import PREQUANTIZED, serving_activation
from hqconv.serving.vllm.tuning import tuning_key
from hqconv.warm.checkpoint_kernels import DENSE, warm_checkpoint
from hqconv.warm.gpus import Gpu, choose_gpu
from hqconv.warm.kernel_store import (
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
    of a damaged artifact; OutputError.
    """
    started = time.monotonic()
    announce = announce or (lambda _: None)
    num_jobs = jobs or len(os.sched_getaffinity(0))
    if _is_checkpoint(Path(out)):
        if kernels is not None:
            raise RequestError(
                "A checkpoint's kernels go into Humming's cache.",
                where="--kernels",
                found=kernels,
                remedy="Set HUMMING_CACHE_DIR instead.",
            )
        server = {"tp": tp, "ep": ep, "quantization": quantization, "moe_backend": moe_backend}
        return warm_checkpoint(str(out), _prepared(gpu, None), server, num_jobs, announce)
    with Artifact(Path(out), is_sealed=True) as artifact:
        _check_ranks(artifact, tp, ep, quantization or moe_backend)
        folder = folder_beside(Path(out)) if kernels is None else Path(kernels)
        _check_folder(Path(out), folder)
        chosen = _prepared(gpu, artifact.manifest.layer_spec.target.sm_version)
        document = _warm(artifact, chosen, folder, num_jobs, announce)
    return {
        "kind": "warm",
        "folder": str(folder),
        "variable": f"{VARIABLE}={'1' if kernels is None else folder.absolute()}",
        "seconds": time.monotonic() - started,
        **document,
    }


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is no artifact in the kernel layout, but a checkpoint that vLLM may serve by itself."""
    if (path / names.MANIFEST).exists():
        return not read_manifest(path).is_kernel
    return (path / names.CONFIG).exists() or (not path.exists() and is_repo_id(str(path)))


def _check_ranks(artifact: Artifact, tp: int, ep: int, method: str | None) -> None:
    grid = artifact.grid
    if (tp, ep) not in ((1, 1), (grid.tp, grid.ep)) or method is not None:
        raise RequestError(
            "An artifact has its own ranks and schema.",
            where=artifact.root,
            expected=f"no --tp, --ep, --quantization, --moe-backend: its kernels are for tp {grid.tp}, ep {grid.ep}",
            found=f"tp {tp}, ep {ep}" if method is None else method,
        )


def _prepared(gpu: str | None, sm_version: int | None) -> Gpu:
    """Import Humming and return the GPU to compile for; of any architecture where `sm_version` is None."""
    if not torch.cuda.is_available():
        # on import Humming would start a compiler for what only a GPU needs
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    current_device()
    return choose_gpu(gpu, sm_version)


def _check_folder(out: Path, folder: Path) -> None:
    """Refuse a path that holds anything but kernels, or lies in the artifact."""
    with output_errors(folder):
        if folder.resolve().is_relative_to(out.resolve()):
            raise OutputError(
                "The kernels would lie inside the artifact.",
                where=folder,
                remedy="Give a folder beside it.",
            )
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if not STORED.fullmatch(path.name):
                raise OutputError(
                    "The folder for the kernels holds something else.",
                    where=folder,
                    expected="no such folder, or one that `hqconv warm` made",
                    found=path.name,
                    remedy="Give another folder with --kernels.",
                )


def _warm(
    artifact: Artifact, gpu: Gpu, folder: Path, jobs: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    settings = compute_settings(artifact.grid.ep > 1)
    with standing_in(gpu.facts()), toolkit():
        compiler = identity(gpu.sm_version)
        sources, unknown = artifact_kernels(artifact, settings)
        manifest = _own_manifest(folder)
        entries = _intact_kernels(folder, manifest, compiler)
        missing = [source for name, source in sources.items() if name not in entries]
        announce(
            f"Compiling {len(missing)} of {plural(len(sources), 'kernel')} for {gpu.name} with {compiler['compiler']}."
        )
        _compile(missing, entries, folder, jobs)
        tables = dict(tuning_tables(manifest))
        for gemm in _gemms(artifact):
            config, table = tuning_table(gemm.config, settings)
            tables[tuning_key(config, settings.to_dict(), gpu)] = table
    manifest = {
        "format_version": FORMAT_VERSION,
        **compiler,
        "tuning": dict(sorted(tables.items())),
        "kernels": dict(sorted(entries.items())),
    }
    not_signed_because = None
    try:
        manifest = signed(manifest)
    except UnusableError as error:
        not_signed_because = str(error)
    write_whole(folder, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return {
        "not_signed_because": not_signed_because,
        "gpu": asdict(gpu),
        "compiler": compiler["compiler"],
        "num_kernels": len(sources),
        "num_compiled": len(missing),
        "num_bytes": sum(entry["cubin_bytes"] for entry in entries.values()),
        "activations_left_out": unknown,
    }


@dataclass(frozen=True)
class _RankGemm:
    """All of one GEMM that its kernels depend on. config: Humming's LayerConfig; rotation: block size, or 0."""

    gemm: str
    activation: Activation
    gated: bool
    top_k: int
    rotation: int
    config: Mapping[str, Any]


def _gemms(artifact: Artifact) -> Iterator[_RankGemm]:
    """Yield the distinct GEMMs of all layers and ranks."""
    seen = set()
    for name, layer in artifact.layers.items():
        schema = artifact.schema_of(name)
        activation = artifact.activation_of(name)
        for rank in artifact.grid.ranks:
            for gemm, config in artifact.rank_file(name, *rank).configs.items():
                rotation = schema.of(gemm).rotation
                found = _RankGemm(gemm, activation, layer.gated, layer.top_k, rotation, config)
                if (text := repr(found)) not in seen:
                    seen.add(text)
                    yield found


def artifact_kernels(
    artifact: Artifact, settings: ComputeSettings
) -> tuple[dict[str, KernelSource], list[str]]:
    """Return the kernels of all layers and ranks by name, and activations whose kernels are not known here."""
    kernels = []
    unknown = set()
    for gemm in _gemms(artifact):
        kernels += gemm_kernels(gemm.config, settings)
        activation = None
        if gemm.gemm == "w2":
            activation = kernel_activation(gemm.activation, gemm.gated)
        if gemm.gemm == "w2" and activation is None:
            unknown.add(gemm.activation.describe())
        else:
            kernels += input_kernels(gemm.config, settings, activation, gemm.top_k, gemm.rotation)
    dense = replace(settings, gemm_type=DENSE, prequantized=None)
    for packed, schema in _linear_layers(artifact):
        config, _ = prepare_linear(packed, schema, artifact.param_dtype)
        kernels += gemm_kernels(json.loads(config.to_str()), dense)
    return {kernel.name: kernel for kernel in kernels}, sorted(unknown)


def _linear_layers(artifact: Artifact) -> Iterator[tuple[dict[str, torch.Tensor], WeightSchema]]:
    """Yield packed tensors of the shapes, and the schema, of each kind of linear layer on a rank."""
    tp = ENGINE.attention_tp(artifact.grid) or 1
    config = read_json(artifact.fetched(names.CONFIG), MAX_LIST_BYTES)
    num_kv_heads = attention_heads(config).num_kv_heads
    kinds = set()
    for name in artifact.manifest.linear_layers or ():
        shape = artifact.linear_group(name).rank_shape(tp, num_kv_heads)
        kinds.add((*shape, artifact.schema_of(name).of("w13")))
    for rows, columns, schema in sorted(kinds, key=repr):
        yield packed_values(rows, columns, schema, artifact.param_dtype), schema


def _own_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder that this user's `hqconv warm` made; {} of any other, whose kernels go."""
    try:
        document = read_store_manifest(folder)
        check_signature(folder, document)
    except UnusableError:
        return {}
    return document


def _intact_kernels(
    folder: Path, manifest: dict[str, Any], compiler: dict[str, Any]
) -> dict[str, Any]:
    """Return the intact kernels of a manifest; all files of a folder of another compiler or maker are removed."""
    if manifest and all(manifest.get(key) == value for key, value in compiler.items()):
        intact = {}
        for name, entry in manifest["kernels"].items():
            with suppress(UnusableError):
                read_kernel(folder, name, entry)
                intact[name] = entry
        return intact
    with output_errors(folder):
        (folder / MANIFEST).unlink(missing_ok=True)  # first: without it the folder is none
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()  # `_check_folder` has seen their names
    return {}


def _compile(missing: list[KernelSource], entries: dict[str, Any], folder: Path, jobs: int) -> None:
    """Compile in parallel; each kernel is on the disk before it is listed."""
    compiler = kernel_compiler()

    def compile_one(source: KernelSource) -> tuple[str, dict[str, Any]]:
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

    with ThreadPoolExecutor(jobs) as pool:
        entries.update(pool.map(compile_one, missing))


# --- what vLLM requests


def compute_settings(has_ep: bool) -> ComputeSettings:
    """Humming's settings in vLLM with this environment, for an artifact with or without expert parallelism."""
    name = os.environ.get("VLLM_HUMMING_MOE_GEMM_TYPE", "auto").lower()
    gemm_type = {"auto": CONTIGUOUS if has_ep else INDEXED, "grouped": CONTIGUOUS}.get(name, name)
    if gemm_type not in (INDEXED, CONTIGUOUS, MASKED):
        raise RequestError(
            "Humming has no such GEMM.",
            where="VLLM_HUMMING_MOE_GEMM_TYPE",
            expected=f"auto, {INDEXED}, grouped, {CONTIGUOUS} or {MASKED}",
            found=name,
        )
    return ComputeSettings(
        gemm_type,
        use_f16_accum=_is_set("VLLM_HUMMING_USE_F16_ACCUM"),
        use_batch_invariant=_is_set("VLLM_BATCH_INVARIANT"),
        prequantized=PREQUANTIZED,
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


# vLLM 0.33, quantization/utils/humming/activation.py, to the letter: a compiled kernel is found by its source text.
_SILU = "a / (1.f + expf(-a))"
_GELU = "0.5f * a * (1.f + erff(a * 0.7071067811865476f))"
_GELU_TANH = """[](float a) {
    const float cubic = 0.044715f * a * a * a;
    const float inner = 0.7978845608028654f * (a + cubic);
    return 0.5f * a * (1.f + tanhf(inner));
}(a)"""
_RELU2 = "fmaxf(a, 0.f) * fmaxf(a, 0.f)"
_CLAMPED_SILU = """[](float a, float b) {{
    const float gate = fminf(a, {limit});
    const float up = fmaxf(fminf(b, {limit}), -{limit});
    const float activated_gate = gate / (1.f + expf(-{alpha} * gate));
    return activated_gate * (up + {beta});
}}(a, b)"""
_SITU = """[](float a, float b) {{
            const float gate = {beta} * tanhf(a / {beta});
            const float activated_gate = gate / (1.f + expf(-a));
            const float up = {up};
            return activated_gate * up;
        }}(a, b)"""
_SWIGLUSTEP = """[](float a, float b) {
            const float activated_gate = a / (1.f + expf(-a));
            const float gate = fminf(activated_gate, 7.f);
            const float up = fmaxf(fminf(b, 7.f), -7.f);
            return gate * up;
        }(a, b)"""
_GATED = {
    **dict.fromkeys(("silu", "swish"), f"({_SILU}) * b"),
    "gelu": f"({_GELU}) * b",
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), f"({_GELU_TANH}) * b"),
}
_UNARY = {
    **dict.fromkeys(("silu", "swish"), _SILU),
    "gelu": _GELU,
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), _GELU_TANH),
    "relu2": _RELU2,
}


def kernel_activation(activation: Activation, gated: bool) -> dict[str, str] | None:
    """Arguments of an activation as vLLM passes them to Humming's kernels, or None if vLLM has no such activation."""
    if gated:
        text = _gated_text(activation)
        kind = "binary_split"
    else:
        text = _UNARY.get(activation.name)
        kind = "unary"
    return None if text is None else {"activation_type": kind, "activation_impl": text}


def _gated_text(activation: Activation) -> str | None:
    found = serving_activation(activation, gated=True)
    if found is None:
        return None
    number = {key: f"({value}f)" for key, value in found.numbers.items()}
    if found.name == "situ":
        up = "b"
        if "linear_beta" in number:
            up = "{linear_beta} * tanhf(b / {linear_beta})".format_map(number)
        return _SITU.format(beta=number["beta"], up=up)
    if found.name == "swiglustep":
        return _SWIGLUSTEP
    if found.limit is not None:
        return _CLAMPED_SILU.format_map({"alpha": "(1.0f)", "beta": "(0.0f)", **number})
    return _GATED.get(activation.name)
