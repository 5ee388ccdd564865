"""Tables on a terminal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hqconv.artifact.error_summary import summarize_errors
from hqconv.cli import phrases
from hqconv.cli.progress import human_bytes, human_seconds
from hqconv.cli.text import printable_document
from hqconv.formats.source_format import PLAIN
from hqconv.reports.documents import Words
from hqconv.serving.engine import ENGINE

PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}


def print_facts(console: Console, rows: Iterable[tuple[str, Any]]) -> None:
    """Two columns: a label, and what there is to say; rows without a value are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value not in (None, ""):
            table.add_row(label, str(value))
    console.print(table)


def print_table(console: Console, headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table whose first column is left-aligned and nothing is cut; numbers go to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    body = [[str(cell) for cell in row] for row in rows]
    for index, header in enumerate(headers):
        numeric = all(row[index][:1].isdigit() for row in body)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    console.print(table)


TableRows = tuple[tuple[str, ...], list[tuple[Any, ...]]]
NUM_ROWS_SHOWN, NUM_FINDINGS_SHOWN = 10, 20


def show_recipes(console: Console, words: Words) -> None:
    """The recipes and schema files that come with hqconv, and where they lie."""
    rows = [(one["option"], one["description"]) for key in ("recipes", "schemas") for one in words[key]]
    print_table(console, ("option of convert", "what it is for"), rows)
    console.print(
        f"\nThe files are in {words['folder']}, for copies of your own; a file of that name here wins."
    )


def show_report(console: Console, words: Words) -> None:
    """Checks, findings, figures, and last of all one PASS or FAIL line with the reason."""
    for name, check in words["checks"].items():
        status = check["status"].upper()
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        console.print(f"{name:8} {status} in {human_seconds(check['seconds'])}{reason}")
        for note in check["notes"]:
            console.print(f"         {note}")
        _findings(console, check["findings"])
    for title, (headers, rows) in _tables(words["checks"]):
        console.print(f"\n{title}")
        print_table(console, headers, rows)
    console.print()
    console.print(verdict(words))


def verdict(words: Words) -> str:
    """PASS or FAIL, and why."""
    checks = words["checks"]
    failed = [f"{name}: {_first(check)}" for name, check in checks.items() if check["status"] == "fail"]
    if failed:
        return "FAIL  " + "; ".join(failed)
    ran = [name for name, check in checks.items() if check["status"] == "pass"]
    if not words["passed"]:
        return "FAIL  no check could run"
    against = f" against {words['source']}" if words.get("source") else ", without the source"
    skipped = [name for name, check in checks.items() if check["status"] == "skipped"]
    return f"PASS  {', '.join(ran)}{against}" + (f"; skipped: {', '.join(skipped)}" if skipped else "")


def _first(check: Words) -> str:
    finding, count = check["findings"][0], len(check["findings"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{finding['what'].rstrip('.')} ({finding['where']}){more}"


def _findings(console: Console, findings: list[Words]) -> None:
    for finding in findings[:NUM_FINDINGS_SHOWN]:
        console.print(f"  ✗ {finding['where']}: {finding['what']}")
        for label in ("expected", "found"):
            if finding[label]:
                console.print(f"      {label}: {finding[label]}")
    if len(findings) > NUM_FINDINGS_SHOWN:
        console.print(f"  … {len(findings) - NUM_FINDINGS_SHOWN} more; --json lists all")


def show_push(console: Console, words: Words) -> None:
    """What `hqconv push` sent."""
    if not words["num_files"]:
        console.print(f"{words['repo']} has the artifact already, at commit {words['commit']}.")
        return
    sent = f"{words['num_files']} files, {human_bytes(words['num_bytes'])}"
    console.print(f"{words['repo']} has the artifact, at commit {words['commit']}; sent: {sent}.")
    console.print(f"hqconv.json is sha256 {words['manifest_sha256']}")


def _tables(checks: Words) -> Iterable[tuple[str, TableRows]]:
    weights = checks.get("weights", {}).get("measured", {})
    kernel = checks.get("kernel", {}).get("measured", {})
    if weights:
        yield (
            "weights, decoded from the kernel layout, against the source (worst first)",
            _weight_rows(weights),
        )
    if kernel:
        yield "kernel, relative errors (worst first)", _kernel_rows(kernel)


def _weight_rows(measured: Words) -> TableRows:
    rows = [
        (block, PROJECTIONS.get(projection, projection), figures)
        for block, projections in measured.items()
        for projection, figures in projections.items()
        if isinstance(figures, Mapping) and "relative_error" in figures
    ]
    rows.sort(key=lambda row: -row[2]["relative_error"])
    headers = ("block", "projection", "relative error", "SQNR (dB)", "cosine", "worst group")
    return headers, [
        (
            block,
            projection,
            *(_number(f.get(key)) for key in ("relative_error", "sqnr_db", "cosine", "worst_group")),
        )
        for block, projection, f in rows[:NUM_ROWS_SHOWN]
    ]


def _kernel_rows(measured: Words) -> TableRows:
    blocks = sorted(measured, key=lambda block: -measured[block]["kernel"])
    headers = (
        *("block", "kernel vs decoded", "vs rounded activations", "worst channel", "output vs source"),
        "tokens routed by",
    )
    return headers, [
        (
            block,
            _number(measured[block]["kernel"]),
            _number(measured[block].get("rounded_kernel")),
            _number(measured[block]["channel"]),
            _number(measured[block].get("against_source")),
            measured[block]["routed_by"],
        )
        for block in blocks[:NUM_ROWS_SHOWN]
    ]


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("relative_error")
    return "-" if value is None else f"{value:.4f}"


_NUM_ROWS_SHOWN, _NUM_WORST_SHOWN = 8, 3


def show_comparison(console: Console, words: Words) -> None:
    """The two artifacts, their errors by projection, and the blocks where they differ most."""
    left, right = words["artifacts"]
    rows: list[tuple[str, ...]] = [(label, of(left), of(right)) for label, of in _ROWS]
    if words["measured_against_source"]:
        rows += [(label, *(_least(one, key) for one in words["figures"])) for label, key in _FIGURES]
    rows = [row for row in rows if row[1] or row[2]]
    print_table(console, ("", left["name"], right["name"]), rows)
    by = (
        "measured against the source"
        if words["measured_against_source"]
        else "as the conversions recorded them"
    )
    console.print(f"\nrelative errors, {by}")
    errors = [("all", *(_number_comparison(one["relative_error"]) for one in words["artifacts"]), "")]
    errors += [
        (PROJECTIONS.get(role, role), *(_number_comparison(value) for value in pair), _ratio(*pair))
        for role, pair in words["projections"].items()
    ]
    errors[0] = (*errors[0][:3], _ratio(*(one["relative_error"] for one in words["artifacts"])))
    print_table(console, ("projection", "first", "second", "second / first"), errors)
    if words["blocks"]:
        console.print("\nwhere they differ most")
        print_table(console, ("block", "projection", "first", "second"), [_row(one) for one in _top(words)])
    for one in words["notes"]:
        console.print(f"\nnote: {one}")


def _top(words: Words) -> list[Words]:
    return list(words["blocks"][:_NUM_ROWS_SHOWN])


def _row(one: Words) -> tuple[str, ...]:
    projection = PROJECTIONS.get(one["projection"], one["projection"])
    return (one["block"], projection, *(_number_comparison(value) for value in one["relative_errors"]))


def _number_comparison(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.5f}"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.3f}" if first and second is not None and math.isfinite(second / first) else "-"


def _least(figures: Words, key: str) -> str:
    values = [one[key] for one in figures.values() if one[key] is not None]
    return f"{min(values):.5g}" if values else "-"


def _otherwise(one: Words) -> str:
    return "; ".join(f"{len(names)} blocks {what}" for what, names in one["otherwise"].items())


def _ranks(one: Words) -> str:
    sizes = one["rank_bytes"].values()
    if not sizes:
        return ""
    copies = f", {one['redundant_experts']} copies" if one["redundant_experts"] else ""
    return f"tp {one['tp']}, ep {one['ep']}{copies}; at most {human_bytes(max(sizes))} each"


def _worst(one: Words) -> str:
    """The blocks and projections that lost most."""
    listed = one["worst"][:_NUM_WORST_SHOWN]
    return "; ".join(
        f"{w['block']} {w['projection']} {_number_comparison(w['relative_error'])}" for w in listed
    )


def _served(one: Words) -> str:
    if one["vllm_obstacles"]:
        return f"no: {'; '.join(one['vllm_obstacles'])}"
    return "yes"


_ROWS: tuple[tuple[str, Any], ...] = (
    ("schema", lambda one: one["schema"]),
    ("what it is", lambda one: one["description"]),
    ("but", _otherwise),
    ("left blocks", lambda one: str(len(one["left_blocks"]) or "")),
    ("bits per weight", lambda one: f"{one['bits_per_weight']:g}"),
    ("quantizer", lambda one: one["quantizer"]),
    ("conversion", lambda one: ", ".join(one["conversion"])),
    ("experts", lambda one: human_bytes(one["expert_bytes"])),
    ("all files", lambda one: human_bytes(one["num_bytes"])),
    ("parameters", lambda one: f"{one['dtype']}, {one['input_schema']} activations"),
    ("layout", lambda one: one["layout"]),
    ("target", lambda one: one["target"] if one["layout"] == "kernel" else "every GPU"),
    ("ranks", _ranks),
    (f"{ENGINE.name} serves it", _served),
    ("worst blocks", _worst),
)
_FIGURES = (("least SQNR (dB)", "least_sqnr_db"), ("least cosine", "least_cosine"))


def show_page(console: Console, words: Words) -> None:
    """Where the page is."""
    verification = words["verification"]
    if verification is not None:
        console.print("PASS" if verification["passed"] else "FAIL  the page says what was found")
    usage = words["usage"]
    if usage is not None and usage["experts_read"] < usage["experts"]:
        console.print(f"codes were counted over {usage['experts_read']} of {usage['experts']} experts")
    console.print(f"The page is in {words['page']}.")


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
            ("serve", words["serve_command"] or f"{ENGINE.name} has no start for these ranks"),
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
            phrases.served_param_dtypes(schema),
        )
        for schema in words["presets"]
    ]
    console.print()
    print_table(
        console,
        ("schema", "bits per weight", "what it is", f"--layout checkpoint runs in {ENGINE.release}"),
        rows,
    )
    short = words["shorthand"]
    console.print(f"\n{short['name']}: {short['description']}")
    print_facts(
        console,
        (("  bits per weight", short["bits_per_weight"]), (f"  in {ENGINE.name}", short["stock_vllm"])),
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
    _SHOW[words["kind"]](console, printable_document(words))
