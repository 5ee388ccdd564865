"""Checks before any weight is loaded: the artifact against the server's GPU, ranks, dtype and model layers.

Engine-neutral and without torch: options of the server's command line come from the `Engine`. Every refusal names the
command that converts a fitting artifact.
"""

from __future__ import annotations

import functools
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from hqconv.artifact.rank_file import RankFile
from hqconv.errors import HqconvError, RequestError
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import TARGETS
from hqconv.schemas.grid import EVEN
from hqconv.schemas.input_schema import A16, NAMED_INPUTS, InputSchema, KernelSpec
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactLocation, ArtifactView


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
    router_weight_on_input: bool = False
    is_elastic: bool = False


def check_machine(view: ArtifactView, sm_version: int) -> None:
    """Refuse another GPU than the artifact's target. Raises RequestError."""
    if sm_version != view.sm_version:
        remedy = f"Cut it again: {recut(view, target=f'sm{sm_version}')}."
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
    fitting = recut(
        view, tp=layer.tp, ep=layer.ep, placement=layer.placement, redundant=layer.redundant
    )
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
            remedy=f"{start} cut it again: {fitting}.",
        )
    if grid.ep > 1 and layer.placement != grid.placement:
        raise RequestError(
            "The artifact's experts are dealt to ranks in another way.",
            where=view.location.name,
            expected=grid.placement,
            found=f"{layer.placement} ({ENGINE.placement_remark})",
            remedy=f"Serve with {ENGINE.placement_option.format(grid.placement)}, or cut it again: {fitting}.",
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
            f"`{shlex.join(_from_original(view, dtype))}`.",
        )


def check_layer(view: ArtifactView, converted: ArtifactLayer, layer: ServerLayer) -> None:
    """Refuse a model whose layer is not the converted one. Raises RequestError."""
    facts = {
        "experts": (converted.num_experts, layer.num_experts),
        "hidden size": (converted.hidden_size, layer.hidden_size),
        "gated": (converted.gated, layer.gated),
    }
    for what, (expected, found) in facts.items():
        if expected != found:
            where = f"{view.location.name}: {converted.name}: {what}"
            raise _other_layer(where, expected, f"{found} in {ENGINE.name}'s model")


def check_rank_file(
    view: ArtifactView, file: RankFile, layer: ServerLayer, num_local_experts: int
) -> None:
    """Refuse a file whose experts or biases are not this rank's. Raises RequestError."""
    facts = {
        "experts of this rank": (file.configs["w13"]["num_experts"], num_local_experts),
        "biases": ("w13_bias" in file.tensors, layer.has_bias),
    }
    for what, (expected, found) in facts.items():
        if expected != found:
            where = f"{view.location.name}: {file.layer}: {what}"
            raise _other_layer(where, expected, found)


def _other_layer(where: str, expected: object, found: object) -> RequestError:
    return RequestError(
        "The server's layer is not the one that was converted.",
        where=where,
        expected=expected,
        found=found,
        remedy=ENGINE.layer_remedy,
    )


def check_flags(
    where: str,
    converted_with: str,
    here: str,
    expected: Mapping[str, bool],
    found: Mapping[str, bool],
) -> None:
    """Refuse a Humming that would lay the weights out in another way. Raises RequestError."""
    if dict(expected) != dict(found):
        again = "convert the model again with the version here"
        raise _other_layout(where, converted_with, here, _flags(expected), _flags(found), again)


def _other_layout(
    where: str, converted_with: str, here: str, expected: str, found: str, again: str
) -> RequestError:
    return RequestError(
        "Humming here lays weights out in another way than the one that made the artifact.",
        where=where,
        expected=f"{expected} (humming-kernels {converted_with})",
        found=f"{found} (humming-kernels {here})",
        remedy=f"Install humming-kernels=={converted_with}, or {again}.",
    )


def check_fingerprint(
    where: str, converted_with: str, recorded: str, spec: KernelSpec, again: str
) -> None:
    """Refuse a Humming that lays weights out otherwise than the one that made an artifact.

    recorded: the artifact's fingerprint of the layout. again: the command that lays out anew. Raises RequestError.
    """
    here = version("humming-kernels")
    if here == converted_with:
        return
    found = _fingerprint(spec)
    if found != recorded:
        texts = f"fingerprint {recorded[:12]}", found[:12] or "none"
        raise _other_layout(where, converted_with, here, *texts, f"lay out anew: {again}")


@functools.cache
def _fingerprint(spec: KernelSpec) -> str:
    """Return `layout_fingerprint`, by a process of its own: a server's Humming stays as it is. "" where it fails."""
    code = (
        "import pickle, sys; from hqconv.kernel_layout.fingerprint import layout_fingerprint as one"
    )
    command = [sys.executable, "-c", f"{code}; print(one(pickle.load(sys.stdin.buffer)))"]
    done = subprocess.run(command, input=pickle.dumps(spec), stdout=subprocess.PIPE, check=False)
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def no_layer(view: ArtifactView, prefix: str) -> HqconvError:
    """Error for a layer of experts that the artifact lacks, or that fits several layers."""
    return RequestError(
        "The artifact has no experts for a layer of the model.",
        where=f"{view.location.name}: layer {prefix}",
        expected=", ".join(list(view.layers)[:3]) + (" …" if len(view.layers) > 3 else ""),
        found=prefix,
        remedy="Convert the whole model with this version of hqconv; if it was, please report the two names.",
    )


