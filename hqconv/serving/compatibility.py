"""What must agree before a byte is loaded: the artifact with the GPU, the ranks, the dtype and the model's own layers.

Nothing here imports vLLM or torch. Every refusal names the command that makes an artifact that fits.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hqconv.errors import HqconvError, RequestError
from hqconv.humming_layout.layer_config import resolve
from hqconv.schemas.gpu_target import TARGETS
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16, NAMED_INPUTS, InputSchema
from hqconv.schemas.weight_schema import WeightSchema, resolve_schema
from hqconv.serving.artifact_location import ArtifactLocation
from hqconv.serving.artifact_view import ArtifactLayer, ArtifactView
from hqconv.serving.engine import ENGINE


@dataclass(frozen=True)
class ServerLayer:
    """What a server's layer is about to be: sizes as the model class gives them, ranks as the server counts them."""

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


def check_machine(served: ArtifactView, sm_version: int) -> None:
    """Refuse another GPU than the artifact's target. Raises RequestError."""
    if sm_version != served.sm_version:
        remedy = f"Cut it again: {recut(served, target=f'sm{sm_version}')}."
        if sm_version not in TARGETS:
            known = ", ".join(f"sm{sm}" for sm in TARGETS)
            remedy = f"Serve it on such a GPU; this hqconv makes artifacts for {known} alone."
        raise RequestError(
            "The artifact was made for another GPU.",
            where=served.place.name,
            expected=f"sm{served.sm_version}",
            found=f"sm{sm_version}",
            remedy=remedy,
        )


def check_ranks(served: ArtifactView, asked: ServerLayer) -> None:
    """Refuse other ranks, another placement of experts, or copies of experts. Raises RequestError."""
    grid = served.grid
    fitting = recut(served, tp=asked.tp, ep=asked.ep, placement=asked.placement, redundant=0)
    if (asked.tp, asked.ep) != (grid.tp, grid.ep):
        raise RequestError(
            "The artifact was cut for other ranks.",
            where=served.place.name,
            expected=_ranks(grid.tp, grid.ep),
            found=f"{_ranks(asked.tp, asked.ep)}, as vLLM counts the ranks of MoE layers",
            remedy=f"{_fitting(grid)} cut it again: {fitting}.",
        )
    if grid.ep > 1 and asked.placement != grid.placement:
        raise RequestError(
            "The artifact's experts are dealt to ranks in another way.",
            where=served.place.name,
            expected=grid.placement,
            found=f"{asked.placement} (vLLM falls back to linear where it has no round robin)",
            remedy=f"Serve with --expert-placement-strategy {grid.placement}, or cut it again: {fitting}.",
        )
    if grid.redundant or asked.redundant:
        remedies = ["Serve without --enable-eplb."] * bool(asked.redundant)
        remedies += [f"Cut it again: {fitting}."] * bool(grid.redundant)
        raise RequestError(
            "Humming layers in vLLM have no redundant experts.",
            where=served.place.name,
            expected=0,
            found=f"{grid.redundant} in the artifact, {asked.redundant} asked for",
            remedy=" ".join(remedies),
        )


def check_inputs(served: ArtifactView, block: ArtifactLayer) -> None:
    """Refuse quantized activations that vLLM would prepare otherwise than the kernel reads. Raises RequestError.

    fp8 in groups of 128 is quantized by vLLM itself, before tokens are sent to other ranks.
    """
    inputs = block.kind.inputs
    if inputs.input_scale_group_size != 128 or inputs.a_dtype not in ("float8e4m3", "float8e5m2"):
        return
    if inputs.a_dtype == "float8e5m2" or block.hidden_size % 128:
        is_wide = inputs.a_dtype == "float8e4m3"
        raise RequestError(
            "Activations in groups of 128, as vLLM quantizes them itself, are not this artifact's.",
            where=f"{served.place.name}: {block.name}",
            expected="a hidden size that is a multiple of 128" if is_wide else "float8e4m3 activations",
            found=block.hidden_size if is_wide else inputs.a_dtype,
            remedy="Convert the original again with another --input-schema, such as fp8.",
        )


