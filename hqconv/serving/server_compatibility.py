"""Checks before any weight is loaded: the artifact against the server's GPU, ranks, dtype and model layers.

Engine-neutral and without torch: options of the server's command line come from the `Engine`. Refusals name the command
that converts a fitting artifact.
"""

from __future__ import annotations

import functools
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from hqconv.artifact.rank_file import RankFile
from hqconv.errors import RequestError
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import TARGETS
from hqconv.schemas.grid import EVEN, Grid
from hqconv.schemas.input_schema import A16, NAMED_INPUTS, KernelSpec
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView


@dataclass(frozen=True)
class ServerLayer:
    """An MoE layer of the server's model: sizes as the model class gives them, ranks as the server counts them.

    is_elastic: the number of ranks changes while the server runs.
    """

    num_experts: int
    hidden_size: int
    has_bias: bool
    gated: bool
    dtype: str
    tp: int
    ep: int
    placement: str
    redundant: int
    router_weight_on_input: bool
    is_elastic: bool = False


def check_machine(view: ArtifactView, sm_version: int) -> None:
    """Refuse another GPU than the artifact's target. Raises RequestError."""
    if sm_version != view.sm_version:
        remedy = f"Cut it again: {recut(view, sm_version=sm_version)}."
        if sm_version not in TARGETS:
            known = ", ".join(f"sm{sm}" for sm in TARGETS)
            remedy = f"Serve it on such a GPU; this hqconv makes artifacts for {known} alone."
        raise RequestError(
            "The artifact was made for another GPU.",
            where=view.location.name,
            expected=f"sm{view.sm_version}",
            found=f"sm{sm_version}",
            remedy=remedy,
        )


def check_ranks(view: ArtifactView, layer: ServerLayer) -> None:
    """Refuse other ranks or another placement of experts. Raises RequestError."""
    grid = view.grid
    if (layer.tp, layer.ep) != (grid.tp, grid.ep):
        options = ENGINE.serve_options(grid)
        start = f"Serve with {options or '--tensor-parallel-size 1'}, or"
        if options is None:
            start = f"There is no start of {ENGINE.name} for the artifact's ranks:"
        raise RequestError(
            "The artifact was cut for other ranks.",
            where=view.location.name,
            expected=f"tp {grid.tp}, ep {grid.ep}",
            found=f"tp {layer.tp}, ep {layer.ep}, as {ENGINE.name} counts the ranks of MoE layers",
            remedy=f"{start} cut it again: {recut_for(view, layer)}.",
        )
    if grid.ep > 1 and layer.placement != grid.placement:
        raise RequestError(
            "The artifact's experts are dealt to ranks in another way.",
            where=view.location.name,
            expected=grid.placement,
            found=f"{layer.placement} ({ENGINE.placement_remark})",
            remedy=f"Serve with {ENGINE.placement_option.format(grid.placement)}, or cut it again: "
            f"{recut_for(view, layer)}.",
        )


def check_dtype(view: ArtifactView, dtype: str) -> None:
    """Refuse another dtype of activations. Raises RequestError."""
    if dtype != view.dtype:
        raise RequestError(
            "The artifact was made for another dtype.",
            where=view.location.name,
            expected=view.dtype,
            found=dtype,
            remedy=f"Serve with {ENGINE.dtype_option.format(view.dtype)}, or convert the original again: "
            f"{recut(view, dtype=dtype)}.",
        )


def check_layer(view: ArtifactView, converted: ArtifactLayer, layer: ServerLayer) -> None:
    """Refuse a model whose layer is not the converted one. Raises RequestError."""
    where = f"{view.location.name}: {converted.name}"
    _check_fact(f"{where}: experts", converted.num_experts, layer.num_experts)
    _check_fact(f"{where}: hidden size", converted.hidden_size, layer.hidden_size)
    _check_fact(f"{where}: gated", converted.gated, layer.gated)


def check_rank_file(
    view: ArtifactView, file: RankFile, layer: ServerLayer, num_local_experts: int
) -> None:
    """Refuse a file whose experts or biases are not this rank's. Raises RequestError."""
    where = f"{view.location.name}: {file.layer}"
    _check_fact(
        f"{where}: experts of this rank", file.configs["w13"]["num_experts"], num_local_experts
    )
    _check_fact(f"{where}: biases", "w13_bias" in file.tensors, layer.has_bias)


def _check_fact(where: str, expected: object, found: object) -> None:
    if expected != found:
        raise RequestError(
            f"The layer of {ENGINE.name}'s model is not the one that was converted.",
            where=where,
            expected=expected,
            found=found,
            remedy=ENGINE.layer_remedy,
        )


def check_flags(
    where: str, converted_with: str, expected: Mapping[str, bool], found: Mapping[str, bool]
) -> None:
    """Refuse a Humming that would lay the weights out in another way. Raises RequestError."""
    if dict(expected) != dict(found):
        again = "convert the model again with the version here"
        raise _other_layout(where, converted_with, _flags(expected), _flags(found), again)


