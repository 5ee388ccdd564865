"""`report`, `verify --report` and `compare`: what they read and what they write."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.cli import interrupt, interrupt_messages
from hqconv.cli.text import say
from hqconv.errors import VerificationError

if TYPE_CHECKING:
    from hqconv.verification.result import VerificationReport

Words = dict[str, Any]


def report(
    out: str | Path,
    source: str | None = None,
    *,
    page: Path | None = None,
    sample: int | None = None,
    overwrite_page: bool = False,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
) -> Words:
    """Writes a page about an artifact, and returns its words with `page`, where it is; see docs/usage.md.

    out: the artifact. source: what it was made from; its weights are then checked against it. page: the file; None:
    OUT.report.html in the current folder. sample: experts of each block to count codes of. overwrite_page: replace
    whatever file lies there. The others are as of `hqconv.verify`.

    Raises OutputError where the page cannot be written, RequestError, VerificationError, and what opening the source
    raises.
    """
    from hqconv.reports.page_file import page_place

    root = _artifact(out)
    place = page_place(root, page, overwrite=overwrite_page)
    interrupt.expect(*interrupt_messages.of_page(place))
    verification = None
    if source is not None or revision is not None:
        at_work: Words = {"device": device, "max_memory": max_memory, "threads": threads}
        verification = api.verify(root, source, checks=["weights"], revision=revision, **at_work)
    return write_report(root, place, verification, sample=sample, threads=threads)


def page_writer(
    out: str | Path, asked: Path | None, threads: int | None
) -> Callable[[VerificationReport], None]:
    """What writes the page of `verify --report` once the checks are done; does nothing where none was `asked` for.

    Raises OutputError now where it could not be written, so that nobody waits in vain.
    """
    if asked is None:
        return lambda verified: None
    from hqconv.reports.page_file import page_place

    place = page_place(Path(out), asked, overwrite=False, option="--report")
    interrupt.expect(*interrupt_messages.of_page(place))

    def write(verified: VerificationReport) -> None:
        write_report(Path(out), place, verified, threads=threads)
        say(f"The page is in {place}.")

    return write


def _artifact(out: str | Path) -> Path:
    """An artifact's folder. Raises what `read_manifest` raises, before anything else is done."""
    from hqconv.artifact.manifest import read_manifest

    read_manifest(Path(out))
    return Path(out)


def write_report(
    root: Path,
    place: Path,
    verification: VerificationReport | None,
    *,
    sample: int | None = None,
    threads: int | None = None,
) -> Words:
    """Write the page at `place`, of `page_place`, and return its words; errors as `report`."""
    from hqconv.reports.page import page as page_of
    from hqconv.reports.page_document import page_document
    from hqconv.reports.page_file import write_page

    found = None if verification is None else verification.to_dict()
    of_experts = {
        block: roles
        for result in ([] if verification is None else verification.results)
        for block, roles in result.of_experts.items()
        if roles
    }
    num_threads = threads or len(os.sched_getaffinity(0))
    words = page_document(root, found, of_experts, sample=sample, num_threads=num_threads)
    write_page(place, page_of(words))
    if place.resolve().is_relative_to(root.resolve()):
        say(
            "warning: The page lies in the artifact, where `hqconv verify` calls it a file that does not belong there."
        )
    return {**words, "page": str(place)}


def compare(
    first: str | Path,
    second: str | Path,
    source: str | None = None,
    *,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
) -> Words:
    """Two artifacts of one model side by side, in words; see docs/usage.md.

    first, second: the artifacts. source: what they were made from; errors are then measured on the weights that are
    read back, else they are those of the manifests. The others are as of `hqconv.verify`.

    Raises RequestError where one is no artifact or they are of different models, VerificationError where one is
    damaged or not what the source comes to, and what opening the source raises.
    """
    from hqconv.reports.compare import compare as compare_dicts

    roots = [Path(first), Path(second)]
    words = compare_dicts(roots)  # before the long work, and what it refuses
    if source is None and revision is None:
        return words
    at_work: Words = {"device": device, "max_memory": max_memory, "threads": threads, "revision": revision}
    return compare_dicts(roots, [_measure(root, source, at_work) for root in roots])


def _measure(root: Path, source: str | None, at_work: Words) -> Any:
    """What the check of weights measures. Raises VerificationError where it finds anything."""
    verified = api.verify(root, source, checks=["weights"], **at_work)
    if not verified.passed:
        findings: Sequence[Any] = [one for result in verified.results for one in result.findings]
        what = f"The artifact cannot be compared: {len(findings)} findings against the source."
        one = findings[0]
        remedy = "Run `hqconv verify` with this source for all of them."
        raise VerificationError(
            what,
            where=f"{root}: {one.where}",
            expected=one.expected,
            found=f"{one.what} {one.found}",
            remedy=remedy,
        )
    return verified.results[0].measured
