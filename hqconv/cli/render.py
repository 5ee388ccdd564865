"""Terminal output: documents as tables and short texts."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from hqconv.artifact.error_summary import summarize_errors
from hqconv.cli.output import printable_document
from hqconv.cli.progress_bar import human_bytes, human_rate, human_seconds
from hqconv.errors import NUM_SHOWN, number_text, plural
from hqconv.formats.source_format import PLAIN
from hqconv.reports.documents import Words as Document
from hqconv.reports.ranking import DECODE, PREFILL
from hqconv.schemas.activation import Activation
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GPUS, SHOWN_GPUS, TARGETS
from hqconv.schemas.grid import EVEN
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS
from hqconv.verification.result import OF_ANOTHER_SOURCE

PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}


_GAP = 2  # columns of space after a cell


def _in_pieces(text: str, room: int) -> str:
    """Break words longer than `room` after a dot or a slash, so that names and paths are not cut inside a part."""

    def pieces(word: str) -> str:
        lines = [""]
        for piece in re.split(r"(?<=[./])", word):
            if lines[-1] and len(lines[-1]) + len(piece) > room:
                lines.append("")
            lines[-1] += piece
        return "\n".join(lines)

    return re.sub(rf"\S{{{room + 1},}}", lambda match: pieces(match[0]), text)


def _longest(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _fitted(rows: list[list[str]], width: int) -> tuple[list[list[str]], list[int]]:
    """Fit a table into `width`: return its rows, long words of the widest columns broken, and its column widths.

    Lines are broken between words first, where a column has the most room for it.
    """
    columns = [list(cells) for cells in zip(*rows, strict=True)]
    room = width - _GAP * (len(columns) - 1)
    least = [max(map(_longest, cells)) for cells in columns]
    for _ in columns:
        excess, widest = sum(least) - room, max(range(len(columns)), key=least.__getitem__)
        if excess <= 0:
            break
        columns[widest] = [_in_pieces(cell, max(least[widest] - excess, 8)) for cell in columns[widest]]
        least[widest] = max(map(_longest, columns[widest]))
    widths = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    while sum(widths) > room and (slack := max(w - m for w, m in zip(widths, least, strict=True))) > 0:
        index = next(i for i, (w, m) in enumerate(zip(widths, least, strict=True)) if w - m == slack)
        widths[index] -= 1
    return [list(cells) for cells in zip(*columns, strict=True)], widths


def print_facts(console: Console, rows: Iterable[tuple[str, Any]]) -> None:
    """Print rows of label and value in two columns; skip rows without a value."""
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    shown = [(label, str(value)) for label, value in rows if value not in (None, "")]
    room = console.width - max((len(label) for label, _ in shown), default=0) - _GAP
    for label, value in shown:
        table.add_row(label, _in_pieces(value, max(room, 8)))
    console.print(table)


def print_table(console: Console, headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table. Numbers are right-aligned; long cells are folded between words, never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    (head, *body), widths = _fitted([[*headers], *([str(cell) for cell in row] for row in rows)], console.width)
    for index, header in enumerate(head):
        numeric = all(row[index][:1].isdigit() for row in body)
        justify: Literal["right", "left"] = "right" if numeric else "left"
        table.add_column(header, justify=justify, overflow="fold", width=widths[index])
    for row in body:
        table.add_row(*row)
    console.print(table)


TableRows = tuple[tuple[str, ...], list[tuple[Any, ...]]]
NUM_ROWS_SHOWN, NUM_FINDINGS_SHOWN = 10, 20


def show_recipes(console: Console, document: Document) -> None:
    """Print the recipes and schema files that come with hqconv, and their folder."""
    rows = [(one["option"], one["description"]) for key in ("recipes", "schemas") for one in document[key]]
    print_table(console, ("option of convert", "description"), rows)
    console.print(
        f"\nThe files are in {document['folder']}. A file of the same name in the current folder takes precedence."
    )


def show_report(console: Console, document: Document) -> None:
    """Print checks, findings and measurements, and a final PASS or FAIL line with the reason."""
    for name, check in document["checks"].items():
        status = check["status"].upper()
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        console.print(f"{name:8} {status} in {human_seconds(check['seconds'])}{reason}")
        for note in check["notes"]:
            console.print(f"         {note}")
        _findings(console, check["findings"])
    for title, (headers, rows) in _tables(document["checks"]):
        console.print(f"\n{title}")
        print_table(console, headers, rows)
    console.print()
    console.print(verdict(document))


def verdict(document: Document) -> str:
    """PASS or FAIL with the reason, on one line."""
    checks = document["checks"]
    failed = [f"{name}: {_first(check)}" for name, check in checks.items() if check["status"] == "fail"]
    if failed:
        return "FAIL  " + "; ".join(failed)
    ran = [name for name, check in checks.items() if check["status"] == "pass"]
    if not document["passed"]:
        return "FAIL  no check could run"
    against = f" against {document['source']}" if document.get("source") else ", without the source"
    skipped = [name for name, check in checks.items() if check["status"] == "skipped"]
    return f"PASS  {', '.join(ran)}{against}" + (f"; skipped: {', '.join(skipped)}" if skipped else "")


def _first(check: Document) -> str:
    finding, count = check["findings"][0], len(check["findings"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{finding['what'].rstrip('.')} ({finding['where']}){more}"


def _findings(console: Console, findings: list[Document]) -> None:
    is_other = bool(findings) and findings[0]["what"] in OF_ANOTHER_SOURCE
    num_shown = 1 if is_other else NUM_FINDINGS_SHOWN
    for finding in findings[:num_shown]:
        console.print(f"  ✗ {finding['where']}: {finding['what']}")
        for label in ("expected", "found"):
            if finding[label]:
                console.print(f"      {label}: {finding[label]}")
    if len(findings) > num_shown:
        console.print(f"  … {len(findings) - num_shown} more{' that follow from it' * is_other}; --json lists all")


def show_push(console: Console, document: Document) -> None:
    """Print the result of `hqconv push`."""
    if not document["num_files"]:
        console.print(f"{document['repo']} already holds the artifact, at commit {document['commit']}.")
        return
    uploaded = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    console.print(f"{document['repo']} holds the artifact, at commit {document['commit']}; uploaded: {uploaded}.")
    console.print(f"sha256 of hqconv.json: {document['manifest_sha256']}")


def show_publication(console: Console, document: Document) -> None:
    """Print the steps of `hqconv publish` that ran, and a last line about the repo."""
    place = document["repo"] + (f", branch {document['branch']}," if document["branch"] else "")
    if document["was_published"]:
        console.print(f"{place} holds the artifact of this request and source, at commit {document['commit']}.")
        console.print("Nothing to do.")
        return
    steps = (("converted", _show_summary), ("verified", show_report), ("pushed", show_push))
    for key, show_step in steps:
        if document[key] is not None:
            show_step(console, document[key])
            console.print()
    if document["commit"] is None:
        console.print(f"Nothing was published to {place}.")


def _tables(checks: Document) -> Iterable[tuple[str, TableRows]]:
    weights = checks.get("weights", {}).get("measured", {})
    kernel = checks.get("kernel", {}).get("measured", {})
    if (rows := _weight_rows(weights))[1]:  # without a source there are no errors to show
        yield "weights, decoded from the kernel layout, against the source (worst first)", rows
    if kernel:
        yield "kernel, relative errors (worst first)", _kernel_rows(kernel)


def _weight_rows(measured: Document) -> TableRows:
    rows = [
        (layer, PROJECTIONS.get(projection, projection), figures)
        for layer, projections in measured.items()
        for projection, figures in projections.items()
        if isinstance(figures, Mapping) and "relative_error" in figures
    ]
    rows.sort(key=lambda row: -_rank(row[2]["relative_error"]))
    headers = ("layer", "projection", "relative error", "SQNR (dB)", "cosine", "worst group")
    return headers, [
        (layer, projection, *(_number(f.get(key)) for key in ("relative_error", "sqnr_db", "cosine", "worst_group")))
        for layer, projection, f in rows[:NUM_ROWS_SHOWN]
    ]


def _kernel_rows(measured: Document) -> TableRows:
    layers = sorted(measured, key=lambda layer: -_rank(measured[layer]["kernel"]))
    headers = (
        *("layer", "kernel vs decoded", "vs rounded activations", "worst channel", "output vs source"),
        "tokens routed by",
    )
    return headers, [
        (
            layer,
            _number(measured[layer]["kernel"]),
            _number(measured[layer].get("rounded_kernel")),
            _number(measured[layer]["channel"]),
            _number(measured[layer].get("against_source")),
            measured[layer]["routed_by"],
        )
        for layer in layers[:NUM_ROWS_SHOWN]
    ]


def _rank(error: float | None) -> float:
    """Sort key of an error: an error that is no number, as of weights that are NaN, is the worst."""
    return math.inf if error is None or math.isnan(error) else error


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("relative_error")
    return "-" if value is None else f"{value:.4f}"


def show_page(console: Console, document: Document) -> None:
    """Print the path of the report."""
    verification = document["verification"]
    if verification is not None:
        console.print("PASS" if verification["passed"] else "FAIL  the page lists the findings")
    console.print(f"The page is in {document['page']}.")


_WIDE = 500  # columns when stdout is not a terminal: nothing is wrapped


class _Console(Console):
    """rich's console, but a broken pipe is raised to the caller: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _layers(console: Console, runs: Iterable[Mapping[str, Any]]) -> None:
    headers = ("layers", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    rows = (
        (
            run["name"],
            run["num_blocks"],
            run["num_experts"],
            run["hidden_size"],
            run["intermediate_size"],
            run["top_k"],
            activation_text(run),
            run["source_dtype"] if run["source_format"] == PLAIN.name else run["source_format"],
        )
        for run in runs
    )
    console.print()
    print_table(console, headers, rows)


def _errors(console: Console, summary: Mapping[str, Mapping[str, Any]]) -> None:
    if summary:
        headers = ("relative error", "min", "median", "max", "worst layer")
        rows = (
            (PROJECTIONS.get(p, p), f"{e['min']:.5f}", f"{e['median']:.5f}", f"{e['max']:.5f}", e["worst_block"])
            for p, e in summary.items()
        )
        console.print()
        print_table(console, headers, rows)


def _show_plan(console: Console, document: Document) -> None:
    """Print the plan of a dry run."""
    converted = f"{document['family']} ({document['family_chosen_because']})"
    memory = (
        f"{document['peak_memory_bytes'] / 2**20:.0f} MiB: {plural(document['num_workers'], 'worker')} with at most "
    )
    memory += f"{document['worker_bytes'] / 2**20:.0f} MiB each, on {document['device']}, plus memory of libraries"
    print_facts(
        console,
        (
            ("source", source_text(document["source"])),
            ("family", converted),
            ("schema", schema_text(document["schema"])),
            ("but", otherwise_text(document)),
            ("conversion", conversion_text(document)),
            ("quantizer", quantizer_text(document)),
            ("for", target_text(document)),
            ("tensors", tensors_text(document["tensors"])),
            ("dropped", dropped_text(document["tensors"])),
            ("memory", memory),
            ("output", f"{document['out']}: {human_bytes(document['num_bytes_out'])}"),
            ("", ranks_text(document["rank_bytes"])),
            ("GPU memory", gpu_memory_text(document)),
        ),
    )
    _layers(console, document["blocks"])
    console.print()
    print_table(console, ("files", "count", "size"), _file_rows(document))
    for kind in ("warning", "note"):
        for text in document[f"{kind}s"]:
            console.print(f"\n{kind}: {text}")
    console.print("\nDry run: nothing was written.")


def _file_rows(document: Document) -> list[tuple[str, int, str]]:
    """Rows of the output files: rank files in one row, ordinary shards in another."""
    kinds: dict[str, list[int]] = {}
    for file in document["files"]:
        folder = file["path"].rpartition("/")[0]
        kind = f"{folder.split('/')[0]}/tpT-epP/*.safetensors" if folder else "*.safetensors"
        kinds.setdefault(kind, []).append(file["size_bytes"])
    rows = [(kind, len(sizes), human_bytes(sum(sizes))) for kind, sizes in kinds.items()]
    return [*rows, ("copied from the source", len(document["other_files"]), "")] if document["other_files"] else rows


def _show_summary(console: Console, document: Document) -> None:
    """Print the summary of a finished conversion."""
    resumed = document["num_groups_resumed"]
    speed = "" if resumed else f"{human_rate(document['num_bytes_in'] / max(document['seconds'], 1e-9))}, "
    ratio = document["num_bytes_out"] / max(document["num_bytes_in"], 1)
    print_facts(
        console,
        (
            ("schema", f"{document['schema']}, {document['layout']} layout"),
            ("but", otherwise_text(document)),
            ("conversion", conversion_text(document)),
            ("quantizer", quantizer_text(document)),
            ("requantized", requantized_text(document["requantized"])),
            ("scales", scale_changes_text(document["largest_scale_change"])),
            ("layers", f"{document['num_blocks']}, for {plural(document['num_ranks'], 'rank')}"),
            (
                "size",
                f"{human_bytes(document['num_bytes_in'])} → {human_bytes(document['num_bytes_out'])} ({ratio:.3f})",
            ),
            ("resumed", resumed_text(document)),
            ("time", f"{human_seconds(document['seconds'])}, {speed}{plural(document['num_workers'], 'worker')}"),
        ),
    )
    _errors(console, summarize_errors(document["errors"]))
    console.print(f"\nsha256 of hqconv.json: {document['manifest_sha256']}")
    out = shlex.quote(document["out"])
    console.print(f"The artifact is in {document['out']}; see it with: hqconv inspect {out}")
    if document["serve_command"] and not document.get("over_max_error"):
        console.print(f"Serve it with: {document['serve_command']}")


def _show_source(console: Console, document: Document) -> None:
    dtypes = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in document["bytes_by_dtype"].items())
    rows = [("source", source_text(document)), ("model type", document["model_type"]), ("dtypes", dtypes)]
    rows.append(("quantization", document["quant_method"]))
    if not document["convertible"]:
        print_facts(console, [*rows, ("convertible", f"no: {document['obstacle']}")])
        return
    rows.append(("family", f"{document['family']} ({document['family_chosen_because']})"))
    rows.append(("direct", ", ".join(document["direct_schemas"])))
    rows += [("tensors", tensors_text(document["tensors"])), ("dropped", dropped_text(document["tensors"]))]
    rows.append(("attention", heads_text(document["attention"])))
    print_facts(console, rows)
    _layers(console, document["blocks"])
    by_sizes: dict[tuple[str, str], list[str]] = {}
    for name, sizes in document["tp_sizes"].items():
        dealt = document["tp_sizes_of_groups"][name]
        key = ", ".join(map(str, sizes)) or "none", ", ".join(map(str, dealt))
        by_sizes.setdefault(key, []).append(name)
    console.print()
    headers = ("schemas", "--tp sizes that work", "and with --tp-split groups")
    print_table(console, headers, ((", ".join(n), *s) for s, n in by_sizes.items()))
    _gpu_memory_table(console, document["gpu_memory"], document["gpu_memory_of_groups"])
    for text in document["warnings"]:
        console.print(f"\nwarning: {text}")


