"""Documents as tables and short texts, for the terminal and, as HTML, for a report's page; progress on stderr."""

from __future__ import annotations

import io
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from hqconv.artifact.error_summary import rank_of_error, summarize_errors
from hqconv.cli.output import printable_document, say
from hqconv.conversion.stages import Progress
from hqconv.errors import NUM_SHOWN, first_few, plural, printable_line
from hqconv.formats.source_format import PLAIN
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import KERNEL, PROJECTIONS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.grid import EVEN
from hqconv.schemas.weight_schema import PARAM_DTYPES
from hqconv.verification.result import OF_ANOTHER_SOURCE

_WIDE = 500  # columns when stdout is not a terminal: nothing is wrapped
_PAGE_WIDTH = 140  # columns of a page
_GAP = 2  # columns of space after a cell
_NUM_FINDINGS_SHOWN = 20
_NUM_MEASURED_SHOWN = 10

Document = dict[str, Any]
Shown = Iterator[str | Table]  # printed one after the other


class _Console(Console):
    """rich's console, but a broken pipe is raised to the caller: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(document: Document) -> None:
    """Print a document as tables, by its `kind`."""
    console = _Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    _print(console, document)


def as_html(documents: Iterable[Document]) -> str:
    """Return documents as the terminal shows them, as escaped HTML for a `pre` element."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=_PAGE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )
    for document in documents:
        _print(console, document)
        console.print()
    return console.export_html(code_format="{code}", inline_styles=True)


def _print(console: Console, document: Document) -> None:
    for part in _RENDERERS[document["kind"]](printable_document(document)):
        console.print(part)


