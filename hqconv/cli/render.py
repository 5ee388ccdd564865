"""Shows the words of `inspection` and of a finished conversion as tables or as JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hqconv.cli.progress import human_bytes, human_seconds
from hqconv.cli.report import show_report
from hqconv.formats.format import PLAIN
from hqconv.inspection.describe import Words, summarize_errors

PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}
_WIDE = 500  # columns where nobody looks at a terminal: nothing is cut or wrapped
_NUM_NAMES_SHOWN = 5


class _Console(Console):
    """rich's console, but a closed stdout is the command line's business: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(words: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(words, indent=2) + "\n")


def _facts(console: Console, rows: Iterable[tuple[str, Any]]) -> None:
    """Two columns: a label, and what there is to say; rows without a value are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value not in (None, ""):
            table.add_row(label, str(value))
    console.print(table)


def _table(console: Console, headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table whose first column is left-aligned and never cut; numbers go to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    body = [[str(cell) for cell in row] for row in rows]
    for index, header in enumerate(headers):
        numeric = all(row[index][:1].isdigit() for row in body)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console.print()
    console.print(table)


def _blocks(console: Console, runs: Iterable[Mapping[str, Any]]) -> None:
    headers = ("blocks", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    rows = (
        (
            run["name"],
            run["num_blocks"],
            run["num_experts"],
            run["hidden_size"],
            run["intermediate_size"],
            run["top_k"],
            run["activation"] + (" (gated)" if run["gated"] else ""),
            run["source_dtype"] if run["source_format"] == PLAIN.name else run["source_format"],
        )
        for run in runs
    )
    _table(console, headers, rows)


def _errors(console: Console, summary: Mapping[str, Mapping[str, Any]]) -> None:
    if summary:
        headers = ("relative error", "min", "median", "max", "worst block")
        rows = (
            (
                PROJECTIONS.get(p, p),
                f"{e['min']:.5f}",
                f"{e['median']:.5f}",
                f"{e['max']:.5f}",
                e["worst_block"],
            )
            for p, e in summary.items()
        )
        _table(console, headers, rows)


def _ranks(rank_bytes: Mapping[str, int]) -> str:
    """`8 ranks, 69.21 GB each`, or from the smallest to the largest."""
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    size = f"{human_bytes(least)} each" if least == most else f"{human_bytes(least)} to {human_bytes(most)}"
    return f"{len(rank_bytes)} rank{'s' * (len(rank_bytes) > 1)}, {size}"


def _schema(schema: Mapping[str, Any]) -> str:
    return f"{schema['name']}: {schema['description']}; {schema['bits_per_weight']:g} bits per weight"


def _target(words: Mapping[str, Any]) -> str:
    parts = [f"{words['layout']} layout", f"{words['dtype']} parameters, {words['input_schema']} activations"]
    if words["layout"] == "kernel":
        parts += [words["target"], f"tp {words['tp']}, ep {words['ep']} ({words['expert_placement']})"]
        if words["redundant_experts"]:
            parts.append(f"{words['redundant_experts']} redundant experts")
    return ", ".join(parts)


def _source(words: Mapping[str, Any]) -> str:
    revision = f" at {words['revision']}" if words["revision"] else ""
    return (
        f"{words['name']}{revision}: {words['num_tensors']} tensors, {human_bytes(words['num_bytes'])} "
        f"in {words['num_files']} file{'s' * (words['num_files'] != 1)}"
    )


def _tensors(words: Mapping[str, Any]) -> str:
    kinds = ("converted", "copied", "dropped")
    return ", ".join(
        f"{words[kind]['num_tensors']} {kind} ({human_bytes(words[kind]['num_bytes'])})" for kind in kinds
    )


def _dropped(words: Mapping[str, Any]) -> str:
    reasons = list(words["dropped"]["reasons"].items())
    lines = [f"{name}: {reason}" for name, reason in reasons[:_NUM_NAMES_SHOWN]]
    more = len(reasons) - len(lines)
    return "\n".join([*lines, f"… {more} more (--json lists all)"] if more else lines)


def _conversion(words: Words) -> str:
    """`direct: codes and scales kept (58 blocks)` and the like."""
    meaning = {
        "quantized": "quantized",
        "direct": "direct: codes and scales kept",
        "requantized": "requantized from exactly decoded float32",
    }
    found = words["conversion"].items()
    return "; ".join(f"{meaning.get(kind, kind)} ({n} block{'s' * (n != 1)})" for kind, n in found)


def _exact(counts: Mapping[str, int]) -> str:
    """What of a quantized source was quantized anew, and how much of that came out without any error."""
    if not counts.get("num_groups"):
        return ""
    exact = f"{counts['num_exact_groups']} of {counts['num_groups']} requantized scale groups are without any error"
    return f"{counts['num_matrices']} matrices requantized; {exact}"


def _show_plan(console: Console, words: Words) -> None:
    """The plan of a dry run."""
    converted = f"{words['family']} ({words['family_chosen_because']})"
    memory = f"{words['peak_memory_bytes'] / 2**20:.0f} MiB: {words['num_workers']} workers with at most "
    memory += (
        f"{words['worker_bytes'] / 2**20:.0f} MiB each, on {words['device']}, besides the libraries' own"
    )
    _facts(
        console,
        (
            ("source", _source(words["source"])),
            ("family", converted),
            ("schema", _schema(words["schema"])),
            ("conversion", _conversion(words)),
            ("for", _target(words)),
            ("tensors", _tensors(words["tensors"])),
            ("dropped", _dropped(words["tensors"])),
            ("memory", memory),
            ("output", f"{words['out']}: {human_bytes(words['num_bytes_out'])}"),
            ("", _ranks(words["rank_bytes"])),
        ),
    )
    _blocks(console, words["blocks"])
    _table(console, ("files", "count", "size"), _file_rows(words))
    for kind in ("warning", "note"):
        for text in words[f"{kind}s"]:
            console.print(f"\n{kind}: {text}")
    console.print("\nDry run: nothing was written.")


def _file_rows(words: Words) -> list[tuple[str, int, str]]:
    """Output files: all ranks' in one row, the ordinary shards in another."""
    kinds: dict[str, list[int]] = {}
    for file in words["files"]:
        folder = file["path"].rpartition("/")[0]
        kind = f"{folder.split('/')[0]}/tpT-epP/*.safetensors" if folder else "*.safetensors"
        kinds.setdefault(kind, []).append(file["size_bytes"])
    rows = [(kind, len(sizes), human_bytes(sum(sizes))) for kind, sizes in kinds.items()]
    return [*rows, ("as in the source", len(words["other_files"]), "")] if words["other_files"] else rows


