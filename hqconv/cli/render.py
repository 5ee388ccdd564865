"""Terminal output: documents as tables and short texts."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hqconv.artifact.error_summary import summarize_errors
from hqconv.cli.output import printable_document
from hqconv.cli.progress_bar import human_rate, human_seconds
from hqconv.errors import NUM_SHOWN, number_text, plural
from hqconv.formats.source_format import PLAIN
from hqconv.reports.ranking import DECODE, PREFILL
from hqconv.reports.texts import (
    PROJECTIONS,
    Document,
    activation_text,
    conversion_text,
    human_bytes,
    name_text,
    otherwise_text,
    quantizer_text,
    ranks_text,
    schema_text,
    target_text,
)
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GPUS, SHOWN_GPUS, TARGETS
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS
from hqconv.verification.result import OF_ANOTHER_SOURCE

_WIDE = 500  # columns when stdout is not a terminal: nothing is wrapped
_GAP = 2  # columns of space after a cell
_NUM_ROWS_SHOWN, _NUM_FINDINGS_SHOWN = 10, 20
_COUNTED = "KV cache, activations and CUDA graphs need room besides."

Parts = Iterator[str | Table]  # what is printed, one after the other


class _Console(Console):
    """rich's console, but a broken pipe is raised to the caller: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(document: Document) -> None:
    """Print a document as tables, by its `kind`."""
    console = _Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    for part in _PARTS[document["kind"]](printable_document(document)):
        console.print(part)


def facts_table(rows: Iterable[tuple[str, Any]]) -> Table:
    """Return rows of label and value in two columns, without those that have no value."""
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value not in (None, ""):
            table.add_row(label, str(value))
    return table


