"""The commands `report` and `schemas`, and the page of `verify --report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.cli.output import say, warn
from hqconv.errors import RequestError

if TYPE_CHECKING:
    from hqconv.artifact.manifest import Manifest
    from hqconv.verification.result import VerificationReport

Document = dict[str, Any]


def report(
    out: str | Path,
    source: str | None = None,
    *,
    page: Path | None = None,
    allocation: Path | None = None,
    overwrite_page: bool = False,
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
    OUT.report.html in the current folder. allocation: document beside the recipe of `hqconv allocate`. overwrite_page:
    replace an existing file of any kind. evaluation: a document of `hqconv evaluate`; None for that in the model card,
    if any. The other parameters are those of `hqconv.verify`.

    Raises OutputError where the page cannot be written, RequestError, VerificationError also for a manifest that is not
    the one of its own digest, and what opening the source raises.
    """
    from hqconv.artifact.evaluation_record import read_evaluation
    from hqconv.artifact.manifest import read_manifest
    from hqconv.reports.page_document import page_place, read_allocation

    root = Path(out)
    manifest = read_manifest(root, is_sealed=True)  # refuse a folder without a whole artifact before any work
    if allocation is not None:
        read_allocation(allocation, manifest)
    evaluated = None if evaluation is None else read_evaluation(evaluation, manifest)
    place = page_place(root, page, overwrite=overwrite_page)
    verification = None
    if source is not None or revision is not None:
        resources: Document = {"device": device, "max_memory": max_memory, "threads": threads, "revision": revision}
        resources |= {"cache_limit": cache_limit, "keep_source": keep_source}
        verification = api.verify(root, source, checks=["weights"], **resources)
    more: Document = {"allocation": allocation, "evaluation": evaluated}
    return write_report(root, place, verification, **more, manifest=None if verification else manifest)


def page_writer(out: str | Path, page: Path | None) -> Callable[[VerificationReport], None]:
    """Return a function that writes the page of `verify --report` after the checks; it does nothing if `page` is None.

    Raises OutputError before the checks if the page could not be written.
    """
    if page is None:
        return lambda verified: None
    from hqconv.reports.page_document import page_place

    place = page_place(Path(out), page, overwrite=False, option="--report")

    def write(verified: VerificationReport) -> None:
        write_report(Path(out), place, verified)
        say(f"The page is in {place}.")

    return write


def write_report(
    root: Path,
    place: Path,
    verification: VerificationReport | None,
    *,
    allocation: Path | None = None,
    evaluation: Document | None = None,
    manifest: Manifest | None = None,
) -> Document:
    """Write the page to `place`, a result of `page_place`, and return its document. Raises the errors of `report`."""
    from hqconv.reports.page import page as page_of
    from hqconv.reports.page_document import page_document, write_page

    checks = None if verification is None else verification.to_dict()
    expert_errors = {
        layer: roles
        for result in ([] if verification is None else verification.results)
        for layer, roles in result.of_experts.items()
        if roles
    }
    more: Document = {"allocation": allocation, "evaluation": evaluation, "manifest": manifest}
    document = page_document(root, checks, expert_errors, **more)
    write_page(place, page_of(document))
    if place.resolve().is_relative_to(root.resolve()):
        warn("The page lies inside the artifact. `hqconv verify` will report it as a file that is not in the manifest.")
    return {**document, "page": str(place)}


def schemas(*, recipes: bool = False, for_gpu: str | None = None, input_schema: str | None = None) -> Document:
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
        remedy = "Use `hqconv schemas --for h200 --input-schema fp8`, without --recipes."
        raise RequestError(f"{named} is for a ranking of schemas.", where=named, remedy=remedy)
    return describe_recipes() if recipes else describe_schemas()
