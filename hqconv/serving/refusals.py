"""What must agree before a byte is loaded: the artifact with the GPU, the ranks, the dtype and the model's own layers.

Nothing here imports vLLM or torch. Every refusal names the command that makes an artifact that fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hqconv.errors import HqconvError, RequestError
from hqconv.schemas.grid import Grid
from hqconv.schemas.serving import serve_options
from hqconv.serving.served import Served, ServedBlock

TESTED = ((0, 33), (0, 34))  # versions of vLLM, from and up to; pyproject's extra `vllm` says the same


@dataclass(frozen=True)
class Asked:
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


def untested(version: str) -> str | None:
    """A warning where a version of vLLM is none that hqconv was tested with, else None."""
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if TESTED[0] <= found < TESTED[1]:
        return None
    least, beyond = (".".join(map(str, numbers)) for numbers in TESTED)
    return (
        f"hqconv's layers were tested with vLLM from {least} up to, not including, {beyond}; this is {version}. "
        "Look at a few answers before you rely on it: `hqconv verify` judges the artifact, not the server."
    )


def check_machine(served: Served, sm_version: int) -> None:
    """Refuse another GPU than the artifact's target. Raises RequestError."""
    if sm_version != served.sm_version:
        raise RequestError(
            "The artifact was made for another GPU.",
            where=served.place.name,
            expected=f"sm{served.sm_version}",
            found=f"sm{sm_version}",
            remedy=f"Cut it again: {recut(served, target=f'sm{sm_version}')}.",
        )


def check_ranks(served: Served, asked: Asked) -> None:
    """Refuse other ranks, another placement of experts, or copies of experts. Raises RequestError."""
    grid = served.grid
    if (asked.tp, asked.ep) != (grid.tp, grid.ep):
        raise RequestError(
            "The artifact was cut for other ranks.",
            where=served.place.name,
            expected=_ranks(grid.tp, grid.ep),
            found=f"{_ranks(asked.tp, asked.ep)}, as vLLM counts the ranks of MoE layers",
            remedy=f"{_fitting(grid)} cut it again: {recut(served, tp=asked.tp, ep=asked.ep)}.",
        )
    if grid.ep > 1 and asked.placement != grid.placement:
        raise RequestError(
            "The artifact's experts are dealt to ranks in another way.",
            where=served.place.name,
            expected=grid.placement,
            found=f"{asked.placement} (vLLM falls back to linear where it has no round robin)",
            remedy=f"Serve with --expert-placement-strategy {grid.placement}, or cut it again: "
            f"{recut(served, placement=asked.placement)}.",
        )
    if grid.redundant or asked.redundant:
        raise RequestError(
            "Humming layers in vLLM have no redundant experts.",
            where=served.place.name,
            expected=0,
            found=f"{grid.redundant} in the artifact, {asked.redundant} asked for",
            remedy=f"Serve without --enable-eplb; cut it again: {recut(served, redundant=0)}.",
        )


def check_dtype(served: Served, dtype: str) -> None:
    """Refuse another dtype of activations. Raises RequestError."""
    if dtype != served.dtype:
        raise RequestError(
            "The artifact was made for another dtype.",
            where=served.place.name,
            expected=served.dtype,
            found=dtype,
            remedy=f"Serve with --dtype {served.dtype}, or convert the original again: `hqconv convert "
            f"{served.source_name} --schema {served.schema.name} --dtype {dtype}`.",
        )


def check_block(served: Served, block: ServedBlock, asked: Asked) -> None:
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


def no_deployment(served: Served, block: ServedBlock, found: object) -> HqconvError:
    """The error for a parallel configuration in which vLLM has no Humming kernels."""
    return RequestError(
        "There are no Humming experts in vLLM for this deployment.",
        where=f"{served.place.name}: {block.name}",
        found=found,
        remedy="Leave VLLM_HUMMING_MOE_GEMM_TYPE unset; VLLM_LOGGING_LEVEL=DEBUG shows why each was left out.",
    )


def no_block(served: Served, prefix: str) -> HqconvError:
    """The error for a layer of experts of which the artifact has nothing, or cannot be sure."""
    return RequestError(
        "The artifact has no experts for a layer of the model.",
        where=f"{served.place.name}: layer {prefix}",
        expected=", ".join(list(served.blocks)[:3]) + (" …" if len(served.blocks) > 3 else ""),
        found=prefix,
        remedy="Convert the whole model with this version of hqconv; if it was, please report the two names.",
    )


def other_model(served: Served, found: str) -> HqconvError:
    """The error for a server that is told to load another model in place."""
    return RequestError(
        "The experts of another model cannot be loaded into this server.",
        where=served.place.name,
        found=found,
        remedy="Start a server with the other artifact.",
    )


def no_layers(served: Served) -> HqconvError:
    """The error for a model that made no layer of experts as the plugin knows them."""
    return RequestError(
        "The server's model has asked for none of the artifact's experts.",
        where=served.place.name,
        expected="layers of experts that vLLM's Humming methods can serve",
        found="none of them, so that their weights would stay random",
        remedy="Leave --moe-backend at its default, and serve the main model, not a part of it.",
    )


def recut(served: Served, **changes: object) -> str:
    """The command that lays the artifact out anew, with its own options but for `changes`."""
    grid = served.grid
    options = {
        "target": f"sm{served.sm_version}",
        "tp": grid.tp,
        "ep": grid.ep,
        "placement": grid.placement,
        "redundant": grid.redundant,
        **changes,
    }
    place = served.place
    name = place.name.rstrip("/")
    folder = name if place.is_folder else name.rpartition("/")[2]
    words = [f"hqconv convert {folder} -o {folder}-{options['target']}-tp{options['tp']}-ep{options['ep']}"]
    words.append(f"--schema source --target {options['target']} --tp {options['tp']}")
    if options["ep"] != 1:
        words.append(f"--ep {options['ep']} --expert-placement {options['placement']}")
    if options["redundant"]:
        words.append(f"--redundant-experts {options['redundant']}")
    download = "" if place.is_folder else f"hf download {name} --local-dir {folder} && "
    return f"`{download}{' '.join(words)}`"


def _flags(flags: Mapping[str, bool]) -> str:
    return ", ".join(flag for flag, is_set in flags.items() if is_set) or "none of the special layouts"


def _fitting(grid: Grid) -> str:
    options = serve_options(grid)
    if options is None:
        return "There is no start of vLLM for the artifact's ranks:"
    return f"Serve with {options or '--tensor-parallel-size 1'}, or"


def _ranks(tp: int, ep: int) -> str:
    return f"tp {tp}, ep {ep}"