def rows_table(headers: Sequence[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Return a table. Numbers are right-aligned; long cells are folded, never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    body = [[str(cell) for cell in row] for row in rows]
    for index, header in enumerate(headers):
        is_numeric = all(row[index][:1].isdigit() for row in body)
        table.add_column(header, justify="right" if is_numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


# --- the results of commands ---------------------------------------------------------------------------------


def _plan(document: Document) -> Parts:
    mib = {key: f"{document[key] / 2**20:.0f} MiB" for key in ("peak_memory_bytes", "worker_bytes")}
    workers = f"{plural(document['num_workers'], 'worker')} with at most {mib['worker_bytes']} each"
    yield facts_table(
        (
            ("source", _source_text(document["source"])),
            ("family", f"{document['family']} ({document['family_chosen_because']})"),
            ("schema", schema_text(document["schema"])),
            *_conversion_rows(document),
            ("for", target_text(document)),
            ("tensors", _tensors_text(document["tensors"])),
            ("dropped", _dropped_text(document["tensors"])),
            ("memory", f"{mib['peak_memory_bytes']}: {workers}, on {document['device']}, plus memory of libraries"),
            ("output", f"{document['out']}: {human_bytes(document['num_bytes_out'])}"),
            ("", ranks_text(document["rank_bytes"])),
            ("GPU memory", _gpu_memory_text(document)),
        )
    )
    yield from _layers(document["blocks"])
    yield ""
    yield rows_table(("files", "count", "size"), _file_rows(document))
    yield from (f"\n{kind}: {text}" for kind in ("warning", "note") for text in document[f"{kind}s"])
    yield "\nDry run: nothing was written."


def _file_rows(document: Document) -> list[tuple[str, int, str]]:
    """Rows of the output files: rank files in one row, ordinary shards in another."""
    kinds: dict[str, list[int]] = {}
    for file in document["files"]:
        folder = file["path"].rpartition("/")[0]
        kind = f"{folder.split('/')[0]}/tpT-epP/*.safetensors" if folder else "*.safetensors"
        kinds.setdefault(kind, []).append(file["size_bytes"])
    rows = [(kind, len(sizes), human_bytes(sum(sizes))) for kind, sizes in kinds.items()]
    return [*rows, ("copied from the source", len(document["other_files"]), "")] if document["other_files"] else rows


def _summary(document: Document) -> Parts:
    num_in, num_out, seconds = (document[key] for key in ("num_bytes_in", "num_bytes_out", "seconds"))
    speed = "" if document["num_groups_resumed"] else f"{human_rate(num_in / max(seconds, 1e-9))}, "
    yield facts_table(
        (
            ("schema", f"{document['schema']}, {document['layout']} layout"),
            *_conversion_rows(document),
            ("layers", f"{document['num_blocks']}, for {plural(document['num_ranks'], 'rank')}"),
            ("size", f"{human_bytes(num_in)} → {human_bytes(num_out)} ({num_out / max(num_in, 1):.3f})"),
            ("resumed", _resumed_text(document)),
            ("time", f"{human_seconds(seconds)}, {speed}{plural(document['num_workers'], 'worker')}"),
        )
    )
    yield from _errors(summarize_errors(document["errors"]))
    yield f"\nsha256 of hqconv.json: {document['manifest_sha256']}"
    yield f"The artifact is in {document['out']}; see it with: hqconv inspect {shlex.quote(document['out'])}"
    if document["serve_command"] and not document.get("over_max_error"):
        yield f"Serve it with: {document['serve_command']}"


def _source(document: Document) -> Parts:
    dtypes = ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in document["bytes_by_dtype"].items())
    rows = [
        ("source", _source_text(document)),
        ("model type", document["model_type"]),
        ("dtypes", dtypes),
        ("quantization", document["quant_method"]),
    ]
    if not document["convertible"]:
        yield facts_table((*rows, ("convertible", f"no: {document['obstacle']}")))
        return
    heads = {"num_heads": "heads", "num_kv_heads": "KV heads"}
    yield facts_table(
        (
            *rows,
            ("family", f"{document['family']} ({document['family_chosen_because']})"),
            ("direct", ", ".join(document["direct_schemas"])),
            ("tensors", _tensors_text(document["tensors"])),
            ("dropped", _dropped_text(document["tensors"])),
            ("attention", ", ".join(f"{count} {heads[key]}" for key, count in document["attention"].items())),
        )
    )
    yield from _layers(document["blocks"])
    by_sizes: dict[tuple[str, str], list[str]] = {}
    for name, sizes in document["tp_sizes"].items():
        dealt = document["tp_sizes_of_groups"][name]
        by_sizes.setdefault((", ".join(map(str, sizes)) or "none", ", ".join(map(str, dealt))), []).append(name)
    yield ""
    headers = ("schemas", "--tp sizes that work", "and with --tp-split groups")
    yield rows_table(headers, ((", ".join(names), *sizes) for sizes, names in by_sizes.items()))
    yield from _gpu_memory(document["gpu_memory"], document["gpu_memory_of_groups"])
    yield from (f"\nwarning: {text}" for text in document["warnings"])


def _gpu_memory(even: Mapping[str, Mapping[str, int]], of_groups: Mapping[str, Mapping[str, int]]) -> Parts:
    """The weights on each GPU by schema and TP size; sizes that need `--tp-split groups` are marked."""
    sizes = sorted({int(tp) for of_schema in (*even.values(), *of_groups.values()) for tp in of_schema})
    sizes = [size for size in sizes if size & (size - 1) == 0]
    if not sizes:
        return
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, of_schema in even.items():
        shown = {tp: _about_gb(size) for tp, size in of_schema.items()}
        shown |= {tp: f"{_about_gb(size)} *" for tp, size in of_groups.get(name, {}).items()}
        rows.setdefault(tuple(shown.get(str(tp), "-") for tp in sizes), []).append(name)
    yield ""
    headers = ("weights on each GPU", *(f"--tp {tp}" for tp in sizes))
    yield rows_table(headers, ((", ".join(names), *cells) for cells, names in rows.items()))
    if any(cell.endswith("*") for cells in rows for cell in cells):
        yield "* with --tp-split groups"
    gpus = ", ".join(f"{name} {GPUS[name].memory_gb} GB" for name in SHOWN_GPUS)
    yield f"{_COUNTED}\nGPUs: {gpus}."


def _artifact(document: Document) -> Parts:
    missing = document["missing_or_resized_files"]
    size = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    damage = f"{plural(len(missing), 'file')} missing or resized: {', '.join(missing[:NUM_SHOWN])}"
    yield facts_table(
        (
            ("artifact", f"{document['folder']}: {size}"),
            ("source", name_text(document["source"])),
            *(("", f"made from {_ancestor_text(step)}") for step in document["derived_from"]),
            ("family", document["family"]),
            ("schema", schema_text(document["schema"])),
            *_conversion_rows(document),
            ("for", target_text(document)),
            ("activations", _input_scales_text(document["input_scales"])),
            ("experts", ranks_text(document["rank_bytes"])),
            ("GPU memory", _gpu_memory_text(document)),
            ("tensors", ", ".join(f"{count} {kind}" for kind, count in document["tensors"].items())),
            ("serve", document["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
            ("made by", f"hqconv {document['hqconv_version']}, humming-kernels {document['humming_kernels_version']}"),
            ("manifest", f"sha256 {document['manifest_sha256']}"),
            ("damaged", damage if missing else ""),
            ("altered", document["altered_manifest"]),
        )
    )
    yield from _layers(document["blocks"])
    yield from _errors(document["quantization_error"])
    yield from (f"\nwarning: {text}" for text in (*document["warnings"], *document["notices"]))


def _part(document: Document) -> Parts:
    missing, at_work = document["missing"], document["parts_at_work"]
    yield facts_table(
        (
            ("part", document["part"]),
            ("missing", f"{len(missing)} of {plural(document['num_units'], 'output unit')}"),
            ("at work", f"part {', part '.join(at_work)}" if at_work else "no other part"),
            ("what to do", "Convert the other parts; the last one finishes the artifact."),
        )
    )
    yield f"{document['out']} is no artifact yet."


def _unfinished(document: Document) -> Parts:
    yield f"{document['folder']} holds an unfinished conversion, not an artifact yet."
    done = plural(document["num_groups_done"], "output unit")
    yield facts_table((("finished", done), ("what to do", document["remedy"])))


def _layers(runs: Iterable[Mapping[str, Any]]) -> Parts:
    headers = ("layers", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k")
    yield ""
    yield rows_table(
        headers,
        (
            (
                *(run[key] for key in keys),
                activation_text(run),
                run["source_dtype"] if run["source_format"] == PLAIN.name else run["source_format"],
            )
            for run in runs
        ),
    )


def _errors(summary: Mapping[str, Mapping[str, Any]]) -> Parts:
    if summary:
        yield ""
        yield rows_table(
            ("relative error", "min", "median", "max", "worst layer"),
            (
                (PROJECTIONS.get(p, p), *(f"{e[key]:.5f}" for key in ("min", "median", "max")), e["worst_block"])
                for p, e in summary.items()
            ),
        )


def _report(document: Document) -> Parts:
    """Checks, findings and measurements, and a final PASS or FAIL line with the reason."""
    checks = document["checks"]
    for name, check in checks.items():
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        yield f"{name:8} {check['status'].upper()} in {human_seconds(check['seconds'])}{reason}"
        yield from (f"         {note}" for note in check["notes"])
        yield from _findings(check["findings"])
    if rows := _weight_rows(checks.get("weights", {}).get("measured", {})):  # without a source there are no errors
        yield "\nweights, decoded from the kernel layout, against the source (worst first)"
        yield rows_table(("layer", "projection", "relative error", "SQNR (dB)", "cosine", "worst group"), rows)
    if rows := _kernel_rows(checks.get("kernel", {}).get("measured", {})):
        headers = ("kernel vs decoded", "vs rounded activations", "worst channel", "output vs source")
        yield "\nkernel, relative errors (worst first)"
        yield rows_table(("layer", *headers, "tokens routed by"), rows)
    yield f"\n{_verdict(document)}"


def _verdict(document: Document) -> str:
    """PASS or FAIL with the reason, on one line."""
    names: dict[str, list[str]] = {"pass": [], "fail": [], "skipped": []}
    for name, check in document["checks"].items():
        names[check["status"]].append(name)
    if names["fail"]:
        return "FAIL  " + "; ".join(f"{name}: {_first(document['checks'][name])}" for name in names["fail"])
    if not document["passed"]:
        return "FAIL  no check could run"
    against = f" against {document['source']}" if document.get("source") else ", without the source"
    skipped = f"; skipped: {', '.join(names['skipped'])}" if names["skipped"] else ""
    return f"PASS  {', '.join(names['pass'])}{against}{skipped}"


def _first(check: Document) -> str:
    finding, count = check["findings"][0], len(check["findings"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{finding['what'].rstrip('.')} ({finding['where']}){more}"


def _findings(findings: list[Document]) -> Parts:
    is_other = bool(findings) and findings[0]["what"] in OF_ANOTHER_SOURCE
    num_shown = 1 if is_other else _NUM_FINDINGS_SHOWN
    for finding in findings[:num_shown]:
        yield f"  ✗ {finding['where']}: {finding['what']}"
        yield from (f"      {label}: {finding[label]}" for label in ("expected", "found") if finding[label])
    if len(findings) > num_shown:
        yield f"  … {len(findings) - num_shown} more{' that follow from it' * is_other}; --json lists all"


def _weight_rows(measured: Document) -> list[tuple[str, ...]]:
    found = [
        (layer, PROJECTIONS.get(projection, projection), figures)
        for layer, projections in measured.items()
        for projection, figures in projections.items()
        if isinstance(figures, Mapping) and "relative_error" in figures
    ]
    found.sort(key=lambda row: -_rank(row[2]["relative_error"]))
    keys = ("relative_error", "sqnr_db", "cosine", "worst_group")
    return [(*names, *(_number(figures.get(key)) for key in keys)) for *names, figures in found[:_NUM_ROWS_SHOWN]]


def _kernel_rows(measured: Document) -> list[tuple[str, ...]]:
    layers = sorted(measured, key=lambda layer: -_rank(measured[layer]["kernel"]))
    keys = ("kernel", "rounded_kernel", "channel", "against_source")
    return [
        (layer, *(_number(measured[layer].get(key)) for key in keys), measured[layer]["routed_by"])
        for layer in layers[:_NUM_ROWS_SHOWN]
    ]


def _rank(error: float | None) -> float:
    """Sort key of an error: an error that is no number, as of weights that are NaN, is the worst."""
    return math.inf if error is None or math.isnan(error) else error


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("relative_error")
    return "-" if value is None else f"{value:.4f}"


def _page(document: Document) -> Parts:
    if document["verification"] is not None:
        yield "PASS" if document["verification"]["passed"] else "FAIL  the page lists the findings"
    yield f"The page is in {document['page']}."


def _push(document: Document) -> Parts:
    if not document["num_files"]:
        yield f"{document['repo']} already holds the artifact, at commit {document['commit']}."
        return
    uploaded = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    yield f"{document['repo']} holds the artifact, at commit {document['commit']}; uploaded: {uploaded}."
    yield f"sha256 of hqconv.json: {document['manifest_sha256']}"


def _publication(document: Document) -> Parts:
    """The steps that ran, and a last line about the repo."""
    place = document["repo"] + (f", branch {document['branch']}," if document["branch"] else "")
    if document["was_published"]:
        yield f"{place} holds the artifact of this request and source, at commit {document['commit']}."
        yield "Nothing to do."
        return
    steps: tuple[tuple[str, Callable[[Document], Parts]], ...] = (
        ("converted", _summary),
        ("verified", _report),
        ("pushed", _push),
    )
    for key, parts in steps:
        if document[key] is not None:
            yield from parts(document[key])
            yield ""
    if document["commit"] is None:
        yield f"Nothing was published to {place}."


def _importance(document: Document) -> Parts:
    tensors, tokens = plural(document["num_tensors"], "tensor"), plural(document["num_tokens"], "token")
    yield f"{document['out']}: {tensors} from {tokens}"
    if document["per_expert"] and (count := document["num_experts_below_min_tokens"]):
        yield f"{plural(count, 'expert')} saw too few tokens and got the row of the layer"
    for name in document["layers_without_router_weights"]:
        yield f"{name}: the router's weights were not seen; every token counts the same"
    quantizer = "gptq" if document["hessian"] else "mse"
    yield f"Use it with: hqconv convert … --quantizer {quantizer} --importance {shlex.quote(document['out'])}"


def _allocation(document: Document) -> Parts:
    """Totals, the layers by schema, and one schema for all layers to compare with."""
    chosen, budget = document["chosen"], document["budget"]
    of = "all files of experts" if budget["objective"] == "size" else "the experts that a token reads"
    counts = Counter(layer["chosen"] for layer in document["layers"].values())
    least = number_text(document["least_possible_error"], chosen["relative_error"])
    proof = "no choice within the budget has less" if document["is_optimal"] else f"no choice has less than {least}"
    yield facts_table(
        (
            ("budget", f"{human_bytes(budget['limit_bytes'])} of {of}"),
            ("chosen", f"{human_bytes(chosen['size_bytes'])}, {chosen['bits_per_weight']:.4f} bits per weight"),
            ("error", f"{chosen['relative_error']:.4g} (root mean square of all layers); {proof}"),
            ("layers", ", ".join(f"{name}: {count}" for name, count in counts.most_common())),
        )
    )
    if document["uniform"]:
        rows = (
            (name, f"{one['bits_per_weight']:.4f}", human_bytes(one["size_bytes"]), f"{one['relative_error']:.4g}")
            for name, one in document["uniform"].items()
        )
        yield ""
        yield rows_table(("one schema for all layers", "bits per weight", "size", "error"), rows)
    yield f"\nUse the recipe with: hqconv convert … --config {shlex.quote(document['out'])}"


def _evaluation(document: Document) -> Parts:
    kl, sides = document["kl"], [document["source_figures"], document["artifact_figures"]]
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.2g}"
    yield facts_table(
        (
            ("artifact", f"{document['artifact']}, {document['schema']}"),
            ("source", document["source"]["name"]),
            ("text", f"{document['text']['name']}: {plural(document['num_predictions'], 'predicted token')}"),
            ("perplexity", " → ".join(f"{side['perplexity']:.4f}" for side in sides)),
            ("log-likelihood", " → ".join(f"{-side['mean_nll']:.5f}" for side in sides) + " nats per token"),
            ("KL divergence", f"{kl['mean']:.3g}{error} nats per token"),
            ("", f"median {kl['median']:.3g}, 90 % {kl['p90']:.3g}, 99 % {kl['p99']:.3g}, largest {kl['max']:.3g}"),
            ("same top token", f"{100 * document['top1_agreement']:.2f} %"),
        )
    )
    yield "\nActivations were not quantized."


def _warm(document: Document) -> Parts:
    left_out, gpu = ", ".join(document["activations_left_out"]), document["gpu"]
    yield facts_table(
        (
            ("kernels", f"{document['num_kernels']} needed, {document['num_compiled']} compiled now"),
            ("for", f"{gpu['name']}, {plural(gpu['sm_count'], 'SM')}; {document['asking']['gemm_type']}"),
            ("compiler", document["compiler"]),
            ("left out", f"activation {left_out}: compiled at the first start of the server" if left_out else ""),
            ("size", human_bytes(document["num_bytes"])),
            ("time", human_seconds(document["seconds"])),
        )
    )
    yield f"\nThe kernels are in {document['folder']}."
    if document["variable"].endswith("=1"):  # the folder beside the artifact
        yield f"A server of this user takes them by itself, any other with {document['variable']}."
    else:
        yield f"Start the server with {document['variable']} to use them."


def _schemas(document: Document) -> Parts:
    """The weight presets, the shorthands and the activation schemas."""
    yield ""
    yield rows_table(
        ("schema", "bits per weight", "description", f"--layout checkpoint runs in {ENGINE.release}"),
        (
            (one["name"], f"{one['bits_per_weight']:g}", one["description"], _served_text(one))
            for one in document["presets"]
        ),
    )
    for short in (document["shorthand"], document["scaled_shorthand"]):
        yield f"\n{short['name']}: {short['description']}"
        rows = (("  bits per weight", short["bits_per_weight"]), (f"  in {ENGINE.name}", short["stock_vllm"]))
        yield facts_table(rows)
    yield "\nFILE.toml: the fields of Humming's HummingWeightSchema.\n"
    yield rows_table(
        ("--input-schema", "description", "targets", "weight schemas"),
        (
            (
                one["name"],
                one["description"],
                targets_text(one["targets"]),
                "every schema above" if len(one["schemas"]) == len(PRESETS) else ", ".join(one["schemas"]),
            )
            for one in document["input_schemas"]
        ),
    )
    yield "\nFILE.toml: the fields of Humming's HummingInputSchema. Not every pair runs on every target."


def _recipes(document: Document) -> Parts:
    rows = [(one["option"], one["description"]) for key in ("recipes", "schemas") for one in document[key]]
    yield rows_table(("option of convert", "description"), rows)
    yield f"\nThe files are in {document['folder']}. A file of the same name in the current folder takes precedence."


def _ranking(document: Document) -> Parts:
    """The schemas for one GPU in their order, the recommended one, and the refused ones."""
    gpu, target = document["gpu"], document["target"]
    named = target if gpu == target else f"{gpu} ({target})"
    pair = f"{document['input_schema']} activations and {document['dtype']} parameters"
    yield f"Schemas on {named} with {pair}. {document['rule']}\n"
    rows, before = [], None
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
    yield rows_table((*columns, f"{DECODE} tokens, µs", f"{PREFILL} tokens, µs"), rows)
    yield from (f"* {text}" for text in dict.fromkeys(one["caution"] for one in document["schemas"]) if text)
    if document["recommended"] is not None:
        yield f"\nTake {document['recommended']}. {document['reason']}"
    yield f"\n{_speed_text(document['speed'], gpu)}"
    if document["refused"]:
        yield f"Do not run so: {', '.join(document['refused'])} (--json has the reasons)."


def _speed_text(run: Document | None, gpu: str) -> str:
    """Origin of the speeds of a ranking, and whether it is another GPU model than the one asked for."""
    if run is None:
        return "Speeds were not measured on this architecture (–)."
    other = "" if run["gpu_name"] == gpu else " Another GPU of the architecture has other speeds."
    origin = f"{run['gpu']}, {run['date']}, {run['source']}"
    return f"Speeds: {origin}; {run['timed']} ({run['model']}). – was not measured.{other}"


_PARTS: dict[str, Callable[[Document], Parts]] = {
    "plan": _plan,
    "summary": _summary,
    "part": _part,
    "source": _source,
    "artifact": _artifact,
    "unfinished": _unfinished,
    "schemas": _schemas,
    "ranking": _ranking,
    "recipes": _recipes,
    "report": _report,
    "page": _page,
    "warm": _warm,
    "publication": _publication,
    "push": _push,
    "importance": _importance,
    "allocation": _allocation,
    "evaluation": _evaluation,
}

# --- values as short texts -----------------------------------------------------------------------------------


def _conversion_rows(document: Document) -> list[tuple[str, str]]:
    """Rows that a plan, a summary and an artifact share: exceptions, encoding, and what requantizing did."""
    changes = ", ".join(f"{value:.3%} ({name})" for name, value in document.get("largest_scale_change", {}).items())
    return [
        ("but", otherwise_text(document)),
        ("conversion", conversion_text(document)),
        ("quantizer", quantizer_text(document)),
        ("requantized", _requantized_text(document.get("requantized", {}))),
        ("scales", f"rounded, changed by at most {changes}" if changes else ""),
    ]


def _requantized_text(counts: Mapping[str, int]) -> str:
    """Requantized matrices of a quantized source, and the number of scale groups without any error."""
    if not counts.get("num_groups"):
        return ""
    text = f"{counts['num_exact_groups']} of {counts['num_groups']} requantized scale groups are without any error"
    return f"{plural(counts['num_matrices'], 'matrix', 'matrices')} requantized; {text}"


def _resumed_text(document: Document) -> str:
    """Work that an earlier run had finished."""
    if document["was_finished"]:
        return "the artifact was already finished: nothing to do"
    if document["replaced_because"]:
        return f"an artifact was there and is replaced: {document['replaced_because']}"
    num_groups = document["num_groups_resumed"]
    return f"already finished: {plural(num_groups, 'output unit')}" if num_groups else ""


def _source_text(document: Document) -> str:
    """`Qwen3-30B-A3B: 18867 tensors, 61.07 GB in 16 files`."""
    size = f"{human_bytes(document['num_bytes'])} in {plural(document['num_files'], 'file')}"
    return f"{name_text(document)}: {plural(document['num_tensors'], 'tensor')}, {size}"


def _ancestor_text(document: Document) -> str:
    """Artifact from which this artifact was made."""
    digest = document["manifest_sha256"][:12]
    return f"{document['schema_name']} of {name_text(document['source'])} (hqconv.json {digest}…)"


def _tensors_text(document: Document) -> str:
    """Numbers and sizes of converted, copied and dropped tensors."""
    kinds = ("converted", "copied", "dropped")
    return ", ".join(
        f"{document[kind]['num_tensors']} {kind} ({human_bytes(document[kind]['num_bytes'])})" for kind in kinds
    )


def _dropped_text(document: Document) -> str:
    """Reasons for dropped tensors, one line each for the first few."""
    reasons = list(document["dropped"]["reasons"].items())
    lines = [f"{name}: {reason}" for name, reason in reasons[:NUM_SHOWN]]
    more = len(reasons) - len(lines)
    return "\n".join([*lines, f"… {more} more (--json lists all)"] if more else lines)


def _about_gb(num_bytes: int) -> str:
    """`0.4 GB`, `35 GB`: a size without precision that a plan does not have."""
    size = num_bytes / 1e9
    if size < 0.1:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{size:.0f} GB" if size >= 10 else f"{size:.1f} GB"


def _gpu_memory_text(document: Document) -> str:
    """Weights on each GPU of a plan, and what is counted."""
    memory = document["gpu_memory"]
    if memory is None:
        return ""
    parts = f"experts {_about_gb(memory['experts'])}, other tensors {_about_gb(memory['other_tensors'])}"
    return f"about {_about_gb(memory['total'])} of weights on each GPU ({parts}). {_COUNTED}"


def _input_scales_text(document: Mapping[str, Mapping[str, float]]) -> str:
    """`static scales: w13 0.0012 to 0.02, w2 0.003`; "" without static scales."""
    each = [
        f"{gemm} {' to '.join(dict.fromkeys(f'{one[end]:.3g}' for end in ('min', 'max')))}"
        for gemm, one in document.items()
    ]
    return f"static scales: {', '.join(each)}" if each else ""


def _served_text(document: Document) -> str:
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
