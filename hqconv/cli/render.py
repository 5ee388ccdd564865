"""Shows the words of `inspection` and of a finished conversion as tables on stdout."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console

from hqconv.artifact.summary import summarize_errors
from hqconv.cli import phrases
from hqconv.cli.comparison import show_comparison, show_page
from hqconv.cli.progress import human_bytes, human_seconds
from hqconv.cli.report import show_push, show_recipes, show_report
from hqconv.cli.tables import PROJECTIONS, print_facts, print_table
from hqconv.cli.text import printable_words
from hqconv.formats.format import PLAIN
from hqconv.inspection.words import Words

_WIDE = 500  # columns where nobody looks at a terminal: nothing is cut or wrapped


class _Console(Console):
    """rich's console, but a closed stdout is the command line's business: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


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
            phrases.activation(run),
            run["source_dtype"] if run["source_format"] == PLAIN.name else run["source_format"],
        )
        for run in runs
    )
    console.print()
    print_table(console, headers, rows)


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
        console.print()
        print_table(console, headers, rows)


def _show_plan(console: Console, words: Words) -> None:
    """The plan of a dry run."""
    converted = f"{words['family']} ({words['family_chosen_because']})"
    memory = f"{words['peak_memory_bytes'] / 2**20:.0f} MiB: {words['num_workers']} workers with at most "
    memory += (
        f"{words['worker_bytes'] / 2**20:.0f} MiB each, on {words['device']}, besides the libraries' own"
    )
    print_facts(
        console,
        (
            ("source", phrases.source(words["source"])),
            ("family", converted),
            ("schema", phrases.schema(words["schema"])),
            ("but", phrases.otherwise(words)),
            ("conversion", phrases.conversion(words)),
            ("quantizer", phrases.quantizer(words)),
            ("for", phrases.target(words)),
            ("tensors", phrases.tensors(words["tensors"])),
            ("dropped", phrases.dropped(words["tensors"])),
            ("memory", memory),
            ("output", f"{words['out']}: {human_bytes(words['num_bytes_out'])}"),
            ("", phrases.ranks(words["rank_bytes"])),
        ),
    )
    _blocks(console, words["blocks"])
    console.print()
    print_table(console, ("files", "count", "size"), _file_rows(words))
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
    print_facts(
        console,
        (
            ("schema", f"{words['schema']}, {words['layout']} layout"),
            ("conversion", phrases.conversion(words)),
            ("quantizer", phrases.quantizer(words)),
            ("requantized", phrases.exact(words["requantized"])),
            ("scales", phrases.scale_changes(words["largest_scale_change"])),
            ("blocks", f"{words['num_blocks']}, for {words['num_ranks']} rank(s)"),
            (
                "size",
                f"{human_bytes(words['num_bytes_in'])} → {human_bytes(words['num_bytes_out'])} ({ratio:.3f})",
            ),
            ("resumed", phrases.resumed(words)),
            ("time", f"{human_seconds(words['seconds'])}, {speed}{words['num_workers']} worker(s)"),
        ),
    )
    _errors(console, summarize_errors(words["errors"]))
    console.print(f"\nhqconv.json is sha256 {words['manifest_sha256']}")
    out = shlex.quote(words["out"])
    console.print(f"The artifact is in {words['out']}; see it with: hqconv inspect {out}")
    if words["serve_command"]:
        console.print(f"Serve it with: {words['serve_command']}")
    if "pushed" in words:
        show_push(console, words["pushed"])


def _show_source(console: Console, words: Words) -> None:
    dtypes = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in words["bytes_by_dtype"].items())
    rows = [("source", phrases.source(words)), ("model type", words["model_type"]), ("dtypes", dtypes)]
    rows.append(("quantization", words["quant_method"]))
    if not words["convertible"]:
        print_facts(console, [*rows, ("convertible", f"no: {words['obstacle']}")])
        return
    rows.append(("family", f"{words['family']} ({words['family_chosen_because']})"))
    rows.append(("direct", ", ".join(words["direct_schemas"])))
    rows += [("tensors", phrases.tensors(words["tensors"])), ("dropped", phrases.dropped(words["tensors"]))]
    print_facts(console, rows)
    _blocks(console, words["blocks"])
    by_sizes: dict[str, list[str]] = {}
    for name, sizes in words["tp_sizes"].items():
        by_sizes.setdefault(", ".join(map(str, sizes)) or "none", []).append(name)
    console.print()
    print_table(
        console, ("schemas", "--tp sizes that work"), ((", ".join(n), s) for s, n in by_sizes.items())
    )