def _facts(*rows: tuple[str, Any]) -> Table:
    """Return labels and values; rows without a value are left out."""
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value not in (None, ""):
            table.add_row(label, str(value))
    return table


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Shown:
    """Yield a caption and a table, nothing without rows. Numbers are right-aligned, long cells folded, never cut."""
    texts = [[_cell(value) for value in row] for row in rows]
    if not texts:
        return
    yield f"\n{caption}" if caption else ""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for header, column in zip(headers, zip(*texts, strict=True), strict=True):
        is_numeric = all(text[:1].isdigit() for text in column)
        table.add_column(header, justify="right" if is_numeric else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    yield table


def _cell(value: Any) -> str:
    """Format a value: floats with four digits, a dash for what is unknown."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:#.4g}" if value else "0"
    return str(value)


# --- conversions -------------------------------------------------------------------------------------------


def _plan(document: Document) -> Shown:
    peak, worker = (
        f"{document[key] / 2**20:.0f} MiB" for key in ("peak_memory_bytes", "worker_bytes")
    )
    workers = f"{plural(document['num_workers'], 'worker')} with at most {worker} each"
    yield _facts(
        ("source", _source_text(document["source"])),
        ("family", _family_text(document)),
        ("schema", _schema_text(document["schema"])),
        *_conversion_rows(document),
        ("for", _target_text(document)),
        ("tensors", _tensors_text(document["tensors"])),
        ("dropped", _dropped_text(document["tensors"])),
        ("memory", f"{peak}: {workers}, on {document['device']}, plus memory of libraries"),
        ("time", document["estimated_time"]),
        ("output", f"{document['out']}: {human_bytes(document['num_bytes_out'])}"),
        ("", _ranks_text(document["rank_bytes"])),
    )
    yield from _layers(document["blocks"])
    for kind in ("warning", "note"):
        for text in document[f"{kind}s"]:
            yield f"\n{kind}: {text}"
    yield "\nDry run: nothing was written."


def _summary(document: Document) -> Shown:
    num_in = document["num_bytes_in"]
    num_out = document["num_bytes_out"]
    seconds = document["seconds"]
    time = [human_seconds(seconds), plural(document["num_workers"], "worker")]
    if not document["num_units_resumed"]:
        time.insert(1, human_rate(num_in / max(seconds, 1e-9)))
    size = f"{human_bytes(num_in)} → {human_bytes(num_out)} ({num_out / max(num_in, 1):.3f})"
    yield _facts(
        ("schema", f"{document['schema']}, {document['layout']} layout"),
        *_conversion_rows(document),
        ("layers", f"{document['num_blocks']}, for {plural(document['num_ranks'], 'rank')}"),
        ("size", size),
        ("resumed", _resumed_text(document)),
        ("time", ", ".join(time)),
    )
    yield from _errors(summarize_errors(document["errors"]))
    if document["evaluation"] is not None:
        yield _evaluation_facts(document["evaluation"])
    out = document["out"]
    yield f"\nsha256 of hqconv.json: {document['manifest_sha256']}"
    yield f"The artifact is in {out}; see it with: hqconv inspect {shlex.quote(out)}"
    is_over_limit = document.get("over_max_error") or document.get("over_max_kl")
    if document["serve_command"] and not is_over_limit:
        yield f"Serve it with: {document['serve_command']}"


def _resumed_text(document: Document) -> str:
    """Return the work that an earlier run had finished."""
    if document["was_finished"]:
        return "the artifact was already finished: nothing to do"
    if document["replaced_because"]:
        return f"an artifact was there and is replaced: {document['replaced_because']}"
    num_units = document["num_units_resumed"]
    return f"already finished: {plural(num_units, 'output unit')}" if num_units else ""


_MEANINGS = {
    "direct": "direct: codes and scales kept",
    "direct, scales rounded": "direct, scales rounded: codes kept, scales in the parameter dtype",
    "requantized": "requantized from exactly decoded float32",
}


def _conversion_rows(document: Document) -> list[tuple[str, str]]:
    """Return rows that a plan, a summary and an artifact share: exceptions, encoding, what requantizing did."""
    exceptions = [
        f"{schema} in {plural(len(layers), 'layer')}"
        for schema, layers in document["otherwise"].items()
    ]
    if document["left_blocks"]:
        exceptions.append(f"{plural(len(document['left_blocks']), 'layer')} left as in the source")
    conversions = [
        f"{_MEANINGS.get(kind, kind)} ({plural(count, 'layer')})"
        for kind, count in document["conversion"].items()
    ]
    rows = [("but", "; ".join(exceptions)), ("conversion", "; ".join(conversions))]
    dense = document["dense"]
    if dense is not None:
        counts = ", ".join(f"{count} as {name}" for name, count in dense["layers"].items())
        before, after = (human_bytes(dense[f"num_bytes_{key}"]) for key in ("in", "out"))
        rows.append(("other layers", f"{counts}: {before} → {after}"))
    calibration = document["calibration"]
    if calibration is not None:
        text = f"{calibration['name']} (sha256 {calibration['sha256'][:12]}…)"
        tokens = f"{calibration['num_tokens']} tokens of {text} on {calibration['device']}"
        rows.append(("quantizer", f"gptq: calibrated with {tokens}"))
    elif document["quantizer"] == "mse":
        rows.append(("quantizer", "mse: scales of the least squared error"))
    changes = document.get("largest_scale_change")
    if changes:
        text = ", ".join(f"{change:.3%} ({role})" for role, change in changes.items())
        rows.append(("scales", f"rounded, changed by at most {text}"))
    counts = document.get("requantized", {})
    if counts.get("num_groups"):
        matrices = plural(counts["num_matrices"], "matrix", "matrices")
        exact = f"{counts['num_exact_groups']} of {counts['num_groups']}"
        text = f"{matrices}; {exact} requantized scale groups are without any error"
        rows.append(("requantized", text))
    return rows


def _part(document: Document) -> Shown:
    parts_at_work = document["parts_at_work"]
    yield _facts(
        ("part", document["part"]),
        (
            "missing",
            f"{len(document['missing'])} of {plural(document['num_units'], 'output unit')}",
        ),
        ("at work", f"part {', part '.join(parts_at_work)}" if parts_at_work else "no other part"),
        ("what to do", "Convert the other parts; the last one finishes the artifact."),
    )
    yield f"{document['out']} is no artifact yet."


def _unfinished(document: Document) -> Shown:
    yield f"{document['folder']} holds an unfinished conversion, not an artifact yet."
    count = plural(document["num_units_done"], "output unit")
    yield _facts(("finished", count), ("what to do", document["remedy"]))


def _allocation(document: Document) -> Shown:
    chosen = document["chosen"]
    limit = human_bytes(document["budget"]["limit_bytes"])
    size = human_bytes(chosen["size_bytes"])
    yield _facts(
        ("budget", f"{limit} of the experts' tensors"),
        ("chosen", f"{size}, {chosen['bits_per_weight']:.4f} bits per weight"),
        ("loss", _cell(chosen["loss"])),
    )
    uniform = [
        (name, point["bits_per_weight"], human_bytes(point["size_bytes"]), point["loss"])
        for name, point in document["uniform"].items()
    ]
    yield from _table(("one schema for all", "bits per weight", "size", "loss"), uniform)
    gemms = [
        (f"{layer}: {gemm}", choice["chosen"], human_bytes(choice["size_bytes"]), choice["loss"])
        for layer, choices in document["layers"].items()
        for gemm, choice in choices.items()
    ]
    yield from _table(("GEMM", "schema", "size", "loss"), gemms)
    yield f"\nUse the recipe with: hqconv convert … --config {shlex.quote(document['out'])}"


# --- sources and artifacts ---------------------------------------------------------------------------------


def _source(document: Document) -> Shown:
    dtypes = [f"{dtype} {human_bytes(size)}" for dtype, size in document["bytes_by_dtype"].items()]
    rows = [
        ("source", _source_text(document)),
        ("model type", document["model_type"]),
        ("dtypes", ", ".join(dtypes)),
        ("quantization", document["quant_method"]),
    ]
    if not document["convertible"]:
        yield _facts(*rows, ("convertible", f"no: {document['obstacle']}"))
        return
    labels = {"num_heads": "heads", "num_kv_heads": "KV heads"}
    heads = [f"{count} {labels[key]}" for key, count in document["attention"].items()]
    yield _facts(
        *rows,
        ("family", _family_text(document)),
        ("direct", ", ".join(document["direct_schemas"])),
        ("tensors", _tensors_text(document["tensors"])),
        ("dropped", _dropped_text(document["tensors"])),
        ("attention", ", ".join(heads)),
    )
    yield from _layers(document["blocks"])
    schemas: dict[tuple[str, str], list[str]] = {}
    for name, sizes in document["tp_sizes"].items():
        further = [size for size in document["tp_sizes_of_groups"][name] if size not in sizes]
        key = (", ".join(map(str, sizes)) or "none", ", ".join(map(str, further)))
        schemas.setdefault(key, []).append(name)
    headers = ("schemas", "--tp sizes that work", "and with --tp-split groups")
    yield from _table(headers, ((", ".join(names), *sizes) for sizes, names in schemas.items()))
    yield from _warnings(document)


def _artifact(document: Document) -> Shown:
    missing = document["missing_or_resized_files"]
    damage = f"{plural(len(missing), 'file')} missing or resized: {first_few(missing)}"
    size = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    versions = f"hqconv {document['hqconv_version']}, humming-kernels {document['humming_kernels_version']}"
    yield _facts(
        ("artifact", f"{document['folder']}: {size}"),
        ("source", _name_text(document["source"])),
        ("family", document["family"]),
        ("schema", _schema_text(document["schema"])),
        *_conversion_rows(document),
        ("for", _target_text(document)),
        ("experts", _ranks_text(document["rank_bytes"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in document["tensors"].items())),
        ("serve", document["serve_command"] or f"no {ENGINE.name} command serves these ranks"),
        ("made by", versions),
        ("manifest", f"sha256 {document['manifest_sha256']}"),
        ("damaged", damage if missing else ""),
        ("altered", document["altered_manifest"]),
    )
    yield from _layers(document["blocks"])
    yield from _errors(document["quantization_error"])
    yield from _warnings(document)


def _layers(runs: Iterable[Mapping[str, Any]]) -> Shown:
    """Yield the table of MoE layers, one row for layers of the same shape (`documents.layer_runs`)."""
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k")
    rows = []
    for run in runs:
        activation = Activation.from_dict(run)
        is_gated = bool(run["gated"])
        remarks = ["gated"] if is_gated else []
        if not activation.is_known(is_gated):
            remarks.append("known by name only")
        is_plain = run["source_format"] == PLAIN.name
        stored_as = run["source_dtype"] if is_plain else run["source_format"]
        rows.append([*(run[key] for key in keys), activation.describe(*remarks), stored_as])
    sizes = ("layers", "count", "experts", "hidden", "intermediate", "top-k")
    yield from _table((*sizes, "activation", "stored as"), rows)


def _errors(summary: Mapping[str, Mapping[str, Any]]) -> Shown:
    """Yield the table of `summarize_errors`: relative errors over all layers."""
    columns = {
        "min": "smallest",
        "median": "median",
        "max": "largest",
        "worst_block": "worst layer",
    }
    if any("median_of_outputs" in error for error in summary.values()):
        columns = {"median_of_outputs": "of outputs", **columns}
    headers = ("relative error", *columns.values())
    rows = [
        (PROJECTIONS.get(role, role), *(error.get(key, "") for key in columns))
        for role, error in summary.items()
    ]
    yield from _table(headers, rows)


def _warnings(document: Document) -> Shown:
    for text in document["warnings"]:
        yield f"\nwarning: {text}"


# --- checks ------------------------------------------------------------------------------------------------


def _report(document: Document) -> Shown:
    """Yield checks, findings and measurements, and a final PASS or FAIL line with the reason."""
    checks = document["checks"]
    for name, check in checks.items():
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        yield f"{name:8} {check['status'].upper()} in {human_seconds(check['seconds'])}{reason}"
        for note in check["notes"]:
            yield f"         {note}"
        yield from _findings(check["findings"])
    for name, check in checks.items():
        yield from _measured(name, check["measured"])
    yield f"\n{_verdict(document)}"


_COLUMNS = {  # check → caption of its measurements; key → header
    "weights": (
        "Decoded weights against the source",
        {"relative_error": "relative error", "sqnr_db": "SQNR (dB)", "cosine": "cosine"},
    ),
    "kernel": (
        "GPU kernel: relative errors",
        {
            "kernel": "kernel against decoded weights",
            "rounded_kernel": "against rounded activations",
            "channel": "worst channel",
            "batch": "worst batch",
            "against_source": "output against the source's",
            "routed_by": "tokens routed by",
        },
    ),
    "server": (
        "Log-probabilities of the server against the reference, in nats",
        {
            "mean": "mean difference",
            "mean_limit": "limit",
            "p999": "99.9 %",
            "token_limit": "limit of a token",
            "out_of_bounds": "share above it",
        },
    ),
}


def _measured(check: str, measured: Mapping[str, Any]) -> Shown:
    """Yield the table of a check's measurements, the largest errors first."""
    if check not in _COLUMNS:
        return
    caption, columns = _COLUMNS[check]
    figures_of = dict(measured)
    if check == "weights":
        figures_of = {
            f"{layer}, {PROJECTIONS.get(role, role)}": figures
            for layer, projections in measured.items()
            for role, figures in projections.items()
        }
    first_key, *_ = columns
    names = [name for name, figures in figures_of.items() if first_key in figures]
    if check != "server":
        names.sort(key=lambda name: -rank_of_error(figures_of[name][first_key]))
    if len(names) > _NUM_MEASURED_SHOWN:
        caption += f": the {_NUM_MEASURED_SHOWN} largest errors of {len(names)}"
    rows = [
        (name, *(figures_of[name].get(key) for key in columns))
        for name in names[:_NUM_MEASURED_SHOWN]
    ]
    yield from _table(("layer", *columns.values()), rows, caption)


def _verdict(document: Document) -> str:
    """Return PASS or FAIL with the reason, on one line."""
    names: dict[str, list[str]] = {"pass": [], "fail": [], "skipped": []}
    for name, check in document["checks"].items():
        names[check["status"]].append(name)
    if names["fail"]:
        reasons = [f"{name}: {_first(document['checks'][name])}" for name in names["fail"]]
        return f"FAIL  {'; '.join(reasons)}"
    if not document["passed"]:
        return "FAIL  no check could run"
    against = f" against {document['source']}" if document.get("source") else ", without the source"
    skipped = f"; skipped: {', '.join(names['skipped'])}" if names["skipped"] else ""
    return f"PASS  {', '.join(names['pass'])}{against}{skipped}"


def _first(check: Document) -> str:
    finding = check["findings"][0]
    count = len(check["findings"])
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{finding['what'].rstrip('.')} ({finding['where']}){more}"


def _findings(findings: list[Document]) -> Shown:
    num_shown = _NUM_FINDINGS_SHOWN
    if findings and findings[0]["what"] in OF_ANOTHER_SOURCE:
        num_shown = 1  # the others follow from it
    for finding in findings[:num_shown]:
        yield f"  ✗ {finding['where']}: {finding['what']}"
        for label in ("expected", "found"):
            if finding[label]:
                yield f"      {label}: {finding[label]}"
    if len(findings) > num_shown:
        yield f"  … {len(findings) - num_shown} more; --json lists all"


def _checkup(document: Document) -> Shown:
    """Yield damage, notices, the layers furthest from the original, and a final line."""
    rows = [("checkpoint", document["checkpoint"]), ("against", document["against"])]
    if "family" in document:
        experts = plural(document["num_experts"], "expert")
        layers = f"{document['num_layers']} of {plural(document['num_all_layers'], 'MoE layer')}"
        rows.append(("family", document["family"]))
        rows.append(("format", "\n".join(document["source_format"])))
        rows.append(("checked", f"{layers}, {experts}"))
    yield _facts(*rows)
    yield from _findings(document["damage"])
    for notice in document["notices"][:_NUM_FINDINGS_SHOWN]:
        remarks = [f" ({notice[key]})" for key in ("where", "found") if notice[key]]
        yield f"\nnotice: {notice['what']}{''.join(remarks)}"
    errors = [
        (f"{layer}, {role}", error)
        for layer, projections in document["errors"].items()
        for role, error in projections.items()
    ]
    errors.sort(
        key=lambda row: -row[1]["worst_relative_error"] / max(row[1]["rounding_error"], 1e-9)
    )
    cells = []
    for name, error in errors[:_NUM_FINDINGS_SHOWN]:
        nearest = error["nearest_codes"]
        share = None if nearest is None else f"{nearest:.2%}"
        worst = f"{error['worst_expert']}: {_cell(error['worst_relative_error'])}"
        cells.append((name, error["relative_error"], error["rounding_error"], share, worst))
    headers = ("relative error", "by rounding", "nearest codes", "worst expert")
    yield from _table(("the furthest from the original", *headers), cells)
    count = len(document["damage"])
    verdict = f"DAMAGED  {plural(count, 'finding')}" if count else "PASS  no damage"
    against = f" against {document['against']}" if document["against"] else ""
    yield f"\n{verdict}{against}, {plural(len(document['notices']), 'notice')}"


def _evaluation(document: Document) -> Shown:
    yield _evaluation_facts(document)
    yield from _warnings(document)


def _evaluation_facts(document: Document) -> Table:
    kl = document["kl"]
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.2g}"
    perplexity = document["perplexity"]
    nll = document["mean_nll"]
    context = f"{document['context_length']} tokens"
    return _facts(
        ("evaluated", f"{document['artifact']}, {document['schema']}"),
        ("source", document["source"]["name"]),
        ("text", f"{document['text']['name']}: {document['num_predictions']} predicted tokens"),
        ("context", f"{context}, in transformers {document['transformers_version']}"),
        ("dtype", f"{document['compute_dtype']}; activations were not quantized"),
        ("perplexity", f"{perplexity['source']:.4f} → {perplexity['artifact']:.4f}"),
        ("log-likelihood", f"{-nll['source']:.5f} → {-nll['artifact']:.5f} nats per token"),
        ("KL divergence", f"{kl['mean']:.3g}{error} nats per token"),
        (
            "",
            f"median {kl['median']:.3g}, 90 % {kl['p90']:.3g}, 99 % {kl['p99']:.3g}, largest {kl['max']:.3g}",
        ),
        (
            "same top token",
            f"{100 * document['top1_agreement']:.2f} %: as many of 100 next tokens are the source's",
        ),
    )