def other_model(view: ArtifactView, found: str) -> HqconvError:
    """Error for a server that shall load another model in place."""
    return RequestError(
        "The experts of another model cannot be loaded into this server.",
        where=view.location.name,
        found=found,
        remedy="Stop this server, whose weights are incomplete now, and start one with the other artifact.",
    )


def recut(view: ArtifactView, **changes: object) -> str:
    """Return the command that converts the artifact again, with its own options but for `changes`."""
    options = {**_options(view), **changes}
    location, folder = view.location, _folder(view.location)
    out = f"{folder}-{options['target']}-tp{options['tp']}-ep{options['ep']}"
    if not _can_be_cut(view):
        arguments = _convert(view.source_name, Path(out).name, _made_of(view), options)
        return f"`{shlex.join([*arguments, '--dtype', view.dtype])}`"
    command = shlex.join(
        _convert(folder, out, ["--schema", "source", *_inputs_options(view)], options)
    )
    if location.is_folder:
        return f"`{command}`"
    revision = [] if location.revision is None else ["--revision", location.revision]
    download = shlex.join(["hf", "download", location.name, *revision, "--local-dir", folder])
    return f"`{download} && {command}`"


def _from_original(view: ArtifactView, dtype: str) -> list[str]:
    """Command that converts the original in another dtype: the artifact's scales may not fit."""
    out = f"{Path(_folder(view.location)).name}-{dtype}"
    return [*_convert(view.source_name, out, _made_of(view), _options(view)), "--dtype", dtype]


def _can_be_cut(view: ArtifactView) -> bool:
    """Return whether the artifact can be a source with its own schemas, for the activations of all its layers."""
    specs = (view.layer_spec, *(layer.layer_spec for layer in view.layers.values()))
    kernel_specs = {one for spec in specs for one in spec.each}
    gemms = [gemm for layer in view.layers.values() for gemm in layer.gemms.values()]
    is_lost = any(kernel_spec.schema.rotation for kernel_spec in kernel_specs)
    is_lost = is_lost or any(gemm.has_fused_exponents for gemm in gemms)
    return not is_lost and len({kernel_spec.inputs for kernel_spec in kernel_specs}) == 1


def _made_of(view: ArtifactView) -> list[str]:
    """Options for the experts' schemas; a recipe is the user's own file."""
    if view.is_mixed:
        return ["--config", "RECIPE"]
    return [
        "--schema",
        "+".join(map(_schema_word, view.layer_spec.schema.each)),
        *_inputs_options(view),
    ]


def _inputs_options(view: ArtifactView) -> list[str]:
    inputs = view.layer_spec.inputs
    return [] if inputs == A16 else ["--input-schema", _inputs_word(inputs)]


def _options(view: ArtifactView) -> dict[str, object]:
    grid = view.grid
    return {
        "target": f"sm{view.sm_version}",
        "tp": grid.tp,
        "split": grid.split,
        "ep": grid.ep,
        "placement": grid.placement,
        "redundant": grid.redundant,
    }


def _convert(source: str, out: str, made_of: list[str], options: Mapping[str, object]) -> list[str]:
    command = ["hqconv", "convert", source, "-o", out, *made_of]
    command += ["--target", str(options["target"]), "--tp", str(options["tp"])]
    if options["split"] != EVEN:
        command += ["--tp-split", str(options["split"])]
    if options["ep"] != 1:
        command += ["--ep", str(options["ep"]), "--expert-placement", str(options["placement"])]
    if options["redundant"]:
        command += ["--redundant-experts", str(options["redundant"])]
    return command


def _folder(location: ArtifactLocation) -> str:
    """Folder of an artifact, or the folder to download it to, without a trailing slash."""
    name = location.name.rstrip("/")
    last = name.rpartition("/")[2]
    if not location.is_folder:
        return last
    return name if last not in ("", ".", "..") else os.path.abspath(location.name)  # noqa: PTH100 - no links


def _schema_word(schema: WeightSchema) -> str:
    """Value of `--schema`: a name that has the same fields here, else the TOML file that had it."""
    try:
        is_known = resolve_schema(schema.name).humming_fields() == schema.humming_fields()
    except RequestError:
        is_known = False
    return schema.name if is_known else f"{schema.name}.toml"


def _inputs_word(inputs: InputSchema) -> str:
    """Value of `--input-schema`, likewise."""
    return inputs.name if NAMED_INPUTS.get(inputs.name) == inputs else f"{inputs.name}.toml"


def _flags(flags: Mapping[str, bool]) -> str:
    return (
        ", ".join(flag for flag, is_set in flags.items() if is_set) or "none of the special layouts"
    )