def _show_artifact(console: Console, words: Words) -> None:
    revision = f" at {words['source']['revision']}" if words["source"]["revision"] else ""
    missing = words["missing_or_resized_files"]
    print_facts(
        console,
        (
            ("artifact", f"{words['folder']}: {words['num_files']} files, {human_bytes(words['num_bytes'])}"),
            ("source", f"{words['source']['name']}{revision}"),
            *(("", f"which was {phrases.ancestor(one)}") for one in words["derived_from"]),
            ("family", words["family"]),
            ("schema", phrases.schema(words["schema"])),
            ("but", phrases.otherwise(words)),
            ("conversion", phrases.conversion(words)),
            ("quantizer", phrases.quantizer(words)),
            ("requantized", phrases.exact(words["requantized"])),
            ("scales", phrases.scale_changes(words["largest_scale_change"])),
            ("for", phrases.target(words)),
            ("activations", phrases.input_scales(words["input_scales"])),
            ("experts", phrases.ranks(words["rank_bytes"])),
            ("tensors", ", ".join(f"{n} {kind}" for kind, n in words["tensors"].items())),
            ("serve", words["serve_command"] or "vLLM has no start for these ranks"),
            (
                "made by",
                f"hqconv {words['hqconv_version']}, humming-kernels {words['humming_kernels_version']}",
            ),
            (
                "manifest",
                f"sha256 {words['manifest_sha256']}",
            ),
            (
                "damaged",
                f"{len(missing)} files missing or resized: {', '.join(missing[:5])}" if missing else "",
            ),
            ("altered", words["altered_manifest"] or ""),
        ),
    )
    _blocks(console, words["blocks"])
    _errors(console, words["quantization_error"])
    for text in words["warnings"]:
        console.print(f"\nwarning: {text}")


def _show_unfinished(console: Console, words: Words) -> None:
    console.print(f"{words['folder']} holds an unfinished conversion, not an artifact yet.")
    print_facts(
        console, (("finished", f"{words['num_groups_done']} groups"), ("what to do", words["remedy"]))
    )


def _show_warm(console: Console, words: Words) -> None:
    """What `hqconv warm` compiled."""
    left_out = ", ".join(words["activations_left_out"])
    print_facts(
        console,
        (
            ("kernels", f"{words['num_kernels']} asked for, {words['num_compiled']} compiled now"),
            (
                "for",
                f"{words['gpu']['name']}, {words['gpu']['sm_count']} SMs; {words['asking']['gemm_type']}",
            ),
            ("compiler", words["compiler"]),
            ("left out", f"activation {left_out}, which the first start compiles" if left_out else ""),
            ("size", human_bytes(words["num_bytes"])),
            ("time", human_seconds(words["seconds"])),
        ),
    )
    console.print(f"\nThe kernels are in {words['folder']}.")
    console.print(f"A server uses them that is started with {words['variable']}.")


def _show_schemas(console: Console, words: Words) -> None:
    """The tables of presets and of input schemas, and the shorthand."""
    rows = [
        (
            schema["name"],
            f"{schema['bits_per_weight']:g}",
            schema["description"],
            phrases.stock_vllm(schema),
        )
        for schema in words["presets"]
    ]
    console.print()
    print_table(
        console, ("schema", "bits per weight", "what it is", "--layout checkpoint runs in vLLM 0.33"), rows
    )
    short = words["shorthand"]
    console.print(f"\n{short['name']}: {short['description']}")
    print_facts(
        console, (("  bits per weight", short["bits_per_weight"]), ("  in vLLM", short["stock_vllm"]))
    )
    console.print("\nFILE.toml: the fields of Humming's HummingWeightSchema.\n")
    inputs = [
        (one["name"], one["description"], phrases.targets(one["targets"]), phrases.of_all(one["schemas"]))
        for one in words["input_schemas"]
    ]
    print_table(console, ("--input-schema", "what it is", "targets", "with"), inputs)
    console.print(
        "\nFILE.toml: the fields of Humming's HummingInputSchema. Not every pair runs on every target."
    )


_SHOW = {
    "plan": _show_plan,
    "summary": _show_summary,
    "source": _show_source,
    "artifact": _show_artifact,
    "unfinished": _show_unfinished,
    "schemas": _show_schemas,
    "recipes": show_recipes,
    "report": show_report,
    "page": show_page,
    "comparison": show_comparison,
    "warm": _show_warm,
    "push": show_push,
}


def show(words: Words) -> None:
    """The tables for one document: a plan, a summary, or what was inspected; its `kind` decides."""
    console = _Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    _SHOW[words["kind"]](console, printable_words(words))