def _flags(flags: Mapping[str, bool]) -> str:
    return ", ".join(flag for flag, is_set in flags.items() if is_set) or "no special layout"


def _other_layout(
    where: str, converted_with: str, expected: str, found: str, again: str
) -> RequestError:
    return RequestError(
        "Humming here lays weights out in another way than the one that made the artifact.",
        where=where,
        expected=f"{expected} (humming-kernels {converted_with})",
        found=f"{found} (humming-kernels {version('humming-kernels')})",
        remedy=f"Install humming-kernels=={converted_with}, or {again}.",
    )


def check_fingerprint(
    where: str, converted_with: str, recorded: str, spec: KernelSpec, again: str
) -> None:
    """Refuse a Humming that lays weights out otherwise than the one that made an artifact.

    recorded: the artifact's fingerprint of the layout. again: the command that lays out anew. Raises RequestError.
    """
    if version("humming-kernels") == converted_with:
        return
    found = _fingerprint(spec)
    if found != recorded:
        raise _other_layout(
            where,
            converted_with,
            f"fingerprint {recorded[:12]}",
            found[:12] or "none",
            f"lay out anew: {again}",
        )


@functools.cache
def _fingerprint(spec: KernelSpec) -> str:
    """Return `layout_fingerprint`, by a process of its own: a server's Humming stays as it is. "" where it fails."""
    code = (
        "import pickle, sys\n"
        "from hqconv.kernel_layout.transform import layout_fingerprint\n"
        "print(layout_fingerprint(pickle.load(sys.stdin.buffer)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(spec), stdout=subprocess.PIPE, check=False)
    return done.stdout.decode().strip() if done.returncode == 0 else ""


# --- the command that converts a fitting artifact


def recut_for(view: ArtifactView, layer: ServerLayer) -> str:
    """Return the command that cuts the artifact for the ranks of a server's layer."""
    grid = replace(
        view.grid, tp=layer.tp, ep=layer.ep, placement=layer.placement, redundant=layer.redundant
    )
    return recut(view, grid=grid)


def recut(
    view: ArtifactView,
    *,
    grid: Grid | None = None,
    sm_version: int | None = None,
    dtype: str | None = None,
) -> str:
    """Return the command that converts the artifact again, with its own options but for those given.

    Where the artifact cannot be the source, and for another dtype, in which its scales may not fit, it is the original.
    """
    grid = grid or view.grid
    location = view.location
    target = f"sm{sm_version or view.sm_version}"
    name = os.path.abspath(location.name)  # noqa: PTH100 - no links
    if not location.is_folder:
        name = Path(location.name).name
    out = f"{name}-{target}-tp{grid.tp}-ep{grid.ep}"
    if dtype is None and _can_be_source(view):
        source = [name if location.is_folder else location.name]
        if location.revision is not None:
            source += ["--revision", location.revision]
        schema = ["--schema", "source", *_inputs_option(view)]
    else:
        dtype = dtype or view.dtype
        out = f"{Path(out).name}-{dtype}"
        source = [view.source_name]
        schema = [*_schema_option(view), "--dtype", dtype]
    command = ["hqconv", "convert", *source, "-o", out, *schema]
    command += ["--target", target, "--tp", str(grid.tp)]
    if grid.split != EVEN:
        command += ["--tp-split", grid.split]
    if grid.ep != 1:
        command += ["--ep", str(grid.ep), "--expert-placement", grid.placement]
    if grid.redundant:
        command += ["--redundant-experts", str(grid.redundant)]
    return f"`{shlex.join(command)}`"


def _can_be_source(view: ArtifactView) -> bool:
    """Return whether `--schema source` keeps the codes of all layers, for activations that are theirs."""
    specs = {spec for layer_spec in view.layer_specs for spec in layer_spec.each}
    gemms = [gemm for layer in view.layers.values() for gemm in layer.gemms.values()]
    is_lost = any(spec.schema.rotation for spec in specs)
    is_lost = is_lost or any(gemm.has_fused_exponents for gemm in gemms)
    return not is_lost and len({spec.inputs for spec in specs}) == 1


def _schema_option(view: ArtifactView) -> list[str]:
    """Return the options for the experts' schemas; a recipe is the user's own file."""
    if view.left or len(view.layer_specs) > 1:
        return ["--config", "RECIPE"]
    names = [_schema_name(schema) for schema in view.layer_spec.schema.each]
    return ["--schema", "+".join(names), *_inputs_option(view)]


def _schema_name(schema: WeightSchema) -> str:
    """Return the value of `--schema`: a name that has the same fields here, else the TOML file that had it."""
    try:
        is_known = resolve_schema(schema.name).humming_fields() == schema.humming_fields()
    except RequestError:
        is_known = False
    return schema.name if is_known else f"{schema.name}.toml"


def _inputs_option(view: ArtifactView) -> list[str]:
    inputs = view.layer_spec.inputs
    if inputs == A16:
        return []
    is_known = NAMED_INPUTS.get(inputs.name) == inputs
    return ["--input-schema", inputs.name if is_known else f"{inputs.name}.toml"]