def _gpu_memory_table(
    console: Console, gpu_memory: Mapping[str, Mapping[str, int]], of_groups: Mapping[str, Mapping[str, int]]
) -> None:
    """Print the weights on each GPU by schema and TP size, and the memory of known GPUs.

    of_groups: of sizes that need `--tp-split groups`, which are marked.
    """
    sizes = sorted({int(tp) for of_schema in (*gpu_memory.values(), *of_groups.values()) for tp in of_schema})
    sizes = [size for size in sizes if size & (size - 1) == 0]
    if not sizes:
        return
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, of_schema in gpu_memory.items():
        marked = {tp: f"{about_gb(size)} *" for tp, size in of_groups.get(name, {}).items()}
        shown = {tp: about_gb(size) for tp, size in of_schema.items()} | marked
        rows.setdefault(tuple(shown.get(str(tp), "-") for tp in sizes), []).append(name)
    console.print()
    headers = ("weights on each GPU", *(f"--tp {tp}" for tp in sizes))
    print_table(console, headers, ((", ".join(names), *cells) for cells, names in rows.items()))
    if any(cell.endswith("*") for cells in rows for cell in cells):
        console.print("* with --tp-split groups")
    gpus = (f"{name} {GPUS[name].memory_gb} GB" for name in SHOWN_GPUS)
    console.print(f"{_COUNTED}\nGPUs: {', '.join(gpus)}.")


