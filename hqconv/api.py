"""One conversion of the command line: source, plan, place and resources, run or shown. No Typer here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.artifact.manifest import is_artifact, is_unfinished, read_manifest
from hqconv.checkpoint.gguf import holds_gguf
from hqconv.cli.options import check_places, choose_device
from hqconv.errors import OutputError
from hqconv.schemas.artifact import KERNEL

if TYPE_CHECKING:
    from hqconv.checkpoint.folder import Checkpoint
    from hqconv.pipeline.workers import Resources
    from hqconv.plan.plan import Plan
    from hqconv.schemas.grid import Grid
    from hqconv.schemas.target import TargetSchema


@dataclass(frozen=True)
class Job:
    """A conversion, ready to run."""

    checkpoint: Checkpoint
    plan: Plan
    out: Path
    resources: Resources
    resume: bool
    overwrite: bool


def resources(device: str, max_memory_bytes: int, threads: int | None) -> Resources:
    """What the options allow. Raises RequestError for a device that is not here."""
    from hqconv.pipeline.workers import Resources, default_threads

    return Resources(choose_device(device), max_memory_bytes, threads or default_threads())


@contextmanager
def _without_gc() -> Iterator[None]:
    """Pauses cycle collection: walking 70,000 tensors' objects again and again would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_gc()
def open_source(src: str, revision: str | None) -> Checkpoint:
    """`Checkpoint.open`, an artifact in the kernel layout as a source, or a folder with experts in GGUF files."""
    from hqconv.checkpoint.folder import Checkpoint

    path = Path(src)
    if revision is None and is_artifact(path) and read_manifest(path)["layout"] == KERNEL:
        from hqconv.artifact.source import ArtifactSource

        return ArtifactSource(path, name=path.resolve().name)
    if src and revision is None and holds_gguf(path):
        from hqconv.sources.gguf import open_with_gguf

        return open_with_gguf(path)
    return Checkpoint.open(src, revision)


@_without_gc()
def plan_for(
    checkpoint: Checkpoint, schema: TargetSchema | None, param_dtype: str | None, grid: Grid, **words: Any
) -> Plan:
    """The plan of a request; what is None becomes the checkpoint's own."""
    from hqconv.experts.map import map_checkpoint
    from hqconv.plan.own_schema import make_request
    from hqconv.plan.plan import make_plan

    experts = map_checkpoint(checkpoint)
    request = make_request(experts, checkpoint.config, schema, param_dtype, grid, **words)
    return make_plan(checkpoint, experts, request)


@_without_gc()
def dry_run(job: Job) -> dict[str, Any]:
    """The plan in words, with what stands in its way; writes nothing."""
    from hqconv.inspection.describe import describe_plan, output_notes
    from hqconv.pipeline.workers import count_workers, working_bytes

    blocks, request = job.plan.experts.blocks, job.plan.request
    words = describe_plan(
        job.checkpoint,
        job.plan,
        num_workers=count_workers(blocks, request, job.resources),
        worker_bytes=max(working_bytes(block, request) for block in blocks),
    )
    try:
        check_places(job.checkpoint.root, job.out)
        modes = {"resume": job.resume, "overwrite": job.overwrite}
        notes = output_notes(job.out, job.plan.num_bytes_out, **modes)
    except OutputError as error:
        notes = [error.message()]
    return {**words, "device": str(job.resources.device), "out": str(job.out), "notes": notes}


def run(job: Job, *, quiet: bool) -> dict[str, Any]:
    """Convert, with progress and warnings on stderr, and return the summary in words.

    Raises KeyboardInterrupt with a message that says how to go on.
    """
    from hqconv.cli.progress import ConversionProgress, say
    from hqconv.inspection.describe import num_planned_bytes
    from hqconv.pipeline import run as conversion

    check_places(job.checkpoint.root, job.out)
    for warning in () if quiet else job.plan.warnings:
        say(f"warning: {warning}")
    total = num_planned_bytes(job.plan)
    try:
        with ConversionProgress(total, len(job.plan.groups), quiet=quiet) as progress:
            summary = conversion.convert(
                job.checkpoint,
                job.plan,
                job.out,
                job.resources,
                resume=job.resume,
                overwrite=job.overwrite,
                report=progress.report,
                on_group=progress.on_group,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(job.out)) from None
    return _summary_words(job, asdict(summary))


def _interrupted(out: Path) -> str:
    if is_artifact(out):
        return f"Interrupted. {out} holds a finished artifact."
    if not is_unfinished(out):
        return "Interrupted. Nothing was written."
    return (
        f"Interrupted. {out} is unfinished and not an artifact yet.\n"
        "  what to do: run the same command with --resume to go on, or with --overwrite to start anew"
    )


def _summary_words(job: Job, summary: dict[str, Any]) -> dict[str, Any]:
    from hqconv.inspection.describe import conversions, summarize_requantized

    request = job.plan.request
    return {
        "kind": "summary",
        **summary,
        "out": str(job.out),
        "schema": request.schema.name,
        "layout": request.layout,
        "target": f"sm{request.sm_version}",
        "dtype": request.param_dtype,
        "tp": request.grid.tp,
        "ep": request.grid.ep,
        "warnings": list(job.plan.warnings),
        "conversion": conversions(job.plan.experts, request),
        "requantized": summarize_requantized(summary["errors"]),
    }


def verify(
    out: Path,
    source: str | None,
    revision: str | None,
    *,
    checks: tuple[str, ...] | None,
    layers: frozenset[int] | None,
    tokens: tuple[int, ...],
    resources: Resources,
) -> dict[str, Any]:
    """Verify an artifact, against its source where it is given; the report in words."""
    from hqconv.verification import run as verification

    device = resources.device if resources.device.type == "cuda" else None
    options = verification.Options(
        checks, layers, tokens, device, resources.num_threads, resources.max_memory_bytes
    )
    with nullcontext(None) if source is None else open_source(source, revision) as checkpoint:
        report = verification.verify(out, checkpoint, options)
    return {"kind": "report", "source": source, **report.words()}
