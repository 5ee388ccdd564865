"""One page about an artifact: HTML with its style and plots inside, nothing to fetch and nothing to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.inspection.report.checked import checks_section, verdict
from hqconv.inspection.report.html import facts, folded, lines, note, number, section, size, table, text
from hqconv.inspection.report.measured import codes_section, errors_section, experts_section
from hqconv.inspection.report.style import STYLE
from hqconv.inspection.words import Words

GENERATOR = "hqconv report"  # by which a page of ours is told from other files
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_SECTIONS = {
    "made": "What it is",
    "errors": "Errors",
    "experts": "Experts",
    "codes": "Codes and scales",
    "checks": "Checks",
    "provenance": "Provenance",
}
_CONVERSION = {
    "quantized": "quantized",
    "direct": "direct: codes and scales kept",
    "direct, scales rounded": "direct, scales rounded: codes kept",
    "requantized": "requantized from exactly decoded float32",
}


def page(words: Words) -> str:
    """The page for the words of `report_words`: a whole HTML document, which loads nothing from anywhere.

    Every text of the words is escaped. The same words give the same page.
    """
    name = text(words["name"])
    parts = {
        "made": _made(words),
        "errors": errors_section(words),
        "experts": experts_section(words),
        "codes": codes_section(words),
        "checks": checks_section(words["verification"]),
        "provenance": _provenance(words),
    }
    links = "".join(f'<a href="#{key}">{text(_SECTIONS[key])}</a>' for key, part in parts.items() if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{name}: report of hqconv</title><style>{STYLE}</style></head>"
        f'<body><header class="top"><h1>{name}</h1>{_lead(words)}{_tiles(words)}<nav>{links}</nav></header>'
        f"<main>{''.join(parts.values())}</main></body></html>\n"
    )


def _lead(words: Words) -> str:
    unreadable = "".join(f'<p class="fail">{lines(one)}</p>' for one in words["unreadable"])
    artifact = words["artifact"]
    if artifact is None:
        return unreadable
    source, schema = artifact["source"]["name"], artifact["schema"]
    sentence = f"Made from {source}: {schema['name']}, {schema['description']}."
    return f'<p class="lead">{text(sentence)}</p>{unreadable}'


def _tiles(words: Words) -> str:
    artifact = words["artifact"]
    kind, said = verdict(words["verification"])
    tiles = [(f'<b class="{kind}">{text(said)}</b>', "checks")]
    if artifact is not None:
        errors = [
            e["relative_error"]
            for b in words["blocks"]
            for e in b["errors"].values()
            if "relative_error" in e
        ]
        span = number(max(errors), 3) if errors else "–"
        tiles += [
            (f"<b>{text(artifact['schema']['name'])}</b>", "weights"),
            (f"<b>{number(float(artifact['schema']['bits_per_weight']))}</b>", "bits per weight"),
            (f"<b>{text(size(artifact['num_bytes']))}</b>", "on disk"),
            (f"<b>{span}</b>", "largest relative error of a block"),
            (f"<b>{text(artifact['target'])}</b>", "for the GPU"),
        ]
    inside = "".join(f'<div class="tile">{said}<span>{text(label)}</span></div>' for said, label in tiles)
    return f'<div class="tiles">{inside}</div>'


def _made(words: Words) -> str:
    artifact = words["artifact"]
    if artifact is None:
        return ""
    revision = artifact["source"]["revision"]
    conversion = "; ".join(
        f"{_CONVERSION.get(kind, kind)} ({count} block{'s' * (count != 1)})"
        for kind, count in artifact["conversion"].items()
    )
    rows = (
        ("source", f"{artifact['source']['name']}{f' at {revision}' if revision else ''}"),
        ("family", artifact["family"]),
        ("weights", f"{artifact['schema']['name']}: {artifact['schema']['description']}"),
        (
            "some blocks",
            "; ".join(f"{len(names)} are {what}" for what, names in artifact["otherwise"].items()),
        ),
        ("left as they were", ", ".join(artifact["left_blocks"])),
        ("conversion", conversion),
        ("scales chosen by", _quantizer(artifact)),
        ("parameters", f"{artifact['dtype']}, {artifact['input_schema']} activations"),
        ("layout", _layout(artifact)),
        ("experts", _ranks(artifact["rank_bytes"])),
        ("serve with", artifact["serve_command"] or "vLLM has no start for these ranks"),
    )
    headers = ("blocks", "count", "experts", "hidden", "intermediate", "top-k", "activation", "stored as")
    keys = ("name", "num_blocks", "num_experts", "hidden_size", "intermediate_size", "top_k", "activation")
    runs = [
        (*(run[key] for key in keys), f"{run['source_format']}, {run['source_dtype']}")
        for run in artifact["blocks"]
    ]
    return section("made", _SECTIONS["made"], facts(rows), table(headers, runs, "MoE blocks"))


def _quantizer(artifact: Words) -> str:
    if not {"quantized", "requantized"} & artifact["conversion"].keys():
        return ""
    if artifact["quantizer"] != "mse":
        return "round to nearest"
    return "least squared error" + (", weighted by importance" if artifact["importance"] else "")


def _layout(artifact: Words) -> str:
    if artifact["layout"] != "kernel":
        return "checkpoint: not cut for ranks, for every GPU"
    copies = artifact["redundant_experts"]
    more = f", {copies} redundant experts" if copies else ""
    placement = f", experts dealt {artifact['expert_placement']}" if artifact["ep"] > 1 else ""
    return f"kernel, for {artifact['target']}: tp {artifact['tp']}, ep {artifact['ep']}{placement}{more}"


def _ranks(rank_bytes: Mapping[str, int]) -> str:
    if not rank_bytes:
        return ""
    least, most = min(rank_bytes.values()), max(rank_bytes.values())
    each = f"{size(least)} each" if least == most else f"{size(least)} to {size(most)}"
    return f"{len(rank_bytes)} rank{'s' * (len(rank_bytes) != 1)}, {each}"


def _provenance(words: Words) -> str:
    artifact, found = words["artifact"], words["provenance"]
    if artifact is None or not found:
        return ""
    source = found["source"]
    rows = (
        ("source", source["name"]),
        ("commit", source["revision"]),
        ("source's index", f"SHA-256 {source['index_sha256']}" if source["index_sha256"] else ""),
        ("family chosen by", found["family_chosen_because"]),
        (
            "made by",
            f"hqconv {artifact['hqconv_version']}, humming-kernels {artifact['humming_kernels_version']}",
        ),
        ("manifest", f"format version {artifact['format_version']}"),
        (
            "manifest's digest",
            f"SHA-256 {found['digest']}" if found["digest"] else "none: of before manifests had one",
        ),
        ("derived from", _derived(found["derived_from"])),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in artifact["tensors"].items())),
        ("damaged", ", ".join(artifact["missing_or_resized_files"])),
    )
    warnings = "".join(note(f"Warning of the conversion: {one}") for one in found["warnings"])
    of_source = [
        (str(f.get("name")), _bytes(f.get("size_bytes")), str(f.get("header_sha256")))
        for f in found["source_files"]
    ]
    own = [(f["name"], _bytes(f["size_bytes"]), f["sha256"]) for f in found["files"]]
    tables = "".join(
        folded(f"{title} ({len(rows)})", table(("file", "size", digest), rows))
        for title, digest, rows in (
            ("Files of the source", "SHA-256 of its header", of_source),
            ("Files of the artifact", "SHA-256", own),
        )
        if rows
    )
    return section("provenance", _SECTIONS["provenance"], facts(rows), warnings, tables)


def _bytes(value: Any) -> str:
    return size(value) if isinstance(value, int) else "–"


def _derived(value: Any) -> str:
    """The artifacts that it was cut from, in whatever words the manifest has."""
    entries = value if isinstance(value, list) else [value] if value else []
    return "; ".join(
        ", ".join(f"{key} {one}" for key, one in entry.items()) if isinstance(entry, dict) else str(entry)
        for entry in entries
    )
