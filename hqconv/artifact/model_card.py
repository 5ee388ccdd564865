"""An artifact's model card, README.md: its source and schema, how to serve and verify it, and the source's card.

All of it comes from the manifest and the source's card, so that the same artifact has the same card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.manifest import Manifest, ManifestSource
from hqconv.errors import printable_line
from hqconv.formats.source_format import DIRECT
from hqconv.io.checkpoint_files import FrontMatter, in_yaml
from hqconv.schemas.artifact_names import MANIFEST, SUMS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.options import RTN

_MARKER = b"<!-- hqconv: what follows is the card of the source, as it was -->\n"
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
_TAGS = ("hqconv", "humming")
_PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}
_HERE = "ORG/NAME"


def card_bytes(manifest: Manifest, card: bytes | None, *, is_artifact: bool) -> bytes:
    """Return the card of the artifact with this manifest (without its `files`), around its source's card.

    is_artifact: the source is an artifact, whose card contains the original's card.
    """
    front = FrontMatter.of(card or b"")
    source = _of_source(card or b"", front, is_artifact=is_artifact)
    lines = "\n".join(_text(manifest)).encode(errors="backslashreplace")
    return in_yaml(_card_metadata(manifest, front)) + b"\n" + lines + b"\n" + source


def _of_source(card: bytes, front: FrontMatter, *, is_artifact: bool) -> bytes:
    """Quote the source's card whole, its front matter as a listing; for an artifact, the quoted card inside its own."""
    if is_artifact and _MARKER in card:
        return b"\n## The source's card\n\n" + card[card.index(_MARKER) :]
    if not card.strip():
        return b""
    listing = b""
    if front.raw is not None:
        fence = b"`" * max(3, 1 + max(map(len, re.findall(rb"`+", front.raw)), default=0))
        end = b"" if front.raw.endswith(b"\n") or not front.raw else b"\n"
        listing = fence + b"yaml\n" + front.raw + end + fence + b"\n\n"
    return b"\n## The source's card\n\n" + _MARKER + b"\n" + listing + front.body


def _card_metadata(manifest: Manifest, front: FrontMatter) -> dict[str, Any]:
    """Return license and similar fields of the source, and the artifact's relation to the source."""
    found = {key: value for key in _KEPT if (value := front.texts(key)) is not None}
    first, tags = manifest.origin, front.texts("tags") or []
    if first.revision is not None:
        found |= {"base_model": [first.name], "base_model_relation": "quantized"}
    tags = [tags] if isinstance(tags, str) else tags
    return {**found, "library_name": ENGINE.library_name, "tags": list(dict.fromkeys((*tags, *_TAGS)))}


# --- the text


def _text(manifest: Manifest) -> Iterator[str]:
    name = printable_line(manifest.source.name)
    yield f"# {name}, {manifest.schema_name} for Humming"
    yield ""
    yield (
        f"The experts of this Mixture-of-Experts model are stored as `{manifest.schema_name}`, as the Humming GPU "
        f"kernels take them; all other tensors have the source's bytes. Made by hqconv; `{MANIFEST}` says of what "
        "and how."
    )
    yield from _table(("", ""), _facts(manifest))
    yield from _serving(manifest)
    yield from _errors(manifest)
    yield from _verifying(manifest)
    yield from _warnings(manifest)


