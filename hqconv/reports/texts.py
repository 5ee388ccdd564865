"""Short texts about values of documents, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.errors import plural
from hqconv.schemas.activation import Activation
from hqconv.schemas.grid import EVEN

Document = dict[str, Any]  # for JSON
PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, e.g. `4.20 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def name_text(document: Document) -> str:
    """`org/name at 12ab…`: a source with its commit."""
    return f"{document['name']} at {document['revision']}" if document["revision"] else f"{document['name']}"


def schema_text(document: Document) -> str:
    """`mxfp4: float4e2m1, float8e8m0 scale per group 32; 4.25 bits per weight`."""
    return f"{document['name']}: {document['description']}; {document['bits_per_weight']:g} bits per weight"


def otherwise_text(document: Document) -> str:
    """`fp8, a16 activations in 2 layers; 1 layer left as in the source`; "" if all layers have one schema."""
    parts = [f"{what} in {plural(len(names), 'layer')}" for what, names in document["otherwise"].items()]
    if document["left_blocks"]:
        parts.append(f"{plural(len(document['left_blocks']), 'layer')} left as in the source")
    return "; ".join(parts)


def conversion_text(document: Document) -> str:
    """`direct: codes and scales kept (58 layers)` and the like."""
    meaning = {
        "direct": "direct: codes and scales kept",
        "direct, scales rounded": "direct, scales rounded: codes kept, scales in the parameter dtype",
        "requantized": "requantized from exactly decoded float32",
    }
    return "; ".join(
        f"{meaning.get(kind, kind)} ({plural(count, 'layer')})" for kind, count in document["conversion"].items()
    )


def quantizer_text(document: Document) -> str:
    """Scale selection, unless it is round-to-nearest."""
    digest = f" (sha256 {document['importance']['sha256'][:12]}…)" if document["importance"] else ""
    if document["quantizer"] == "gptq":
        return f"gptq: errors compensated in other columns, by products of inputs{digest}"
    if document["quantizer"] == "mse":
        return "mse: scales of the least squared error" + (f", weighted by importance{digest}" if digest else "")
    return ""


def target_text(document: Document) -> str:
    """Layout, dtypes, GPU and ranks of the artifact."""
    parts = [f"{document['layout']} layout", f"{document['dtype']} parameters, {document['input_schema']} activations"]
    if document["layout"] == "kernel":
        parts += [document["target"], f"tp {document['tp']}, ep {document['ep']} ({document['expert_placement']})"]
        if document["tp_split"] != EVEN:
            parts.append(f"TP split {document['tp_split']}")
        if document["redundant_experts"]:
            parts.append(plural(document["redundant_experts"], "redundant expert"))
    return ", ".join(parts)


def ranks_text(rank_bytes: Mapping[str, int]) -> str:
    """`8 ranks, 69.21 GB each`, or the smallest and the largest size."""
    if not rank_bytes:
        return ""
    least, most = human_bytes(min(rank_bytes.values())), human_bytes(max(rank_bytes.values()))
    return f"{plural(len(rank_bytes), 'rank')}, {f'{least} each' if least == most else f'{least} to {most}'}"


def activation_text(run: Mapping[str, Any]) -> str:
    """`silu (gated)`, `situ (beta 4, linear_beta 25, gated)`; marks activations known by name only."""
    found, gated = Activation.from_dict(run), bool(run["gated"])
    return found.describe(*("gated",) * gated, *("known by name only",) * (not found.is_known(gated)))