def _show_artifact(console: Console, document: Document) -> None:
    revision = f" at {document['source']['revision']}" if document["source"]["revision"] else ""
    missing = document["missing_or_resized_files"]
    size = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    damage = f"{plural(len(missing), 'file')} missing or resized: {', '.join(missing[:5])}"
    print_facts(
        console,
        (
            ("artifact", f"{document['folder']}: {size}"),
            ("source", f"{document['source']['name']}{revision}"),
            *(("", f"made from {ancestor_text(step)}") for step in document["derived_from"]),
            ("family", document["family"]),
            ("schema", schema_text(document["schema"])),
            ("but", otherwise_text(document)),
            ("conversion", conversion_text(document)),
            ("quantizer", quantizer_text(document)),
            ("requantized", requantized_text(document["requantized"])),
            ("scales", scale_changes_text(document["largest_scale_change"])),
            ("for", target_text(document)),
            ("activations", input_scales_text(document["input_scales"])),
            ("experts", ranks_text(document["rank_bytes"])),
            ("GPU memory", gpu_memory_text(document)),
            ("tensors", ", ".join(f"{n} {kind}" for kind, n in document["tensors"].items())),
            ("serve", document["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
            ("made by", f"hqconv {document['hqconv_version']}, humming-kernels {document['humming_kernels_version']}"),
            ("manifest", f"sha256 {document['manifest_sha256']}"),
            ("damaged", damage if missing else ""),
            ("altered", document["altered_manifest"] or ""),
        ),
    )
    _layers(console, document["blocks"])
    _errors(console, document["quantization_error"])
    for text in (*document["warnings"], *document["notices"]):
        console.print(f"\nwarning: {text}")


def _show_unfinished(console: Console, document: Document) -> None:
    console.print(f"{document['folder']} holds an unfinished conversion, not an artifact yet.")
    print_facts(
        console, (("finished", plural(document["num_groups_done"], "output unit")), ("what to do", document["remedy"]))
    )


def _show_importance(console: Console, document: Document) -> None:
    """Print the result of `hqconv importance`."""
    tensors, tokens = plural(document["num_tensors"], "tensor"), plural(document["num_tokens"], "token")
    console.print(f"{document['out']}: {tensors} from {tokens}")
    if document["per_expert"] and (count := document["num_experts_below_min_tokens"]):
        console.print(f"{plural(count, 'expert')} saw too few tokens and got the row of the layer")
    for name in document["layers_without_router_weights"]:
        console.print(f"{name}: the router's weights were not seen; every token counts the same")
    quantizer = "gptq" if document["hessian"] else "mse"
    console.print(f"Use it with: hqconv convert … --quantizer {quantizer} --importance {shlex.quote(document['out'])}")


def _show_allocation(console: Console, document: Document) -> None:
    """Print the totals of an allocation, the layers by schema, and one schema for all layers to compare with."""
    chosen, budget = document["chosen"], document["budget"]
    of = "all files of experts" if budget["objective"] == "size" else "the experts that a token reads"
    counts = Counter(layer["chosen"] for layer in document["layers"].values())
    least = number_text(document["least_possible_error"], chosen["relative_error"])
    proof = "no choice within the budget has less" if document["is_optimal"] else f"no choice has less than {least}"
    print_facts(
        console,
        (
            ("budget", f"{human_bytes(budget['limit_bytes'])} of {of}"),
            ("chosen", f"{human_bytes(chosen['size_bytes'])}, {chosen['bits_per_weight']:.4f} bits per weight"),
            ("error", f"{chosen['relative_error']:.4g} (root mean square of all layers); {proof}"),
            ("layers", ", ".join(f"{name}: {count}" for name, count in counts.most_common())),
        ),
    )
    rows = [
        (name, f"{point['bits_per_weight']:.4f}", human_bytes(point["size_bytes"]), f"{point['relative_error']:.4g}")
        for name, point in document["uniform"].items()
    ]
    if rows:
        console.print()
        print_table(console, ("one schema for all layers", "bits per weight", "size", "error"), rows)
    console.print(f"\nUse the recipe with: hqconv convert … --config {shlex.quote(document['out'])}")


def _show_evaluation(console: Console, document: Document) -> None:
    """Print the figures of `hqconv evaluate`."""
    kl, sides = document["kl"], [document["source_figures"], document["artifact_figures"]]
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.2g}"
    print_facts(
        console,
        (
            ("artifact", f"{document['artifact']}, {document['schema']}"),
            ("source", document["source"]["name"]),
            ("text", f"{document['text']['name']}: {plural(document['num_predictions'], 'predicted token')}"),
            ("perplexity", " → ".join(f"{side['perplexity']:.4f}" for side in sides)),
            ("log-likelihood", " → ".join(f"{-side['mean_nll']:.5f}" for side in sides) + " nats per token"),
            ("KL divergence", f"{kl['mean']:.3g}{error} nats per token"),
            ("", f"median {kl['median']:.3g}, 90 % {kl['p90']:.3g}, 99 % {kl['p99']:.3g}, largest {kl['max']:.3g}"),
            ("same top token", f"{100 * document['top1_agreement']:.2f} %"),
        ),
    )
    console.print("\nActivations were not quantized.")


def _show_warm(console: Console, document: Document) -> None:
    """Print the result of `hqconv warm`."""
    left_out, gpu = ", ".join(document["activations_left_out"]), document["gpu"]
    print_facts(
        console,
        (
            ("kernels", f"{document['num_kernels']} needed, {document['num_compiled']} compiled now"),
            ("for", f"{gpu['name']}, {plural(gpu['sm_count'], 'SM')}; {document['asking']['gemm_type']}"),
            ("compiler", document["compiler"]),
            ("left out", f"activation {left_out}: compiled at the first start of the server" if left_out else ""),
            ("size", human_bytes(document["num_bytes"])),
            ("time", human_seconds(document["seconds"])),
        ),
    )
    console.print(f"\nThe kernels are in {document['folder']}.")
    by_itself = document["variable"].endswith("=1")  # the folder beside the artifact
    console.print(
        f"{'A server of this user takes them by itself, any other with' if by_itself else 'Start the server with'} "
        f"{document['variable']}{'' if by_itself else ' to use them'}."
    )


def _show_schemas(console: Console, document: Document) -> None:
    """Print the weight presets, the shorthands and the activation schemas."""
    rows = [
        (schema["name"], f"{schema['bits_per_weight']:g}", schema["description"], served_param_dtypes_text(schema))
        for schema in document["presets"]
    ]
    console.print()
    print_table(
        console, ("schema", "bits per weight", "description", f"--layout checkpoint runs in {ENGINE.release}"), rows
    )
    for short in (document["shorthand"], document["scaled_shorthand"]):
        console.print(f"\n{short['name']}: {short['description']}")
        print_facts(
            console, (("  bits per weight", short["bits_per_weight"]), (f"  in {ENGINE.name}", short["stock_vllm"]))
        )
    console.print("\nFILE.toml: the fields of Humming's HummingWeightSchema.\n")
    inputs = [
        (one["name"], one["description"], targets_text(one["targets"]), schemas_text(one["schemas"]))
        for one in document["input_schemas"]
    ]
    print_table(console, ("--input-schema", "description", "targets", "weight schemas"), inputs)
    console.print("\nFILE.toml: the fields of Humming's HummingInputSchema. Not every pair runs on every target.")


def _show_ranking(console: Console, document: Document) -> None:
    """Print the schemas for one GPU in their order, the recommended one, and the refused ones."""
    gpu, target = document["gpu"], document["target"]
    named = target if gpu == target else f"{gpu} ({target})"
    inputs = document["input_schema"]
    console.print(
        f"Schemas on {named} with {inputs} activations and {document['dtype']} parameters. {document['rule']}"
    )
    rows = []
    before = None
    for one in document["schemas"]:
        times, errors, size = one["microseconds"], one["errors"], one["size_class"]
        rows.append(
            (
                "" if size == before else f"up to {size:g}",
                one["name"] + " *" * (one["caution"] is not None),
                f"{one['bits_per_weight']:.4g}",
                *(f"{errors['gaussian'][quantizer]:.4f}" for quantizer in ("rtn", "mse")),
                *(f"{errors[kind]['rtn']:.4f}" for kind in ("student_t", "outlier_columns")),
                *(f"{times[str(count)]:.0f}" if str(count) in times else "–" for count in (DECODE, PREFILL)),
            )
        )
        before = size
    columns = ("bits", "schema", "stored", "error, rtn", "mse", "heavy tails, rtn", "outliers, rtn")
    console.print()
    print_table(console, (*columns, f"{DECODE} tokens, µs", f"{PREFILL} tokens, µs"), rows)
    cautions = dict.fromkeys(one["caution"] for one in document["schemas"] if one["caution"])
    for text in cautions:
        console.print(f"* {text}")
    if document["recommended"] is not None:
        console.print(f"\nTake {document['recommended']}. {document['reason']}")
    console.print(f"\n{speed_text(document['speed'], gpu)}")
    if document["refused"]:
        console.print(f"Do not run so: {', '.join(document['refused'])} (--json has the reasons).")


def speed_text(run: Document | None, gpu: str) -> str:
    """Origin of the speeds of a ranking, and whether it is another GPU model than the one asked for."""
    if run is None:
        return "Speeds were not measured on this architecture (–)."
    other = "" if run["gpu_name"] == gpu else " Another GPU of the architecture has other speeds."
    origin = f"{run['gpu']}, {run['date']}, {run['source']}"
    return f"Speeds: {origin}; {run['timed']} ({run['model']}). – was not measured.{other}"


_SHOW = {
    "plan": _show_plan,
    "summary": _show_summary,
    "source": _show_source,
    "artifact": _show_artifact,
    "unfinished": _show_unfinished,
    "schemas": _show_schemas,
    "ranking": _show_ranking,
    "recipes": show_recipes,
    "report": show_report,
    "page": show_page,
    "warm": _show_warm,
    "publication": show_publication,
    "push": show_push,
    "importance": _show_importance,
    "allocation": _show_allocation,
    "evaluation": _show_evaluation,
}


def show(document: Document) -> None:
    """Print a document as tables, by its `kind`."""
    console = _Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    _SHOW[document["kind"]](console, printable_document(document))


def ranks_text(rank_bytes: Mapping[str, int]) -> str:
    """`8 ranks, 69.21 GB each`, or the smallest and the largest size."""
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    size = f"{human_bytes(least)} each" if least == most else f"{human_bytes(least)} to {human_bytes(most)}"
    return f"{plural(len(rank_bytes), 'rank')}, {size}"


_COUNTED = "KV cache, activations and CUDA graphs need room besides."


def about_gb(num_bytes: int) -> str:
    """`0.4 GB`, `35 GB`: a size without precision that a plan does not have."""
    size = num_bytes / 1e9
    if size < 0.1:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{size:.0f} GB" if size >= 10 else f"{size:.1f} GB"


def gpu_memory_text(document: Mapping[str, Any]) -> str:
    """Weights on each GPU of a plan, and what is counted."""
    memory = document["gpu_memory"]
    if memory is None:
        return ""
    parts = f"experts {about_gb(memory['experts'])}, other tensors {about_gb(memory['other_tensors'])}"
    return f"about {about_gb(memory['total'])} of weights on each GPU ({parts}). {_COUNTED}"


def heads_text(document: Mapping[str, int]) -> str:
    """`32 heads, 4 KV heads`; "" where the config has no numbers."""
    labels = {"num_heads": "heads", "num_kv_heads": "KV heads"}
    return ", ".join(f"{count} {labels[key]}" for key, count in document.items())


def schema_text(document: Mapping[str, Any]) -> str:
    """`mxfp4: float4e2m1, float8e8m0 scale per group 32; 4.25 bits per weight`."""
    return f"{document['name']}: {document['description']}; {document['bits_per_weight']:g} bits per weight"


def activation_text(run: Mapping[str, Any]) -> str:
    """`silu (gated)`, `situ (beta 4, linear_beta 25, gated)`; marks activations known by name only."""
    found, gated = Activation.from_dict(run), bool(run["gated"])
    notes = ("gated",) * gated + ("known by name only",) * (not found.is_known(gated))
    return found.describe(*notes)


def otherwise_text(document: Mapping[str, Any]) -> str:
    """`fp8, a16 activations in 2 layers; 1 layer left as in the source`; "" if all layers have one schema."""
    parts = [f"{what} in {_num_layers(len(names))}" for what, names in document["otherwise"].items()]
    if document["left_blocks"]:
        parts.append(f"{_num_layers(len(document['left_blocks']))} left as in the source")
    return "; ".join(parts)


def input_scales_text(document: Mapping[str, Mapping[str, float]]) -> str:
    """`static scales: w13 0.0012 to 0.02, w2 0.003`; "" without static scales."""
    each = []
    for gemm, one in document.items():
        ends = dict.fromkeys(f"{end:.3g}" for end in (one["min"], one["max"]))
        each.append(f"{gemm} {' to '.join(ends)}")
    return f"static scales: {', '.join(each)}" if each else ""


def _num_layers(count: int) -> str:
    return plural(count, "layer")


def served_param_dtypes_text(document: Mapping[str, Any]) -> str:
    """Support of the engine for the checkpoint layout of a schema: `yes`, `with bfloat16 only`, or the obstacle."""
    served = document["stock_vllm_param_dtypes"]
    if not served:
        return f"no: {document['stock_vllm_obstacle']}"
    return "yes" if len(served) == len(PARAM_DTYPES) else f"with {' or '.join(served)} only"


def targets_text(found: Sequence[str]) -> str:
    """GPU architectures: `sm80 – sm89`, `from sm89 on`, or a list if the range has gaps."""
    known = [f"sm{number}" for number in TARGETS]
    begin = known.index(found[0])
    if len(found) < 3 or known[begin : begin + len(found)] != [*found]:
        return ", ".join(found)
    return f"from {found[0]} on" if found[-1] == known[-1] else f"{found[0]} – {found[-1]}"


def schemas_text(presets: Sequence[str]) -> str:
    """Names of weight schemas, or `every schema above`."""
    return "every schema above" if len(presets) == len(PRESETS) else ", ".join(presets)


def target_text(document: Mapping[str, Any]) -> str:
    """Layout, dtypes, GPU and ranks of the artifact."""
    parts = [f"{document['layout']} layout", f"{document['dtype']} parameters, {document['input_schema']} activations"]
    if document["layout"] == "kernel":
        parts += [document["target"], f"tp {document['tp']}, ep {document['ep']} ({document['expert_placement']})"]
        if document["tp_split"] != EVEN:
            parts.append(f"TP split {document['tp_split']}")
        if document["redundant_experts"]:
            parts.append(f"{plural(document['redundant_experts'], 'redundant expert')}")
    return ", ".join(parts)


def quantizer_text(document: Mapping[str, Any]) -> str:
    """Scale selection, unless it is round-to-nearest."""
    if document["quantizer"] not in ("mse", "gptq"):
        return ""
    digest = f" (sha256 {document['importance']['sha256'][:12]}…)" if document["importance"] else ""
    if document["quantizer"] == "gptq":
        return f"gptq: errors compensated in other columns, by products of inputs{digest}"
    by = f", weighted by importance{digest}" if digest else ""
    return f"mse: scales of the least squared error{by}"


def source_text(document: Mapping[str, Any]) -> str:
    """`Qwen3-30B-A3B: 18867 tensors, 61.07 GB in 16 files`."""
    revision = f" at {document['revision']}" if document["revision"] else ""
    return (
        f"{document['name']}{revision}: {plural(document['num_tensors'], 'tensor')}, "
        f"{human_bytes(document['num_bytes'])} in {plural(document['num_files'], 'file')}"
    )


def tensors_text(document: Mapping[str, Any]) -> str:
    """Numbers and sizes of converted, copied and dropped tensors."""
    kinds = ("converted", "copied", "dropped")
    return ", ".join(
        f"{document[kind]['num_tensors']} {kind} ({human_bytes(document[kind]['num_bytes'])})" for kind in kinds
    )


def dropped_text(document: Mapping[str, Any]) -> str:
    """Reasons for dropped tensors, one line each for the first few."""
    reasons = list(document["dropped"]["reasons"].items())
    lines = [f"{name}: {reason}" for name, reason in reasons[:NUM_SHOWN]]
    more = len(reasons) - len(lines)
    return "\n".join([*lines, f"… {more} more (--json lists all)"] if more else lines)


def conversion_text(document: Document) -> str:
    """`direct: codes and scales kept (58 layers)` and the like."""
    meaning = {
        "quantized": "quantized",
        "direct": "direct: codes and scales kept",
        "direct, scales rounded": "direct, scales rounded: codes kept, scales in the parameter dtype",
        "requantized": "requantized from exactly decoded float32",
    }
    found = document["conversion"].items()
    return "; ".join(f"{meaning.get(kind, kind)} ({plural(n, 'layer')})" for kind, n in found)


def requantized_text(counts: Mapping[str, int]) -> str:
    """Requantized matrices of a quantized source, and the number of scale groups without any error."""
    if not counts.get("num_groups"):
        return ""
    text = f"{counts['num_exact_groups']} of {counts['num_groups']} requantized scale groups are without any error"
    return f"{plural(counts['num_matrices'], 'matrix', 'matrices')} requantized; {text}"


def scale_changes_text(changes: Mapping[str, float]) -> str:
    """Largest changes of rounded scales: `rounded, changed by at most 0.387% (w1), 0.385% (w2)`."""
    each = (f"{value:.3%} ({name})" for name, value in changes.items())
    return f"rounded, changed by at most {', '.join(each)}" if changes else ""


def resumed_text(document: Document) -> str:
    """Work that an earlier run had finished."""
    if document["was_finished"]:
        return "the artifact was already finished: nothing to do"
    if document["replaced_because"]:
        return f"an artifact was there and is replaced: {document['replaced_because']}"
    num_groups = document["num_groups_resumed"]
    return f"already finished: {plural(num_groups, 'output unit')}" if num_groups else ""


def ancestor_text(document: Document) -> str:
    """Artifact from which this artifact was made."""
    source = document["source"]
    revision = f" at {source['revision']}" if source["revision"] else ""
    return f"{document['schema_name']} of {source['name']}{revision} (hqconv.json {document['manifest_sha256'][:12]}…)"
