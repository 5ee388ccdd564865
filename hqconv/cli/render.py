"""Terminal output: documents as tables and short texts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from hqconv.artifact.error_summary import summarize_errors
from hqconv.cli.output import printable_document
from hqconv.cli.progress_bar import human_rate, human_seconds
from hqconv.errors import NUM_SHOWN, plural
from hqconv.reports.parts import (
    COUNTED,
    Document,
    Part,
    about_gb,
    artifact_parts,
    conversion_rows,
    errors_table,
    evaluation_parts,
    facts,
    figure,
    gpu_memory_text,
    human_bytes,
    layers_table,
    measured_parts,
    name_text,
    ranks_text,
    schema_text,
    table,
    target_text,
)
from hqconv.reports.ranking import CALIBRATED, DECODE, PREFILL
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import GPUS, SHOWN_GPUS, TARGETS
from hqconv.schemas.options import RTN
from hqconv.schemas.weight_schema import PARAM_DTYPES, PRESETS
from hqconv.verification.result import OF_ANOTHER_SOURCE

_WIDE = 500  # columns when stdout is not a terminal: nothing is wrapped
_GAP = 2  # columns of space after a cell
_NUM_FINDINGS_SHOWN = 20

Parts = Iterator[str | Part | None]  # what is printed, one after the other


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
        for shown in _shown(part):
            console.print(shown)


def _shown(part: str | Part | None) -> Iterator[str | Table]:
    """Yield what the terminal shows of a part: plots, and tables that the reader of a page opens, are left out."""
    if isinstance(part, str):
        yield part
    elif part is None or part["kind"] in ("plot", "details"):
        return
    elif part["kind"] == "facts":
        shown = Table.grid(padding=(0, _GAP))
        shown.add_column(style="bold", no_wrap=True)
        shown.add_column(overflow="fold")
        for label, value in part["rows"]:
            shown.add_row(label, str(value))
        yield shown
    elif part["kind"] == "table":
        yield f"\n{part['caption']}" if part["caption"] else ""
        yield _rows_table(part)
    else:
        yield f"\n{part['text']}"


def _rows_table(part: Part) -> Table:
    """Return a table. Numbers are right-aligned; long cells are folded, never cut."""
    shown = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    body = [
        [figure(cell) if isinstance(cell, float) else str(cell) for cell in row]
        for row in part["rows"]
    ]
    for index, header in enumerate(part["headers"]):
        is_numeric = all(row[index][:1].isdigit() for row in body)
        shown.add_column(header, justify="right" if is_numeric else "left", overflow="fold")
    for row in body:
        shown.add_row(*row)
    return shown


# --- the results of commands ---------------------------------------------------------------------------------


def _plan(document: Document) -> Parts:
    mib = {key: f"{document[key] / 2**20:.0f} MiB" for key in ("peak_memory_bytes", "worker_bytes")}
    workers = f"{plural(document['num_workers'], 'worker')} with at most {mib['worker_bytes']} each"
    yield facts(
        (
            ("source", _source_text(document["source"])),
            ("family", f"{document['family']} ({document['family_chosen_because']})"),
            ("schema", schema_text(document["schema"])),
            *conversion_rows(document),
            ("for", target_text(document)),
            ("tensors", _tensors_text(document["tensors"])),
            ("dropped", _dropped_text(document["tensors"])),
            (
                "memory",
                f"{mib['peak_memory_bytes']}: {workers}, on {document['device']}, plus memory of libraries",
            ),
            ("output", f"{document['out']}: {human_bytes(document['num_bytes_out'])}"),
            ("", ranks_text(document["rank_bytes"])),
            ("GPU memory", gpu_memory_text(document)),
        )
    )
    yield layers_table(document["blocks"])
    yield table(("files", "count", "size"), _file_rows(document))
    yield from (
        f"\n{kind}: {text}" for kind in ("warning", "note") for text in document[f"{kind}s"]
    )
    yield "\nDry run: nothing was written."


def _file_rows(document: Document) -> list[tuple[str, int, str]]:
    """Rows of the output files: rank files in one row, ordinary shards in another."""
    kinds: dict[str, list[int]] = {}
    for file in document["files"]:
        folder = file["path"].rpartition("/")[0]
        kind = f"{folder.split('/')[0]}/tpT-epP/*.safetensors" if folder else "*.safetensors"
        kinds.setdefault(kind, []).append(file["size_bytes"])
    rows = [(kind, len(sizes), human_bytes(sum(sizes))) for kind, sizes in kinds.items()]
    return (
        [*rows, ("copied from the source", len(document["other_files"]), "")]
        if document["other_files"]
        else rows
    )


def _summary(document: Document) -> Parts:
    num_in, num_out, seconds = (
        document[key] for key in ("num_bytes_in", "num_bytes_out", "seconds")
    )
    speed = "" if document["num_units_resumed"] else f"{human_rate(num_in / max(seconds, 1e-9))}, "
    yield facts(
        (
            ("schema", f"{document['schema']}, {document['layout']} layout"),
            *conversion_rows(document),
            ("layers", f"{document['num_blocks']}, for {plural(document['num_ranks'], 'rank')}"),
            (
                "size",
                f"{human_bytes(num_in)} → {human_bytes(num_out)} ({num_out / max(num_in, 1):.3f})",
            ),
            ("resumed", _resumed_text(document)),
            (
                "time",
                f"{human_seconds(seconds)}, {speed}{plural(document['num_workers'], 'worker')}",
            ),
        )
    )
    yield errors_table(summarize_errors(document["errors"]))
    if document["evaluation"] is not None:
        yield from evaluation_parts(document["evaluation"])
    yield f"\nsha256 of hqconv.json: {document['manifest_sha256']}"
    yield f"The artifact is in {document['out']}; see it with: hqconv inspect {shlex.quote(document['out'])}"
    if (
        document["serve_command"]
        and not document.get("over_max_error")
        and not document.get("over_max_kl")
    ):
        yield f"Serve it with: {document['serve_command']}"


def _source(document: Document) -> Parts:
    dtypes = ", ".join(
        f"{dtype} {human_bytes(size)}" for dtype, size in document["bytes_by_dtype"].items()
    )
    rows = [
        ("source", _source_text(document)),
        ("model type", document["model_type"]),
        ("dtypes", dtypes),
        ("quantization", document["quant_method"]),
    ]
    if not document["convertible"]:
        yield facts((*rows, ("convertible", f"no: {document['obstacle']}")))
        return
    heads = {"num_heads": "heads", "num_kv_heads": "KV heads"}
    yield facts(
        (
            *rows,
            ("family", f"{document['family']} ({document['family_chosen_because']})"),
            ("direct", ", ".join(document["direct_schemas"])),
            ("tensors", _tensors_text(document["tensors"])),
            ("dropped", _dropped_text(document["tensors"])),
            (
                "attention",
                ", ".join(f"{count} {heads[key]}" for key, count in document["attention"].items()),
            ),
        )
    )
    yield layers_table(document["blocks"])
    by_sizes: dict[tuple[str, str], list[str]] = {}
    for name, sizes in document["tp_sizes"].items():
        dealt = document["tp_sizes_of_groups"][name]
        by_sizes.setdefault(
            (", ".join(map(str, sizes)) or "none", ", ".join(map(str, dealt))), []
        ).append(name)
    headers = ("schemas", "--tp sizes that work", "and with --tp-split groups")
    yield table(headers, ((", ".join(names), *sizes) for sizes, names in by_sizes.items()))
    yield from _gpu_memory(document["gpu_memory"], document["gpu_memory_of_groups"])
    yield from (f"\nwarning: {text}" for text in document["warnings"])


def _gpu_memory(
    even: Mapping[str, Mapping[str, int]], of_groups: Mapping[str, Mapping[str, int]]
) -> Parts:
    """The weights on each GPU by schema and TP size; sizes that need `--tp-split groups` are marked."""
    sizes = sorted(
        {int(tp) for of_schema in (*even.values(), *of_groups.values()) for tp in of_schema}
    )
    sizes = [size for size in sizes if size & (size - 1) == 0]
    if not sizes:
        return
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, of_schema in even.items():
        shown = {tp: about_gb(size) for tp, size in of_schema.items()}
        shown |= {tp: f"{about_gb(size)} *" for tp, size in of_groups.get(name, {}).items()}
        rows.setdefault(tuple(shown.get(str(tp), "-") for tp in sizes), []).append(name)
    headers = ("weights on each GPU", *(f"--tp {tp}" for tp in sizes))
    yield table(headers, ((", ".join(names), *cells) for cells, names in rows.items()))
    if any(cell.endswith("*") for cells in rows for cell in cells):
        yield "* with --tp-split groups"
    gpus = ", ".join(f"{name} {GPUS[name].memory_gb} GB" for name in SHOWN_GPUS)
    yield f"{COUNTED}\nGPUs: {gpus}."


def _part(document: Document) -> Parts:
    missing, at_work = document["missing"], document["parts_at_work"]
    yield facts(
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
    done = plural(document["num_units_done"], "output unit")
    yield facts((("finished", done), ("what to do", document["remedy"])))


def _report(document: Document) -> Parts:
    """Checks, findings and measurements, and a final PASS or FAIL line with the reason."""
    checks = document["checks"]
    for name, check in checks.items():
        reason = f": {check['skipped_because']}" if check["skipped_because"] else ""
        yield f"{name:8} {check['status'].upper()} in {human_seconds(check['seconds'])}{reason}"
        yield from (f"         {note}" for note in check["notes"])
        yield from _findings(check["findings"])
    for name, check in checks.items():
        yield from measured_parts(name, check["measured"])
    yield f"\n{_verdict(document)}"


def _verdict(document: Document) -> str:
    """PASS or FAIL with the reason, on one line."""
    names: dict[str, list[str]] = {"pass": [], "fail": [], "skipped": []}
    for name, check in document["checks"].items():
        names[check["status"]].append(name)
    if names["fail"]:
        return "FAIL  " + "; ".join(
            f"{name}: {_first(document['checks'][name])}" for name in names["fail"]
        )
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
        yield from (
            f"      {label}: {finding[label]}" for label in ("expected", "found") if finding[label]
        )
    if len(findings) > num_shown:
        yield f"  … {len(findings) - num_shown} more{' that follow from it' * is_other}; --json lists all"


def _checkup(document: Document) -> Parts:
    """Damage, notices, the layers furthest from the original, and a final line."""
    rows = [("checkpoint", document["checkpoint"]), ("against", document["against"])]
    if "family" in document:
        experts = plural(document["num_experts"], "expert")
        layers = f"{document['num_layers']} of {plural(document['num_all_layers'], 'MoE layer')}, {experts}"
        formats = "\n".join(document["source_format"])
        rows += [("family", document["family"]), ("format", formats), ("checked", layers)]
    yield facts([(label, value) for label, value in rows if value])
    yield from _findings(document["damage"])
    yield from (
        f"\nnotice: {one['what']}{_place(one)}" for one in document["notices"][:_NUM_FINDINGS_SHOWN]
    )
    errors = [
        (layer, role, one) for layer, of in document["errors"].items() for role, one in of.items()
    ]
    errors.sort(
        key=lambda one: -one[2]["worst_relative_error"] / max(one[2]["rounding_error"], 1e-9)
    )
    headers = (
        "the furthest from the original",
        "relative error",
        "by rounding",
        "nearest codes",
        "worst expert",
    )
    cells = [
        (
            f"{layer}, {role}",
            one["relative_error"],
            one["rounding_error"],
            "–" if one["nearest_codes"] is None else f"{one['nearest_codes']:.2%}",
            f"{one['worst_expert']}: {figure(one['worst_relative_error'])}",
        )
        for layer, role, one in errors[:_NUM_FINDINGS_SHOWN]
    ]
    yield table(headers, cells) if cells else None
    count, against = (
        len(document["damage"]),
        f" against {document['against']}" * bool(document["against"]),
    )
    verdict = f"DAMAGED  {plural(count, 'finding')}" if count else "PASS  no damage"
    yield f"\n{verdict}{against}, {plural(len(document['notices']), 'notice')}"


def _place(finding: Document) -> str:
    return "".join(f" ({text})" for text in (finding["where"], finding["found"]) if text)


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


def _allocation(document: Document) -> Parts:
    chosen, headers = document["chosen"], ("bits per weight", "size", "loss")
    limit = human_bytes(document["budget"]["limit_bytes"])
    yield facts(
        (
            ("budget", f"{limit} of the experts' tensors"),
            (
                "chosen",
                f"{human_bytes(chosen['size_bytes'])}, {chosen['bits_per_weight']:.4f} bits per weight",
            ),
            ("loss", figure(chosen["loss"])),
        )
    )
    of_names = document["uniform"].items()
    uniform = [
        (name, one["bits_per_weight"], human_bytes(one["size_bytes"]), one["loss"])
        for name, one in of_names
    ]
    yield table(("one schema for all", *headers), uniform)
    rows = [
        (f"{layer}: {gemm}", one["chosen"], human_bytes(one["size_bytes"]), one["loss"])
        for layer, of in document["layers"].items()
        for gemm, one in of.items()
    ]
    yield table(("GEMM", "schema", "size", "loss"), rows)
    yield f"\nUse the recipe with: hqconv convert … --config {shlex.quote(document['out'])}"


def _warm(document: Document) -> Parts:
    left_out, gpu = ", ".join(document["activations_left_out"]), document["gpu"]
    yield facts(
        (
            (
                "kernels",
                f"{document['num_kernels']} needed, {document['num_compiled']} compiled now",
            ),
            (
                "for",
                f"{gpu['name']}, {plural(gpu['sm_count'], 'SM')}; {document['asking']['gemm_type']}",
            ),
            ("compiler", document["compiler"]),
            (
                "left out",
                f"activation {left_out}: compiled at the first start of the server"
                if left_out
                else "",
            ),
            ("size", human_bytes(document["num_bytes"])),
            ("time", human_seconds(document["seconds"])),
        )
    )
    yield f"\nThe kernels are in {document['folder']}."
    if document["not_signed_because"]:
        yield f"They are not signed: {document['not_signed_because']}"
        yield f"Start the server with {document['variable']} to use them."
    elif document["variable"].endswith("=1"):  # the folder beside the artifact
        yield f"A server of this user takes them by itself, any other with {document['variable']}."
    else:
        yield f"Start the server with {document['variable']} to use them."


def _warm_checkpoint(document: Document) -> Parts:
    gpu = document["gpu"]
    yield facts(
        (
            (
                "kernels",
                f"{document['num_kernels']} needed, {document['num_compiled']} compiled now",
            ),
            ("of", ", ".join(document["layers"])),
            (
                "left out",
                ", ".join(f"{name} ({why})" for name, why in document["left_out"].items()),
            ),
            ("for", f"{gpu['name']}, {plural(gpu['sm_count'], 'SM')}"),
            ("time", human_seconds(document["seconds"])),
        )
    )
    yield f"\nThe kernels are in Humming's cache, {document['folder']}: a server of this installation finds them there."


def _schemas(document: Document) -> Parts:
    """The weight presets, the shorthands and the activation schemas."""
    yield table(
        (
            "schema",
            "bits per weight",
            "description",
            f"--layout checkpoint runs in {ENGINE.release}",
        ),
        (
            (one["name"], f"{one['bits_per_weight']:g}", one["description"], _served_text(one))
            for one in document["presets"]
        ),
    )
    for short in (document["shorthand"], document["scaled_shorthand"], document["pair_shorthand"]):
        yield f"\n{short['name']}: {short['description']}"
        rows = (
            ("  bits per weight", short["bits_per_weight"]),
            (f"  in {ENGINE.name}", short["stock_vllm"]),
        )
        yield facts(rows)
    yield "\nFILE.toml: the fields of Humming's HummingWeightSchema.\n"
    yield table(
        ("--input-schema", "description", "targets", "weight schemas"),
        (
            (
                one["name"],
                one["description"],
                targets_text(one["targets"]),
                "every schema above"
                if len(one["schemas"]) == len(PRESETS)
                else ", ".join(one["schemas"]),
            )
            for one in document["input_schemas"]
        ),
    )
    yield "\nFILE.toml: the fields of Humming's HummingInputSchema. Not every pair runs on every target."


def _recipes(document: Document) -> Parts:
    rows = [
        (one["option"], one["description"])
        for key in ("recipes", "schemas")
        for one in document[key]
    ]
    yield table(("option of convert", "description"), rows)
    yield f"\nThe files are in {document['folder']}. A file of the same name in the current folder takes precedence."


def _ranking(document: Document) -> Parts:
    """The schemas for one GPU in their order, the recommended one, and the refused ones."""
    gpu, target = document["gpu"], document["target"]
    named = target if gpu == target else f"{gpu} ({target})"
    pair = f"{document['input_schema']} activations and {document['dtype']} parameters"
    yield f"Schemas on {named} with {pair}. {document['rule']}\n"
    rows, before = [], None
    for one in document["schemas"]:
        times, kl, size = one["microseconds"], one["divergence"], one["size_class"]
        rows.append(
            (
                "" if size == before else f"up to {size:g}",
                one["name"] + " *" * (one["caution"] is not None),
                f"{one['bits_per_weight']:.4g}",
                *(f"{kl[how]['kl']:.4f}" if how in kl else "–" for how in (RTN, CALIBRATED)),
                f"{one['errors']['gaussian'][RTN]:.4f}",
                *(
                    f"{times[str(count)]:.0f}" if str(count) in times else "–"
                    for count in (DECODE, PREFILL)
                ),
            )
        )
        before = size
    columns = ("bits", "schema", "stored", "KL, rtn", "KL, calibrated", "error, rtn")
    yield table((*columns, f"{DECODE} tokens, µs", f"{PREFILL} tokens, µs"), rows)
    yield from (
        f"* {text}" for text in dict.fromkeys(one["caution"] for one in document["schemas"]) if text
    )
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
    "artifact": lambda document: iter(artifact_parts(document)),
    "unfinished": _unfinished,
    "schemas": _schemas,
    "ranking": _ranking,
    "recipes": _recipes,
    "report": _report,
    "checkup": _checkup,
    "page": _page,
    "warm": _warm,
    "warm_checkpoint": _warm_checkpoint,
    "publication": _publication,
    "push": _push,
    "allocation": _allocation,
    "evaluation": lambda document: iter(evaluation_parts(document)),
}

# --- values as short texts -----------------------------------------------------------------------------------


def _resumed_text(document: Document) -> str:
    """Work that an earlier run had finished."""
    if document["was_finished"]:
        return "the artifact was already finished: nothing to do"
    if document["replaced_because"]:
        return f"an artifact was there and is replaced: {document['replaced_because']}"
    num_units = document["num_units_resumed"]
    return f"already finished: {plural(num_units, 'output unit')}" if num_units else ""


def _source_text(document: Document) -> str:
    """`Qwen3-30B-A3B: 18867 tensors, 61.07 GB in 16 files`."""
    size = f"{human_bytes(document['num_bytes'])} in {plural(document['num_files'], 'file')}"
    return f"{name_text(document)}: {plural(document['num_tensors'], 'tensor')}, {size}"


def _tensors_text(document: Document) -> str:
    """Numbers and sizes of converted, copied and dropped tensors."""
    kinds = ("converted", "copied", "dropped")
    return ", ".join(
        f"{document[kind]['num_tensors']} {kind} ({human_bytes(document[kind]['num_bytes'])})"
        for kind in kinds
    )


def _dropped_text(document: Document) -> str:
    """Reasons for dropped tensors, one line each for the first few."""
    reasons = list(document["dropped"]["reasons"].items())
    lines = [f"{name}: {reason}" for name, reason in reasons[:NUM_SHOWN]]
    more = len(reasons) - len(lines)
    return "\n".join([*lines, f"… {more} more (--json lists all)"] if more else lines)


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
