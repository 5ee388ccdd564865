"""The words of a plan, a summary and what was inspected as phrases for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hqconv.cli.progress import human_bytes
from hqconv.errors import NUM_SHOWN
from hqconv.reports.documents import Words
from hqconv.schemas.activation import Activation
from hqconv.schemas.gpu_target import TARGETS
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS


def ranks(rank_bytes: Mapping[str, int]) -> str:
    """`8 ranks, 69.21 GB each`, or from the smallest to the largest."""
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    size = f"{human_bytes(least)} each" if least == most else f"{human_bytes(least)} to {human_bytes(most)}"
    return f"{len(rank_bytes)} rank{'s' * (len(rank_bytes) > 1)}, {size}"


def schema(words: Mapping[str, Any]) -> str:
    """`mxfp4: float4e2m1, float8e8m0 scale per group 32; 4.25 bits per weight`."""
    return f"{words['name']}: {words['description']}; {words['bits_per_weight']:g} bits per weight"


def activation(run: Mapping[str, Any]) -> str:
    """`silu (gated)`, `situ (beta 4, linear_beta 25, gated)`, or that no more than the name is known."""
    found, gated = Activation.from_dict(run), bool(run["gated"])
    notes = ("gated",) * gated + ("known by name only",) * (not found.is_known(gated))
    return found.describe(*notes)


def otherwise(words: Mapping[str, Any]) -> str:
    """`fp8, a16 activations in 2 blocks; 1 left as it is`; "" where all blocks are made of the same."""
    parts = [f"{what} in {_blocks(len(names))}" for what, names in words["otherwise"].items()]
    if words["left_blocks"]:
        parts.append(f"{_blocks(len(words['left_blocks']))} left as in the source")
    return "; ".join(parts)


def input_scales(words: Mapping[str, Mapping[str, float]]) -> str:
    """`static scales: w13 0.0012 to 0.02, w2 0.003`; "" where there are none."""
    each = []
    for gemm, one in words.items():
        ends = dict.fromkeys(f"{end:.3g}" for end in (one["min"], one["max"]))
        each.append(f"{gemm} {' to '.join(ends)}")
    return f"static scales: {', '.join(each)}" if each else ""


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''}"


def served_param_dtypes(words: Mapping[str, Any]) -> str:
    """Dtypes with which the engine serves a schema's checkpoint layout: `yes`, `with bfloat16`, or `no: reason`."""
    served = words["stock_vllm_param_dtypes"]
    if not served:
        return f"no: {words['stock_vllm_obstacle']}"
    return "yes" if len(served) == len(PARAM_DTYPES) else f"with {' or '.join(served)} only"


def targets(found: Sequence[str]) -> str:
    """Of GPUs: `sm80 – sm89`, `from sm89 on`, or one after the other where others lie between."""
    known = [f"sm{number}" for number in TARGETS]
    begin = known.index(found[0])
    if len(found) < 3 or known[begin : begin + len(found)] != [*found]:
        return ", ".join(found)
    return f"from {found[0]} on" if found[-1] == known[-1] else f"{found[0]} – {found[-1]}"


def of_all(presets: Sequence[str]) -> str:
    """Schemas of weights, or that these are all of them."""
    return "every schema above" if len(presets) == len(PRESETS) else ", ".join(presets)


def target(words: Mapping[str, Any]) -> str:
    """What the artifact is made for: layout, dtypes, GPU and ranks."""
    parts = [f"{words['layout']} layout", f"{words['dtype']} parameters, {words['input_schema']} activations"]
    if words["layout"] == "kernel":
        parts += [words["target"], f"tp {words['tp']}, ep {words['ep']} ({words['expert_placement']})"]
        if words["redundant_experts"]:
            parts.append(f"{words['redundant_experts']} redundant experts")
    return ", ".join(parts)


def quantizer(words: Mapping[str, Any]) -> str:
    """How scales were chosen, where it is not by rounding to nearest."""
    if words["quantizer"] != "mse":
        return ""
    by = (
        f", weighted by importance (sha256 {words['importance']['sha256'][:12]}…)"
        if words["importance"]
        else ""
    )
    return f"mse: scales of the least squared error{by}"


def source(words: Mapping[str, Any]) -> str:
    """`Qwen3-30B-A3B: 18867 tensors, 61.07 GB in 16 files`."""
    revision = f" at {words['revision']}" if words["revision"] else ""
    return (
        f"{words['name']}{revision}: {words['num_tensors']} tensors, {human_bytes(words['num_bytes'])} "
        f"in {words['num_files']} file{'s' * (words['num_files'] != 1)}"
    )


def tensors(words: Mapping[str, Any]) -> str:
    """How many tensors are converted, copied and dropped, and their bytes."""
    kinds = ("converted", "copied", "dropped")
    return ", ".join(
        f"{words[kind]['num_tensors']} {kind} ({human_bytes(words[kind]['num_bytes'])})" for kind in kinds
    )


def dropped(words: Mapping[str, Any]) -> str:
    """Why tensors are dropped, a line each for the first few."""
    reasons = list(words["dropped"]["reasons"].items())
    lines = [f"{name}: {reason}" for name, reason in reasons[:NUM_SHOWN]]
    more = len(reasons) - len(lines)
    return "\n".join([*lines, f"… {more} more (--json lists all)"] if more else lines)


def conversion(words: Words) -> str:
    """`direct: codes and scales kept (58 blocks)` and the like."""
    meaning = {
        "quantized": "quantized",
        "direct": "direct: codes and scales kept",
        "direct, scales rounded": "direct, scales rounded: codes kept, scales in the parameter dtype",
        "requantized": "requantized from exactly decoded float32",
    }
    found = words["conversion"].items()
    return "; ".join(f"{meaning.get(kind, kind)} ({n} block{'s' * (n != 1)})" for kind, n in found)


def exact(counts: Mapping[str, int]) -> str:
    """What of a quantized source was quantized anew, and how much of that came out without any error."""
    if not counts.get("num_groups"):
        return ""
    text = f"{counts['num_exact_groups']} of {counts['num_groups']} requantized scale groups are without any error"
    return f"{counts['num_matrices']} matrices requantized; {text}"


def scale_changes(changes: Mapping[str, float]) -> str:
    """How far rounded scales moved: `rounded, moved by at most 0.387% (w1), 0.385% (w2)`."""
    each = (f"{value:.3%} ({name})" for name, value in changes.items())
    return f"rounded, moved by at most {', '.join(each)}" if changes else ""


def resumed(words: Words) -> str:
    """What an earlier run had done already."""
    if words["was_finished"]:
        return "the artifact was finished already: nothing was done"
    num_groups = words["num_groups_resumed"]
    return f"{num_groups} groups were finished already" if num_groups else ""


def ancestor(words: Words) -> str:
    """An artifact that an artifact comes from."""
    source = words["source"]
    revision = f" at {source['revision']}" if source["revision"] else ""
    return (
        f"{words['schema_name']} of {source['name']}{revision} (hqconv.json {words['manifest_sha256'][:12]}…)"
    )
