"""Documents beside the weights of an artifact: the model card README.md, SHA256SUMS and evaluation.json.

The bytes of the card depend on the manifest and on the front matter of the source's card. SHA256SUMS has the digests of
the manifest and of the files that it lists, as `sha256sum -c` reads them. evaluation.json names the manifest's digest,
and counts only while that is the digest of the manifest beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hqconv.artifact.error_summary import summarize_errors
from hqconv.artifact.manifest import FileEntry, Manifest
from hqconv.errors import printable_line
from hqconv.io.checkpoint_files import FrontMatter, in_yaml
from hqconv.io.durable_files import write_whole
from hqconv.io.file_access import sha256_of
from hqconv.planning.spec import DenseSchemas
from hqconv.schemas.artifact_names import CARD, EVALUATION, MANIFEST, PROJECTIONS, SUMS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.gpu_target import class_of
from hqconv.schemas.options import RTN
from hqconv.schemas.untrusted_files import read_json

_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
_TAGS = ("hqconv", "humming")
_REPO = "ORG/NAME"  # stands for the artifact's place
_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def card_bytes(manifest: Manifest, source_card: bytes | None) -> bytes:
    """Return the model card of the artifact with this manifest; the manifest's `files` do not matter.

    Raises VerificationError if the manifest's schema is invalid.
    """
    text = "\n".join(_lines(manifest))
    front = in_yaml(_front_matter(manifest, source_card or b""))
    return front + b"\n" + text.encode(errors="backslashreplace") + b"\n"


def _front_matter(manifest: Manifest, source_card: bytes) -> dict[str, Any]:
    """Return license and similar fields of the source's card, and the artifact's relation to the source."""
    source_front = FrontMatter.of(source_card)
    fields: dict[str, Any] = {}
    for key in _INHERITED:
        value = source_front.texts(key)
        if value is not None:
            fields[key] = value
    if manifest.source.revision is not None:
        fields["base_model"] = [manifest.source.name]
        fields["base_model_relation"] = "quantized"
    fields["library_name"] = ENGINE.library_name
    tags = source_front.texts("tags") or []
    if isinstance(tags, str):
        tags = [tags]
    fields["tags"] = list(dict.fromkeys((*tags, *_TAGS)))
    return fields


def _lines(manifest: Manifest) -> Iterator[str]:
    """Yield the card's text: facts, how to serve and to verify the artifact, and the errors of its weights."""
    yield f"# {printable_line(manifest.source.name)}, {manifest.schema_name} for Humming"
    yield ""
    beside = ", linear layers beside them in its checkpoint layout" * bool(manifest.linear_layers)
    yield (
        f"The experts of this Mixture-of-Experts model are stored as `{manifest.schema_name}` for the Humming GPU "
        f"kernels{beside}; all other tensors have the source's bytes. Made by hqconv; `{MANIFEST}` has all facts."
    )
    yield from _table(("", ""), _facts(manifest))
    yield from ("", "## Serve it", "")
    command = ENGINE.serve_command(_REPO, manifest.layout, manifest.grid)
    if command is None:
        yield f"{ENGINE.name} has no start for these ranks."
    else:
        if manifest.is_kernel:
            yield f"hqconv's plugin for {ENGINE.name} reads this artifact. In a clone of hqconv's repository:"
            yield from ("", f"    {ENGINE.install_command}")
        yield from (f"    {command}", "")
        yield f"{_REPO} is this repo or a folder with its files."
    yield from ("", "## Verify it", "")
    yield f"    sha256sum -c {SUMS}"
    yield f"    hqconv verify . --source {printable_line(_source_argument(manifest))}"
    yield from ("", "## Errors of the weights", "")
    yield "Relative Frobenius error of the experts' matrices against the source, over layers:"
    summary = summarize_errors(manifest.errors())
    keys = {key: key for key in _SUMMARY_KEYS}
    if manifest.calibration is not None:
        keys |= {"median_of_outputs": "median of outputs' errors"}
    rows = [
        (
            PROJECTIONS.get(projection, projection),
            *(f"{error[key]:.5f}" if key in error else "" for key in keys),
        )
        for projection, error in summary.items()
    ]
    yield from _table(("projection", *keys.values()), rows)


