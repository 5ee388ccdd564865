"""Files of an artifact that people may edit: the model card README.md, an evaluation in it, and SHA256SUMS.

A card comes from the manifest and the source's card, so that the same artifact has the same card. The manifest lists
the card as the conversion wrote it; `hqconv evaluate` may add a section, and the card without it has those bytes again.
The document of the evaluation lies in a comment of the section, so that the report shows it too. SHA256SUMS has the
digests of all files, the manifest's among them, as `sha256sum -c` reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.error_summary import requantized, scale_changes, summarize_errors
from hqconv.artifact.manifest import FileEntry, Manifest, ManifestSource
from hqconv.errors import RequestError, printable_line
from hqconv.io.checkpoint_files import FrontMatter, in_yaml
from hqconv.io.durable_files import write_whole
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import CARD, MANIFEST, PROJECTIONS, SUMS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.options import RTN
from hqconv.schemas.untrusted_files import parse_json, read_json, read_regular

_MARKER = b"<!-- hqconv: what follows is the card of the source, as it was -->\n"
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
_TAGS = ("hqconv", "humming")
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
    first, tags = manifest.source, front.texts("tags") or []
    if first.revision is not None:
        found |= {"base_model": [first.name], "base_model_relation": "quantized"}
    tags = [tags] if isinstance(tags, str) else tags
    return {
        **found,
        "library_name": ENGINE.library_name,
        "tags": list(dict.fromkeys((*tags, *_TAGS))),
    }


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
    made_by = (
        f"hqconv {manifest.hqconv_version}, humming-kernels {manifest.humming_kernels_version}"
    )
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
    yield "Relative Frobenius error of the experts' matrices against the source, over layers:"
    rows = (
        (
            PROJECTIONS.get(p, p),
            *(f"{e[key]:.5f}" for key in ("min", "median", "max")),
            _code(e["worst_block"]),
        )
        for p, e in summarize_errors(errors).items()
    )
    yield from _table(("projection", "min", "median", "max", "worst layer"), rows)
    if changes := scale_changes(errors):
        yield from (
            "",
            f"Codes were kept and scales rounded, by at most {max(changes.values()):.2e} of themselves.",
        )
    if count := requantized(errors).get("num_matrices"):
        yield from ("", f"Quantized anew from a quantized source: {count} matrices.")


def _verifying(manifest: Manifest) -> Iterator[str]:
    yield from ("", "## Verify it", "")
    source = manifest.source
    against = " --source SRC"
    if source.revision is not None:
        gguf = next((f"/{file.name}" for file in source.files if file.name.endswith(".gguf")), "")
        against = f" --source {source.name}{gguf} --revision {source.revision}"
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


# --- SHA256SUMS

EVALUATION_BEGIN, EVALUATION_END = (
    b"<!-- hqconv: evaluation ",
    b"<!-- hqconv: end of the evaluation -->\n",
)
EVALUATION = re.compile(
    re.escape(EVALUATION_BEGIN) + rb"(.*?)-->\n.*?" + re.escape(EVALUATION_END), re.DOTALL
)

MAX_CARD_BYTES = 64 << 20  # of a card that is searched for an evaluation
_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def sums_bytes(
    files: Mapping[str, FileEntry], manifest_sha256: str, card_sha256: str | None = None
) -> bytes:
    """Return the bytes of SHA256SUMS. files: of the manifest. manifest_sha256: of hqconv.json.

    card_sha256: of a model card that has got an evaluation since.
    """
    digests = {path: entry.sha256 for path, entry in files.items()} | {MANIFEST: manifest_sha256}
    digests |= {} if card_sha256 is None else {CARD: card_sha256}
    return "".join(_line(path, digests[path]) for path in sorted(digests)).encode()


def is_own_sums(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's SHA256SUMS exists and fits its manifest. Raises OSError."""
    path = root / SUMS
    if SUMS in manifest.files or not path.is_file():
        return False
    found, expected = path.read_bytes(), sums_bytes(manifest.files, manifest.sha256)
    if found != expected and (root / CARD).is_file():
        expected = sums_bytes(manifest.files, manifest.sha256, sha256_of(root / CARD))
    return found == expected


def are_sums(root: Path) -> bool:
    """Return whether SHA256SUMS exists and lists a manifest, so that it can be written again. Raises OSError."""
    path = root / SUMS
    return (
        path.is_file()
        and re.search(rf"^[0-9a-f]{{64}}  {re.escape(MANIFEST)}$".encode(), path.read_bytes(), re.M)
        is not None
    )


def is_own_card(root: Path, manifest: Manifest, *, with_evaluation: bool = False) -> bool:
    """Return whether an artifact's model card is the one that its manifest lists. Raises OSError.

    with_evaluation: the card may have got an evaluation since.
    """
    path, entry = root / CARD, manifest.files.get(CARD)
    if entry is None or not path.is_file():
        return False
    if path.stat().st_size == entry.size_bytes:
        return sha256_of(path) == entry.sha256
    if not with_evaluation or path.stat().st_size > MAX_CARD_BYTES:
        return False
    return hashlib.sha256(EVALUATION.sub(b"", path.read_bytes())).hexdigest() == entry.sha256


def _line(path: str, sha256: str) -> str:
    """Format one line; a name that would break it is escaped, marked by the line's first character."""
    name = path.translate(_ESCAPED)
    return f"{'' if name == path else chr(92)}{sha256}  {name}\n"


# --- evaluations