def _page(document: Document) -> Shown:
    yield f"The page is in {document['page']}."


# --- publishing, kernels -----------------------------------------------------------------------------------


def _push(document: Document) -> Shown:
    if not document["num_files"]:
        yield f"{document['repo']} already holds the artifact, at commit {document['commit']}."
        return
    uploaded = f"{plural(document['num_files'], 'file')}, {human_bytes(document['num_bytes'])}"
    yield f"{document['repo']} holds the artifact, at commit {document['commit']}; uploaded: {uploaded}."
    yield f"sha256 of hqconv.json: {document['manifest_sha256']}"


def _publication(document: Document) -> Shown:
    """Yield the steps that ran, and a last line about the repo."""
    place = document["repo"] + (f", branch {document['branch']}," if document["branch"] else "")
    if document["was_published"]:
        yield f"{place} holds the artifact of this request and source, at commit {document['commit']}."
        yield "Nothing to do."
        return
    steps = {"converted": _summary, "verified": _report, "pushed": _push}
    for key, render_step in steps.items():
        if document[key] is not None:
            yield from render_step(document[key])
            yield ""
    seconds = document["seconds"]
    ran = ", ".join(f"{step} in {human_seconds(time_s)}" for step, time_s in seconds.items())
    skipped = ", ".join(step for step in steps if step not in seconds)
    yield f"Steps: {ran}{f'; skipped: {skipped}' * bool(skipped)}."
    if document["commit"] is None:
        yield f"Nothing was published to {place}."


