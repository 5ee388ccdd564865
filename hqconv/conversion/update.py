"""Recognition of a finished artifact that the same request would make of the same source again, for `--update`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hqconv.artifact.build import Origin
from hqconv.artifact.expected import ExpectedArtifact
from hqconv.artifact.manifest import Manifest, json_bytes
from hqconv.io.durable_files import size_of
from hqconv.io.file_access import sha256_of
from hqconv.models.source_protocol import Source
from hqconv.planning.plan import ConversionPlan
from hqconv.schemas.artifact_names import CONFIG, MANIFEST, SUMS


def expected_of(source: Source, plan: ConversionPlan) -> ExpectedArtifact:
    """Return the documents and files of the artifact that a plan gives."""
    return ExpectedArtifact.of(Origin.of(source), plan.experts, plan.spec, plan.units)


def why_not_current(
    source: Source, plan: ConversionPlan, out: Path | None, manifest: Manifest
) -> str:
    """Return why the artifact at `out` is to be made anew; "" if this request and source would give it again.

    out: None for a complete artifact elsewhere, of which only the manifest is here.
    """
    expected = expected_of(source, plan)
    difference = expected.difference(manifest)
    if difference is not None:
        return f"{difference.key} differs: {difference.found} is now {difference.expected}"
    planned = {*plan.paths} - {SUMS, MANIFEST, *plan.made_files}
    if planned != manifest.files.keys() - set(plan.made_files):
        return "the source has other files beside its weights"
    if out is not None:
        missing = manifest.missing_files(lambda name: size_of(out / name))
        if missing:
            return f"{missing[0]} is missing or has another size"
    if manifest.alteration is not None:
        return "the manifest was altered"
    if hashlib.sha256(json_bytes(expected.config)).hexdigest() != manifest.files[CONFIG].sha256:
        return f"{CONFIG} of the source has other bytes"
    return _why_not_same_bytes(source, plan, manifest)


def _why_not_same_bytes(source: Source, plan: ConversionPlan, manifest: Manifest) -> str:
    """Return why the source's bytes are not known to be those of the conversion; names and headers are the same."""
    if source.repo_id is not None:  # the commit is the same
        return ""
    digests = {name: manifest.files[name].sha256 for name in plan.other_files}
    for file in manifest.source.files:
        if file.sha256 is None:
            return (
                "the artifact has no digests of the source's files, which --source-digests records"
            )
        digests[file.name] = file.sha256
    for name, sha256 in digests.items():
        if sha256_of(source.root / name) != sha256:
            return f"{name} of the source has other bytes"
    return ""