_SUMMARY_KEYS = ("min", "median", "max")


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield labels and values of the card's first table; rows without a value are left out of it."""
    source = manifest.source
    schema = manifest.layer_spec.schema
    place = f"a folder named {source.name}"
    yield "source", place if source.revision is None else f"{source.name} at {source.revision}"
    yield (
        "schema",
        f"{schema.name}: {schema.describe()}; {schema.bits_per_weight():g} bits per weight",
    )
    yield (
        "in some layers",
        ", ".join(dict.fromkeys(spec.schema.name for spec in manifest.overrides.values())),
    )
    yield "left as in the source", ", ".join(manifest.left)
    if manifest.linear_layers:
        names = [schema.name for schema in DenseSchemas.from_dict(manifest.request["dense"]).used]
        yield "linear layers beside the experts", ", ".join(names)
    text = manifest.calibration
    read = "" if text is None else f": calibrated with {text.num_tokens} tokens of {text.name}"
    yield "quantizer", f"{manifest.quantizer or RTN}{read}"
    yield "dtypes", f"{manifest.dtype} parameters, {manifest.input_schema} activations"
    if manifest.is_kernel:
        target = manifest.layer_spec.target
        gpus = f"{class_of(target).gpus} ({target})"
        yield "for", f"{gpus}; {manifest.tp} TP x {manifest.ep} EP ranks; no other GPU or ranks"
    else:
        yield "for", f"any GPU and ranks that {ENGINE.name}'s `humming` method serves"
    yield (
        "made by",
        f"hqconv {manifest.hqconv_version}, humming-kernels {manifest.humming_kernels_version}",
    )


def _source_argument(manifest: Manifest) -> str:
    """Return the arguments of `--source`: the repo and commit, or SRC for a folder."""
    source = manifest.source
    if source.revision is None:
        return "SRC"
    gguf_files = [file.name for file in source.files if file.name.endswith(".gguf")]
    return f"{'/'.join([source.name, *gguf_files[:1]])} --revision {source.revision}"


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table without the rows whose second cell is empty."""
    yield ""
    for row in (headers, ("---",) * len(headers), *(row for row in rows if row[1])):
        cells = (printable_line(cell).replace("|", "&#124;") for cell in row)
        yield f"| {' | '.join(cells)} |"


def is_own_card(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's model card is the one that its manifest lists. Raises OSError."""
    path = root / CARD
    entry = manifest.files.get(CARD)
    return (
        entry is not None
        and path.is_file()
        and path.stat().st_size == entry.size_bytes
        and sha256_of(path) == entry.sha256
    )


# --- SHA256SUMS


def sums_bytes(files: Mapping[str, FileEntry], manifest_sha256: str) -> bytes:
    """Return the bytes of SHA256SUMS. files: of the manifest. manifest_sha256: of hqconv.json."""
    digests = {path: entry.sha256 for path, entry in files.items()}
    digests[MANIFEST] = manifest_sha256
    lines = []
    for path in sorted(digests):
        name = path.translate(_ESCAPED)
        mark = "" if name == path else "\\"
        lines.append(f"{mark}{digests[path]}  {name}\n")
    return "".join(lines).encode()


def is_own_sums(root: Path, manifest: Manifest) -> bool:
    """Return whether an artifact's SHA256SUMS is that of its manifest. Raises OSError."""
    return (root / SUMS).read_bytes() == sums_bytes(manifest.files, manifest.sha256)


def are_sums(root: Path) -> bool:
    """Return whether SHA256SUMS exists and lists a manifest, so that it can be written again. Raises OSError."""
    path = root / SUMS
    line = re.compile(rf"^[0-9a-f]{{64}}  {re.escape(MANIFEST)}$".encode(), re.MULTILINE)
    return path.is_file() and line.search(path.read_bytes()) is not None


# --- evaluation.json

_OF_BOTH = {"source": (float,), "artifact": (float,)}
_SHAPE = {  # keys that readers use, and their types
    "manifest_sha256": (str,),
    "artifact": (str,),
    "schema": (str,),
    "source": {"name": (str,)},
    "text": {"name": (str,), "sha256": (str,)},
    "num_tokens": (int,),
    "num_predictions": (int,),
    "context_length": (int,),
    "compute_dtype": (str,),
    "transformers_version": (str,),
    "kl": {
        **dict.fromkeys(("mean", "median", "p90", "p99", "max"), (float,)),
        "standard_error": (float, type(None)),
    },
    "perplexity": _OF_BOTH,
    "mean_nll": _OF_BOTH,
    "top1_agreement": (float,),
}


def write_evaluation(root: Path, document: Mapping[str, Any]) -> None:
    """Write the document of an evaluation beside an artifact, in place of an older one. Raises OutputError."""
    write_whole(root, EVALUATION, f"{json.dumps(document, indent=2)}\n".encode())


def read_evaluation(root: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Return the evaluation beside an artifact; None without one that is whole and names the manifest's digest."""
    try:
        document = read_json(root / EVALUATION)
    except (OSError, ValueError):
        return None
    if not _has_shape(document, _SHAPE) or document["manifest_sha256"] != manifest.sha256:
        return None
    evaluation: dict[str, Any] = document
    return evaluation


def _has_shape(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has the keys and types of a shape: a mapping, or the types that are possible."""
    if not isinstance(shape, Mapping):
        return type(value) in shape
    if not isinstance(value, Mapping):
        return False
    return all(_has_shape(value.get(key), inner) for key, inner in shape.items())