def check_dtype(served: ArtifactView, dtype: str) -> None:
    """Refuse another dtype of activations. Raises RequestError."""
    if dtype != served.dtype:
        raise RequestError(
            "The artifact was made for another dtype.",
            where=served.place.name,
            expected=served.dtype,
            found=dtype,
            remedy=f"Serve with --dtype {served.dtype}, or convert the original again: "
            f"`{shlex.join(_from_original(served, dtype))}`.",
        )


def check_block(served: ArtifactView, block: ArtifactLayer, asked: ServerLayer) -> None:
    """Refuse a model whose layer is not what was converted. Raises RequestError."""
    facts = {
        "experts": (block.num_experts, asked.num_experts),
        "hidden size": (block.hidden_size, asked.hidden_size),
        "gated": (block.gated, asked.gated),
    }
    for what, (converted, found) in facts.items():
        if converted != found:
            raise RequestError(
                "The server's layer is not the one that was converted.",
                where=f"{served.place.name}: {block.name}: {what}",
                expected=converted,
                found=f"{found} in vLLM's model",
                remedy="Another option, such as an all-to-all backend that pads the hidden size, or a changed "
                "config.json, makes the layer differ: serve without it.",
            )
    if asked.router_weight_on_input:
        raise RequestError(
            "Humming layers in vLLM cannot weigh the experts' inputs, as this model does.",
            where=f"{served.place.name}: {block.name}",
            remedy="Serve the original checkpoint with another MoE backend.",
        )


def check_flags(
    where: str, converted_with: str, here: str, expected: Mapping[str, bool], found: Mapping[str, bool]
) -> None:
    """Refuse a Humming that would lay the weights out in another way. Raises RequestError."""
    if dict(expected) != dict(found):
        raise RequestError(
            "Humming here lays weights out in another way than the one that made the artifact.",
            where=where,
            expected=f"{_flags(expected)} (humming-kernels {converted_with})",
            found=f"{_flags(found)} (humming-kernels {here})",
            remedy=f"Install humming-kernels=={converted_with}, or convert the model again with the version here.",
        )


def no_deployment(served: ArtifactView, block: ArtifactLayer, found: object) -> HqconvError:
    """The error for a parallel configuration in which vLLM has no Humming kernels."""
    return RequestError(
        "There are no Humming experts in vLLM for this deployment.",
        where=f"{served.place.name}: {block.name}",
        found=found,
        remedy="Leave VLLM_HUMMING_MOE_GEMM_TYPE unset; VLLM_LOGGING_LEVEL=DEBUG shows why each was left out.",
    )


def no_block(served: ArtifactView, prefix: str) -> HqconvError:
    """The error for a layer of experts of which the artifact has nothing, or cannot be sure."""
    return RequestError(
        "The artifact has no experts for a layer of the model.",
        where=f"{served.place.name}: layer {prefix}",
        expected=", ".join(list(served.blocks)[:3]) + (" …" if len(served.blocks) > 3 else ""),
        found=prefix,
        remedy="Convert the whole model with this version of hqconv; if it was, please report the two names.",
    )


def other_model(served: ArtifactView, found: str) -> HqconvError:
    """The error for a server that is told to load another model in place."""
    return RequestError(
        "The experts of another model cannot be loaded into this server.",
        where=served.place.name,
        found=found,
        remedy="Start a server with the other artifact.",
    )


def no_layers(served: ArtifactView) -> HqconvError:
    """The error for a model that made no layer of experts as the plugin knows them."""
    return RequestError(
        "The server's model has asked for none of the artifact's experts.",
        where=served.place.name,
        expected="layers of experts that vLLM's Humming methods can serve",
        found="none of them, so that their weights would stay random",
        remedy="Leave --moe-backend at its default, and serve the main model, not a part of it.",
    )