def _warm(document: Document) -> Shown:
    yield _warm_facts(document, [f"activation {name}" for name in document["activations_left_out"]])
    yield f"\nThe kernels are in {document['folder']}."
    if document["not_signed_because"]:
        yield f"They are not signed: {document['not_signed_because']}"
    elif document["variable"].endswith("=1"):  # the folder beside the artifact
        yield f"A server of this user takes them by itself, any other with {document['variable']}."
        return
    yield f"Start the server with {document['variable']} to use them."


def _warm_checkpoint(document: Document) -> Shown:
    yield _warm_facts(document, [f"{name} ({why})" for name, why in document["left_out"].items()])
    yield f"\nThe kernels are in Humming's cache, {document['folder']}: a server of this installation finds them there."


def _warm_facts(document: Document, left_out: list[str]) -> Table:
    gpu = document["gpu"]
    return _facts(
        ("kernels", f"{document['num_kernels']} needed, {document['num_compiled']} compiled now"),
        ("for", f"{gpu['name']}, {plural(gpu['sm_count'], 'SM')}"),
        ("left out", ", ".join(left_out)),
        ("time", human_seconds(document["seconds"])),
    )


# --- schemas -----------------------------------------------------------------------------------------------


def _schemas(document: Document) -> Shown:
    """Yield the weight presets, the shorthands and the activation schemas."""
    presets = []
    for preset in document["presets"]:
        dtypes = preset["stock_vllm_param_dtypes"]
        served = f"with {' or '.join(dtypes)} only"
        if not dtypes:
            served = f"no: {preset['stock_vllm_obstacle']}"
        elif len(dtypes) == len(PARAM_DTYPES):
            served = "yes"
        bits = f"{preset['bits_per_weight']:g}"
        presets.append((preset["name"], bits, preset["description"], served))
    headers = ("schema", "bits per weight", "description")
    yield from _table((*headers, f"--layout checkpoint runs in {ENGINE.release}"), presets)
    for shorthand in document["shorthands"]:
        yield f"\n{shorthand['name']}: {shorthand['description']}"
        yield _facts(
            ("  bits per weight", shorthand["bits_per_weight"]),
            (f"  in {ENGINE.name}", shorthand["stock_vllm"]),
        )
    yield "\nFILE.toml: the fields of Humming's HummingWeightSchema.\n"
    inputs = [(schema["name"], schema["description"]) for schema in document["input_schemas"]]
    yield from _table(("--input-schema", "description"), inputs)
    yield "\nFILE.toml: the fields of Humming's HummingInputSchema."
    yield "Not every pair runs on every GPU: `hqconv schemas --for GPU --all` lists those that do."