def _facts(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    schema, layers = manifest.schema_name, manifest.blocks.values()
    yield "source", _place(manifest.source)
    for one in manifest.ancestors:
        yield f"which was `{one.schema_name}` of", _place(one.source)
    yield "schema", f"{schema}, {manifest.dtype} parameters, {manifest.input_schema} activations"
    overrides = dict.fromkeys(layer.schema_name or "" for layer in layers if layer.is_overridden)
    yield "in some layers", ", ".join(overrides)
    yield "left as they were", ", ".join(map(_code, manifest.left))
    yield "conversion", ", ".join(dict.fromkeys(layer.conversion for layer in layers))
    yield "quantizer", manifest.quantizer or RTN
    if manifest.is_kernel:
        cuda = "" if manifest.cuda is None else f", CUDA {manifest.cuda}"
        ranks = f"{manifest.tp} TP x {manifest.ep} EP ranks"
        yield "for", f"{manifest.target}{cuda}; {ranks}; no other GPU or ranks"
    else:
        yield "for", f"any GPU and ranks that {ENGINE.name}'s `humming` method serves"
    made_by = f"hqconv {manifest.hqconv_version}, humming-kernels {manifest.humming_kernels_version}"
    yield "made by", made_by


def _place(source: ManifestSource) -> str:
    if source.revision is None:
        return f"a folder named {_code(source.name)}; which repo it came from is not known"
    return f"{_code(source.name)} at {_code(source.revision)}"


def _serving(manifest: Manifest) -> Iterator[str]:
    yield from ("", "## Serve it", "")
    command = ENGINE.serve_command(_HERE, manifest.layout, manifest.grid)
    if command is None or any(ENGINE.is_heads_obstacle(text) for text in manifest.warnings or ()):
        yield f"{ENGINE.name} has no start for these ranks."
        return
    if manifest.is_kernel:
        yield f"hqconv's plugin for {ENGINE.name} reads this artifact. Install it from a clone of hqconv's repository:"
        yield from ("", f"    {ENGINE.install_command}", f"    {command}", "")
        yield f"{_HERE} is this repo or a folder with its files. transformers cannot load the kernel layout."
    else:
        yield from (f"    {command}", "", f"{_HERE} is this repo or a folder with its files.")


def _errors(manifest: Manifest) -> Iterator[str]:
    yield from ("", "## What quantizing cost", "")
    errors = manifest.errors()
    artifact = " (an artifact, whose own error is not in it)" if manifest.ancestors else ""
    yield f"Relative Frobenius error of the experts' matrices against the source{artifact}, over layers:"
    rows = (
        (_PROJECTIONS.get(p, p), *(f"{e[key]:.5f}" for key in ("min", "median", "max")), _code(e["worst_block"]))
        for p, e in summarize_errors(errors).items()
    )
    yield from _table(("projection", "min", "median", "max", "worst layer"), rows)
    if changes := scale_changes(errors):
        yield from ("", f"Codes were kept and scales rounded, by at most {max(changes.values()):.2e} of themselves.")
    if count := requantized(errors).get("num_matrices"):
        yield from ("", f"Quantized anew from a quantized source: {count} matrices.")


def _verifying(manifest: Manifest) -> Iterator[str]:
    yield from ("", "## Verify it", "")
    is_direct = all(layer.conversion == DIRECT for layer in manifest.blocks.values())
    source = manifest.origin if is_direct else manifest.source
    against = " --source SRC"
    if source.revision is not None:
        against = f" --source {source.name} --revision {source.revision}"
    yield from (f"    sha256sum -c {SUMS}", f"    hqconv verify .{printable_line(against)}", "")
    yield (
        "The conversion wrote this card; nothing had verified the artifact by then. The second command reads the "
        "kernel layout back with code of its own, compares codes and scales with the source's bit for bit, and on a "
        "GPU of the target runs the kernel that will serve."
    )


def _warnings(manifest: Manifest) -> Iterator[str]:
    if found := manifest.warnings:
        yield from ("", "## Warnings", "", "What the conversion warned of:", "")
        yield from (f"* {printable_line(text)}" for text in found)


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield ""
    for cells in (headers, ("---",) * len(headers), *(row for row in rows if row[1])):
        yield f"| {' | '.join(printable_line(str(cell)).replace('|', '&#124;') for cell in cells)} |"


def _code(text: object) -> str:
    """Format a name as Markdown code."""
    return f"`{printable_line(str(text)).replace('`', chr(39))}`"