def _show_summary(console: Console, words: Words) -> None:
    """The closing table of a conversion."""
    resumed = words["num_groups_resumed"]
    speed = "" if resumed else f"{words['num_bytes_in'] / 1e9 / max(words['seconds'], 1e-9):.2f} GB/s, "
    ratio = words["num_bytes_out"] / max(words["num_bytes_in"], 1)
    _facts(
        console,
        (
            ("schema", f"{words['schema']}, {words['layout']} layout"),
            ("conversion", _conversion(words)),
            ("requantized", _exact(words["requantized"])),
            ("blocks", f"{words['num_blocks']}, for {words['num_ranks']} rank(s)"),
            (
                "size",
                f"{human_bytes(words['num_bytes_in'])} → {human_bytes(words['num_bytes_out'])} ({ratio:.3f})",
            ),
            ("resumed", f"{resumed} groups were already finished" if resumed else ""),
            ("time", f"{human_seconds(words['seconds'])}, {speed}{words['num_workers']} worker(s)"),
        ),
    )
    _errors(console, summarize_errors(words["errors"]))
    console.print(f"\nThe artifact is in {words['out']}; see it with: hqconv inspect {words['out']}")


def _show_source(console: Console, words: Words) -> None:
    dtypes = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in words["bytes_by_dtype"].items())
    rows = [("source", _source(words)), ("model type", words["model_type"]), ("dtypes", dtypes)]
    rows.append(("quantization", words["quant_method"]))
    if not words["convertible"]:
        _facts(console, [*rows, ("convertible", f"no: {words['obstacle']}")])
        return
    rows.append(("family", f"{words['family']} ({words['family_chosen_because']})"))
    rows.append(("direct", ", ".join(words["direct_schemas"])))
    rows += [("tensors", _tensors(words["tensors"])), ("dropped", _dropped(words["tensors"]))]
    _facts(console, rows)
    _blocks(console, words["blocks"])
    by_sizes: dict[str, list[str]] = {}
    for name, sizes in words["tp_sizes"].items():
        by_sizes.setdefault(", ".join(map(str, sizes)) or "none", []).append(name)
    _table(console, ("schemas", "--tp sizes that work"), ((", ".join(n), s) for s, n in by_sizes.items()))


def _show_artifact(console: Console, words: Words) -> None:
    revision = f" at {words['source']['revision']}" if words["source"]["revision"] else ""
    missing = words["missing_or_resized_files"]
    _facts(
        console,
        (
            ("artifact", f"{words['folder']}: {words['num_files']} files, {human_bytes(words['num_bytes'])}"),
            ("source", f"{words['source']['name']}{revision}"),
            ("family", words["family"]),
            ("schema", _schema(words["schema"])),
            ("conversion", _conversion(words)),
            ("requantized", _exact(words["requantized"])),
            ("for", _target(words)),
            ("experts", _ranks(words["rank_bytes"])),
            ("tensors", ", ".join(f"{n} {kind}" for kind, n in words["tensors"].items())),
            (
                "made by",
                f"hqconv {words['hqconv_version']}, humming-kernels {words['humming_kernels_version']}",
            ),
            (
                "damaged",
                f"{len(missing)} files missing or resized: {', '.join(missing[:5])}" if missing else "",
            ),
        ),
    )
    _blocks(console, words["blocks"])
    _errors(console, words["quantization_error"])


def _show_unfinished(console: Console, words: Words) -> None:
    console.print(f"{words['folder']} holds an unfinished conversion, not an artifact yet.")
    _facts(console, (("finished", f"{words['num_groups_done']} groups"), ("what to do", words["remedy"])))


def _show_schemas(console: Console, words: Words) -> None:
    """The table of presets and the shorthand."""
    rows = [
        (
            schema["name"],
            f"{schema['bits_per_weight']:g}",
            schema["description"],
            "yes" if schema["stock_vllm_obstacle"] is None else f"no: {schema['stock_vllm_obstacle']}",
        )
        for schema in words["presets"]
    ]
    _table(
        console, ("schema", "bits per weight", "what it is", "--layout checkpoint runs in vLLM 0.33"), rows
    )
    short = words["shorthand"]
    console.print(f"\n{short['name']}: {short['description']}")
    _facts(console, (("  bits per weight", short["bits_per_weight"]), ("  in vLLM", short["stock_vllm"])))
    console.print("\nFILE.toml: the fields of Humming's HummingWeightSchema.")


_SHOW = {
    "plan": _show_plan,
    "summary": _show_summary,
    "source": _show_source,
    "artifact": _show_artifact,
    "unfinished": _show_unfinished,
    "schemas": _show_schemas,
    "report": show_report,
}


def show(words: Words) -> None:
    """The tables for one document: a plan, a summary, or what was inspected; its `kind` decides."""
    console = _Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    _SHOW[words["kind"]](console, words)