def _gpu(document: Document) -> Shown:
    """Yield the recommended schemas for a GPU, the command, and if asked what runs with each input schema."""
    yield _facts(
        ("schema", document["schema"]),
        ("with fp8 activations", document["fp8_schema"] or "fp8 activations do not run"),
        ("command", document["command"]),
        ("GPU", f"{document['gpu']} ({document['target']}); the same for {document['gpus']}"),
    )
    if not document["shows_all"]:
        yield "\n--all lists every schema that runs there."
        return
    rows = [(name, ", ".join(schemas)) for name, schemas in document["runs"].items() if schemas]
    yield from _table(("--input-schema", "schemas that run"), rows)


def _recipes(document: Document) -> Shown:
    rows = [
        (recipe["option"], recipe["description"])
        for recipe in (*document["recipes"], *document["schemas"])
    ]
    yield from _table(("option of convert", "description"), rows)
    yield f"\nThe files are in {document['folder']}. A file of the same name in the current folder takes precedence."


_RENDERERS: dict[str, Callable[[Document], Shown]] = {
    "plan": _plan,
    "summary": _summary,
    "part": _part,
    "source": _source,
    "artifact": _artifact,
    "unfinished": _unfinished,
    "schemas": _schemas,
    "gpu": _gpu,
    "recipes": _recipes,
    "report": _report,
    "checkup": _checkup,
    "page": _page,
    "warm": _warm,
    "warm_checkpoint": _warm_checkpoint,
    "publication": _publication,
    "push": _push,
    "allocation": _allocation,
    "evaluation": _evaluation,
}