def recut(served: ArtifactView, **changes: object) -> str:
    """The command that lays the artifact out anew, with its own options but for `changes`; see `_can_be_cut`."""
    options = {**_options(served), **changes}
    place, folder = served.place, _folder(served.place)
    out = f"{folder}-{options['target']}-tp{options['tp']}-ep{options['ep']}"
    if not _can_be_cut(served):
        words = _convert(served.source_name, Path(out).name, _made_of(served), options)
        return f"`{shlex.join([*words, '--dtype', served.dtype])}`"
    command = shlex.join(_convert(folder, out, ["--schema", "source", *_inputs_options(served)], options))
    if place.is_folder:
        return f"`{command}`"
    revision = [] if place.revision is None else ["--revision", place.revision]
    download = shlex.join(["hf", "download", place.name, *revision, "--local-dir", folder])
    return f"`{download} && {command}`"


def _from_original(served: ArtifactView, dtype: str) -> list[str]:
    """The command that makes the same artifact in another dtype. An artifact's scales may not fit that."""
    out = f"{Path(_folder(served.place)).name}-{dtype}"
    return [*_convert(served.source_name, out, _made_of(served), _options(served)), "--dtype", dtype]


def _can_be_cut(served: ArtifactView) -> bool:
    """Whether the artifact can be a source with its own schemas, for the activations of all its blocks."""
    kinds = {served.kind, *(block.kind for block in served.blocks.values())}
    is_lost = any(kind.schema.rotation or resolve(kind).use_fused_e8m0_scale for kind in kinds)
    return not is_lost and len({kind.inputs for kind in kinds}) == 1


def _made_of(served: ArtifactView) -> list[str]:
    """The options that say what the experts are made of; a recipe is the user's own file."""
    if served.is_mixed:
        return ["--config", "RECIPE"]
    return ["--schema", _schema_word(served.kind.schema), *_inputs_options(served)]


def _inputs_options(served: ArtifactView) -> list[str]:
    inputs = served.kind.inputs
    return [] if inputs == A16 else ["--input-schema", _inputs_word(inputs)]


def _options(served: ArtifactView) -> dict[str, object]:
    grid = served.grid
    return {
        "target": f"sm{served.sm_version}",
        "tp": grid.tp,
        "ep": grid.ep,
        "placement": grid.placement,
        "redundant": grid.redundant,
    }


def _convert(source: str, out: str, made_of: list[str], options: Mapping[str, object]) -> list[str]:
    words = ["hqconv", "convert", source, "-o", out, *made_of]
    words += ["--target", str(options["target"]), "--tp", str(options["tp"])]
    if options["ep"] != 1:
        words += ["--ep", str(options["ep"]), "--expert-placement", str(options["placement"])]
    if options["redundant"]:
        words += ["--redundant-experts", str(options["redundant"])]
    return words


def _folder(place: ArtifactLocation) -> str:
    """The folder of an artifact, or the one to download it to; its name can be continued."""
    name = place.name.rstrip("/")
    last = name.rpartition("/")[2]
    if not place.is_folder:
        return last
    return name if last not in ("", ".", "..") else os.path.abspath(place.name)  # noqa: PTH100 - no links


def _schema_word(schema: WeightSchema) -> str:
    """What `--schema` takes: a name that means the same fields here, else the TOML file that had it."""
    try:
        is_known = resolve_schema(schema.name).humming_fields() == schema.humming_fields()
    except RequestError:
        is_known = False
    return schema.name if is_known else f"{schema.name}.toml"


def _inputs_word(inputs: InputSchema) -> str:
    """What `--input-schema` takes, likewise."""
    return inputs.name if NAMED_INPUTS.get(inputs.name) == inputs else f"{inputs.name}.toml"


def _flags(flags: Mapping[str, bool]) -> str:
    return ", ".join(flag for flag, is_set in flags.items() if is_set) or "none of the special layouts"


def _fitting(grid: Grid) -> str:
    options = ENGINE.serve_options(grid)
    if options is None:
        return "There is no start of vLLM for the artifact's ranks:"
    return f"Serve with {options or '--tensor-parallel-size 1'}, or"


def _ranks(tp: int, ep: int) -> str:
    return f"tp {tp}, ep {ep}"
