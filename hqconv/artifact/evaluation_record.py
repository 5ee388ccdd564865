"""Evaluations in an artifact's model card: a section that is added, found again, and removed.

The document of `hqconv evaluate` lies in a comment of the section, so that the report shows it too. The manifest lists
the card as the conversion wrote it; the card without the section has those bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.manifest import Manifest
from hqconv.artifact.sha256sums import (
    EVALUATION,
    EVALUATION_BEGIN,
    EVALUATION_END,
    MAX_CARD_BYTES,
    is_own_sums,
    sums_bytes,
)
from hqconv.errors import RequestError, printable_line
from hqconv.io.durable_files import write_whole
from hqconv.io.file_access import sha256_of
from hqconv.schemas.artifact_names import CARD, SUMS
from hqconv.schemas.untrusted_files import parse_json, read_json, read_regular

_BEFORE = (b"\n## Verify it\n", b"\n## The source's card\n")  # headings of a card; the section comes before the first
_KL = ("mean", "median", "p90", "p99", "max")
_LIKELIHOOD = ("mean_nll", "perplexity")


def check_evaluation(document: Any, manifest_sha256: str) -> dict[str, Any]:
    """Return the document of an evaluation of the artifact with this manifest. Raises ValueError for anything else."""
    if not isinstance(document, dict) or document.get("kind") != "evaluation":
        raise ValueError("it is no document of `hqconv evaluate --json`")
    if document.get("manifest_sha256") != manifest_sha256:
        raise ValueError(f"it is of the artifact with manifest sha256 {document.get('manifest_sha256')}")
    try:
        numbers = [document["kl"][key] for key in _KL]
        numbers += [document[f"{side}_figures"][key] for side in ("source", "artifact") for key in _LIKELIHOOD]
        numbers += [document[key] for key in ("top1_agreement", "num_tokens", "num_predictions", "context_length")]
        texts = [document["text"]["name"], document["text"]["sha256"]]
        texts += [document[key] for key in ("compute_dtype", "activations", "transformers_version")]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a figure is missing: {error}") from error
    if not all(type(one) in (int, float) and not math.isnan(one) for one in numbers):
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
        what, remedy = "The artifact has no model card to write to.", "Leave out --write-card."
        raise RequestError(what, where=str(path), expected="a regular file", remedy=remedy)


def _section(document: Mapping[str, Any]) -> bytes:
    """Return the section: begins with an empty line and a heading, ends with the mark."""
    data = json.dumps(document, sort_keys=True).replace("<", "\\u003c").replace(">", "\\u003e")
    text = "\n".join(section_lines(document))
    return EVALUATION_BEGIN + data.encode() + b" -->\n" + text.encode(errors="backslashreplace") + EVALUATION_END


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
    for key, label, digits in (("perplexity", "perplexity", 4), ("mean_nll", "negative log-likelihood, nats", 5)):
        values = (document[f"{side}_figures"][key] for side in ("source", "artifact"))
        yield f"| {label} | {' | '.join(f'{value:.{digits}f}' for value in values)} |"
    kl = document["kl"]
    shown = ", ".join(
        f"{label} {kl[key]:.3g}" for key, label in (("median", "median"), ("p99", "99 %"), ("max", "max"))
    )
    yield from (
        "",
        f"Kullback-Leibler divergence of the next-token distributions: mean {kl['mean']:.3g} nats; {shown}.",
    )
    yield f"The most likely token is the same for {100 * document['top1_agreement']:.2f} % of the tokens."
    yield ""