# --- values as short texts -----------------------------------------------------------------------------------


def _name_text(source: Document) -> str:
    """Return `org/name at 12ab…`: a source with its commit."""
    return f"{source['name']} at {source['revision']}" if source["revision"] else source["name"]


def _source_text(source: Document) -> str:
    """Return `Qwen3-30B-A3B: 18867 tensors, 61.07 GB in 16 files`."""
    size = f"{human_bytes(source['num_bytes'])} in {plural(source['num_files'], 'file')}"
    return f"{_name_text(source)}: {plural(source['num_tensors'], 'tensor')}, {size}"


def _family_text(document: Document) -> str:
    return f"{document['family']} ({document['family_chosen_because']})"


def _schema_text(schema: Document) -> str:
    """Return `mxfp4: float4e2m1, float8e8m0 scale per group 32; 4.25 bits per weight`."""
    return (
        f"{schema['name']}: {schema['description']}; {schema['bits_per_weight']:g} bits per weight"
    )


def _target_text(document: Document) -> str:
    """Return layout, dtypes, GPU and ranks of an artifact."""
    facts = [
        f"{document['layout']} layout",
        f"{document['dtype']} parameters, {document['input_schema']} activations",
    ]
    if document["layout"] == KERNEL:
        facts.append(document["target"])
        facts.append(f"tp {document['tp']}, ep {document['ep']} ({document['expert_placement']})")
        if document["tp_split"] != EVEN:
            facts.append(f"TP split {document['tp_split']}")
        if document["redundant_experts"]:
            facts.append(plural(document["redundant_experts"], "redundant expert"))
    return ", ".join(facts)