_BEFORE = (
    b"\n## Verify it\n",
    b"\n## The source's card\n",
)  # headings of a card; the section comes before the first
_KL = ("mean", "median", "p90", "p99", "max")
_LIKELIHOOD = ("mean_nll", "perplexity")


def check_evaluation(document: Any, manifest_sha256: str) -> dict[str, Any]:
    """Return the document of an evaluation of the artifact with this manifest. Raises ValueError for anything else."""
    if not isinstance(document, dict) or document.get("kind") != "evaluation":
        raise ValueError("it is no document of `hqconv evaluate --json`")
    if document.get("manifest_sha256") != manifest_sha256:
        raise ValueError(
            f"it is of the artifact with manifest sha256 {document.get('manifest_sha256')}"
        )
    try:
        numbers = [document["kl"][key] for key in _KL]
        numbers += [document[key][side] for key in _LIKELIHOOD for side in ("source", "artifact")]
        numbers += [
            document[key]
            for key in ("top1_agreement", "num_tokens", "num_predictions", "context_length")
        ]
        if (error := document["kl"]["standard_error"]) is not None:
            numbers.append(error)
        texts = [document["text"]["name"], document["text"]["sha256"], document["source"]["name"]]
        texts += [
            document[key]
            for key in (
                "artifact",
                "schema",
                "compute_dtype",
                "activations",
                "transformers_version",
            )
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a figure is missing: {error}") from error
    if not all(
        type(one) in (int, float) and (abs(one) < 1e300 or one in (math.inf, -math.inf))
        for one in numbers
    ):
        raise ValueError("a figure is no number")
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a name is no text")
    return document


def read_evaluation(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the document of an evaluation from a file. Raises RequestError unless it is of this artifact."""
    try:
        return check_evaluation(read_json(path), manifest.sha256)
    except (OSError, ValueError) as error:
        raise RequestError(
            "The evaluation cannot be used.",
            where=f"--evaluation {path}",
            expected=f"the document of an evaluation of the artifact with manifest sha256 {manifest.sha256}",
            found=error,
            remedy="Evaluate this artifact: hqconv evaluate OUT --source SRC --text FILE --json > evaluation.json.",
        ) from error


def evaluation_in_card(root: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Return the evaluation in an artifact's model card; None without one of this artifact."""
    try:
        found = EVALUATION.search(read_regular(root / CARD, MAX_CARD_BYTES))
        return None if found is None else check_evaluation(parse_json(found[1]), manifest.sha256)
    except (OSError, ValueError):  # people may edit the card
        return None


def write_evaluation(root: Path, manifest: Manifest, document: Mapping[str, Any]) -> None:
    """Put an evaluation into the model card of an artifact, in place of an older one; SHA256SUMS follows.

    A card that people edited keeps their text. Raises RequestError for a card that is no regular file, OutputError.
    """
    check_card(root)
    has_own_sums = is_own_sums(root, manifest)
    card = EVALUATION.sub(b"", read_regular(root / CARD, MAX_CARD_BYTES))
    begin = min((at for heading in _BEFORE if (at := card.find(heading)) >= 0), default=len(card))
    write_whole(root, CARD, card[:begin] + _section(document) + card[begin:])
    if has_own_sums:
        write_whole(root, SUMS, sums_bytes(manifest.files, manifest.sha256, sha256_of(root / CARD)))


def check_card(root: Path) -> None:
    """Raise RequestError unless the artifact has a model card that may be written."""
    path = root / CARD
    if path.is_symlink() or not path.is_file():
        raise RequestError(
            "The artifact has no model card to write to.",
            where=str(path),
            expected="a regular file",
            remedy="Leave out --write-card.",
        )


def _section(document: Mapping[str, Any]) -> bytes:
    """Return the section: begins with an empty line and a heading, ends with the mark."""
    data = json.dumps(document, sort_keys=True).replace("<", "\\u003c").replace(">", "\\u003e")
    text = "\n".join(section_lines(document))
    return (
        EVALUATION_BEGIN
        + data.encode()
        + b" -->\n"
        + text.encode(errors="backslashreplace")
        + EVALUATION_END
    )


def section_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the section in Markdown."""
    text = printable_line(document["text"]["name"]).replace("`", "'")
    yield from ("", "## What it does to the model's predictions", "")
    yield (
        f"`hqconv evaluate` ran {document['num_tokens']} tokens of `{text}` (sha256 "
        f"{printable_line(document['text']['sha256'])[:12]}…), in contexts of {document['context_length']} tokens, "
        "through the source and through the weights of this artifact (transformers "
        f"{printable_line(document['transformers_version'])}, {printable_line(document['compute_dtype'])}). "
        "Activations were not quantized."
    )
    yield from ("", "| per predicted token | source | artifact |", "| --- | --- | --- |")
    for key, label, digits in (
        ("perplexity", "perplexity", 4),
        ("mean_nll", "negative log-likelihood, nats", 5),
    ):
        values = (document[key][side] for side in ("source", "artifact"))
        yield f"| {label} | {' | '.join(f'{value:.{digits}f}' for value in values)} |"
    kl = document["kl"]
    shown = ", ".join(
        f"{label} {kl[key]:.3g}"
        for key, label in (("median", "median"), ("p99", "99 %"), ("max", "max"))
    )
    yield from (
        "",
        f"Kullback-Leibler divergence of the next-token distributions: mean {kl['mean']:.3g} nats; {shown}.",
    )
    yield f"The most likely token is the same for {100 * document['top1_agreement']:.2f} % of the tokens."
    yield ""
