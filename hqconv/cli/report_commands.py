"""The commands that check and describe: `verify`, `report`, `evaluate`, `inspect` and `schemas`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.cli.command import PAGE, Result, command, show
from hqconv.cli.options import parse_checks, parse_layers, parse_tokens
from hqconv.cli.output import say
from hqconv.errors import RequestError, VerificationError
from hqconv.io.output_file import output_file

if TYPE_CHECKING:
    from hqconv.verification.result import VerificationReport

Document = dict[str, Any]


@command(api.verify, "report", is_artifact=True)
def verify(
    *, checks: str | None, layers: str | None, tokens: str, report: Path | None, json: bool, quiet: bool, **options: Any
) -> Result:
    """Check an artifact: its files, its decoded weights against the source, and the output of the GPU kernel."""
    from hqconv.cli.progress_bar import ShownProgress

    out = Path(options["out"])
    options |= {"checks": parse_checks(checks), "layers": parse_layers(layers), "tokens": parse_tokens(tokens)}
    with ShownProgress(quiet=quiet) as progress:
        verified = api.verify(**options, progress=progress.of_check)
    if json or not (quiet and verified.passed):
        show(verified.to_dict(), json=json)
    if report is not None:
        _write_page(out, report, verified)
        say(f"The page is in {report}.")
    return Result(None, 0 if verified.passed else VerificationError.exit_code)


def make_report(
    out: str | Path,
    source: str | None = None,
    *,
    page: Path | None = None,
    allocation: Path | None = None,
    evaluation: Path | None = None,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
    cache_limit: str | None = None,
    keep_source: bool = False,
) -> Document:
    """Write an HTML report about an artifact; return its document with `page`, the path of the file (docs/usage.md).

    out: artifact folder. source: source checkpoint, against which the weights are checked. page: output file; None for
    OUT.report.html in the current folder. allocation: document beside the recipe of `hqconv allocate`.
    evaluation: a document of `hqconv evaluate`; None for that in the model card,
    if any. The other parameters are those of `hqconv.verify`.

    Raises OutputError where the page cannot be written, RequestError, VerificationError also for a manifest that is not
    the one of its own digest, and what opening the source raises.
    """
    from hqconv.artifact.manifest import read_manifest
    from hqconv.artifact.model_card import read_evaluation
    from hqconv.reports.page_document import read_allocation

    root = Path(out)
    manifest = read_manifest(root, is_sealed=True)  # refuse a folder without a whole artifact before any work
    if allocation is not None:
        read_allocation(allocation, manifest)
    evaluated = None if evaluation is None else read_evaluation(evaluation, manifest)
    place = page or Path(f"{root.resolve().name}.report.html")
    place = output_file(place, "-o", PAGE, [root])
    verified = None
    if source is not None or revision is not None:
        resources: Document = {"device": device, "max_memory": max_memory, "threads": threads, "revision": revision}
        resources |= {"cache_limit": cache_limit, "keep_source": keep_source}
        verified = api.verify(root, source, checks=["weights"], **resources)
    more: Document = {"allocation": allocation, "evaluation": evaluated}
    return _write_page(root, place, verified, **more, manifest=None if verified else manifest)


def _write_page(root: Path, place: Path, verified: VerificationReport | None, **more: Any) -> Document:
    """Write the page to `place` and return its document. more: for `page_document`."""
    from hqconv.io.durable_files import write_whole
    from hqconv.reports.page import page as page_of
    from hqconv.reports.page_document import page_document

    checks = None if verified is None else verified.to_dict()
    results = [] if verified is None else verified.results
    document = page_document(root, checks, {k: v for result in results for k, v in result.of_experts.items()}, **more)
    write_whole(place.parent, place.name, page_of(document).encode())
    return {**document, "page": str(place)}


@command(make_report, is_artifact=True)
def report(**options: Any) -> Result:
    """Write an HTML report about an artifact: errors, experts, checks, provenance. No network is needed."""
    document = make_report(**options)
    checks = document["verification"]
    return Result(document, 0 if checks is None or checks["passed"] else VerificationError.exit_code)


@command(api.evaluate, is_artifact=True)
def evaluate(*, quiet: bool, **options: Any) -> Result:
    """Measure an artifact on a text: KL divergence and perplexity against the source. Needs transformers."""
    return Result(api.evaluate(**options, announce=None if quiet else say))


@command(api.inspect)
def inspect(**options: Any) -> Result:
    """Describe a model folder, a Hub repo or an artifact."""
    document = api.inspect(**options)
    return Result(document, VerificationError.exit_code if document.get("is_damaged") else 0, is_output=True)


def list_schemas(*, recipes: bool = False, for_gpu: str | None = None, input_schema: str | None = None) -> Document:
    """Describe the schemas; with `recipes` the files of the package, with `for_gpu` a ranking for that GPU.

    input_schema: activations of the ranking, None for a16. Raises RequestError for unknown names, and for options that
    do not go together.
    """
    from hqconv.reports.documents import describe_recipes, describe_schemas
    from hqconv.reports.ranking import rank_schemas

    if for_gpu is not None and not recipes:
        return rank_schemas(for_gpu, input_schema)
    if for_gpu is not None or input_schema is not None:
        named = "--input-schema" if for_gpu is None else "--for"
        raise RequestError(
            f"{named} is for a ranking of schemas.",
            where=named,
            remedy="Use `hqconv schemas --for h200 --input-schema fp8`, without --recipes.",
        )
    return describe_recipes() if recipes else describe_schemas()


@command(list_schemas)
def schemas(**options: Any) -> Result:
    """List the weight and activation schemas, those for one GPU in order, or the recipes that come with hqconv."""
    return Result(list_schemas(**options), is_output=True)