def _ranks_text(rank_bytes: Mapping[str, int]) -> str:
    """Return `8 ranks, 69.21 GB each`, or the smallest and the largest size."""
    if not rank_bytes:
        return ""
    least = human_bytes(min(rank_bytes.values()))
    most = human_bytes(max(rank_bytes.values()))
    sizes = f"{least} each" if least == most else f"{least} to {most}"
    return f"{plural(len(rank_bytes), 'rank')}, {sizes}"


def _tensors_text(tensors: Document) -> str:
    """Return numbers and sizes of converted, copied and dropped tensors."""
    return ", ".join(
        f"{counts['num_tensors']} {kind} ({human_bytes(counts['num_bytes'])})"
        for kind, counts in tensors.items()
    )


def _dropped_text(tensors: Document) -> str:
    """Return reasons for dropped tensors, each on a line, for the first few."""
    reasons = tensors["dropped"]["reasons"]
    lines = [f"{name}: {reason}" for name, reason in list(reasons.items())[:NUM_SHOWN]]
    if len(reasons) > len(lines):
        lines.append(f"… {len(reasons) - len(lines)} more (--json lists all)")
    return "\n".join(lines)


_PLAIN_INTERVAL_S = 5.0


def human_bytes(num_bytes: float) -> str:
    """Format a size in decimal units, e.g. `4.20 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def human_rate(bytes_per_s: float) -> str:
    """Format a speed with three digits: `1.25 GB/s`, `90.1 MB/s` or `310 kB/s`."""
    number, unit = human_bytes(bytes_per_s).split()
    value = float(number)
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}/s"


def human_seconds(seconds: float) -> str:
    """Format a duration: `4.2 s`, `3:05` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ShownProgress:
    """Live bar on a terminal, a plain line every few seconds elsewhere, nothing if quiet.

    `update` is the callback for `hqconv.convert`, `of_check` for `hqconv.verify`. Neither fails if stderr is closed.
    Resumed bytes count as done, but not for the speed. A step before the first bytes is told at once.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._begun_s = self._last_line_s = time.monotonic()
        self._last_step = ""
        self._announced = ExitStack()
        self._tasks: dict[str, TaskID] = {}  # by check
        self._bar: Bar | None = None
        if not quiet and sys.stderr.isatty():
            rest = Column(no_wrap=True, ratio=1)  # or a long name would wrap the columns before it
            name = TextColumn("{task.description}", markup=False, table_column=rest)
            self._bar = Bar(
                BarColumn(12),
                DownloadColumn(),
                TimeElapsedColumn(),
                name,
                console=Console(stderr=True, markup=False, highlight=False),
                transient=True,
                expand=True,
                refresh_per_second=4,
            )

    def __enter__(self) -> ShownProgress:
        if not self._quiet:
            from hqconv.jit import announced

            self._announced.enter_context(announced(say))
        if self._bar is not None:
            self._tasks[""] = self._bar.add_task("preparing", total=None)
            with suppress(OSError):
                self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
        self._announced.close()

    def update(self, done: Progress) -> None:
        """Show the progress of a conversion."""
        self.of_check("writing", done)

    def of_check(self, check: str, done: Progress) -> None:
        """Show the progress of one check of a verification, or of other work by its verb."""
        if self._quiet:
            return
        left = "" if done.left_s is None else f"{human_seconds(done.left_s)} left  "
        unit = f"{check} ({done.num_units_done}/{done.num_units}) {printable_line(done.unit)}"
        text = left + (done.step or unit)
        if self._bar is not None:
            with suppress(OSError):
                self._update_bar(self._bar, check, done, text)
            return
        now_s = time.monotonic()
        is_first = done.done_bytes == done.resumed_bytes and done.step != self._last_step
        if now_s - self._last_line_s < _PLAIN_INTERVAL_S and not is_first:
            return
        self._last_line_s = now_s
        self._last_step = done.step
        size = f"{human_bytes(done.done_bytes)} of {human_bytes(done.total_bytes)}"
        say(f"{human_seconds(now_s - self._begun_s)}  {size}  {text}")

    def _update_bar(self, bar: Bar, check: str, done: Progress, text: str) -> None:
        if check not in self._tasks:
            start = self._tasks.pop("", None)
            for task in self._tasks.values():
                bar.update(task, visible=False)
            self._tasks[check] = bar.add_task("") if start is None else start
        total = max(done.total_bytes, 1)
        task = self._tasks[check]
        bar.update(task, total=total, completed=done.done_bytes, description=text)
