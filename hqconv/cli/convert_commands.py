"""The commands that make and publish something: `convert`, `allocate`, `warm`, `push` and `publish`."""

from __future__ import annotations

import inspect
import json as json_module
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hqconv import api
from hqconv.artifact.error_summary import check_max_error, over_limit
from hqconv.cli.command import Result, command
from hqconv.cli.options import parse_checks, without_defaults
from hqconv.cli.output import say, warn
from hqconv.errors import OutputError, VerificationError, number_text, plural
from hqconv.io.durable_files import write_whole

if TYPE_CHECKING:
    from hqconv.planning.allocation import Candidates
    from hqconv.planning.plan import ConversionPlan


@command(api.convert, *("dry_run", "profile", "max_error"))
def convert(
    *,
    context: typer.Context,
    dry_run: bool,
    profile: Path | None,
    log_file: Path | None,
    quiet: bool,
    max_error: float | None,
    **options: Any,
) -> Result:
    """Quantize the experts of a checkpoint and write an artifact."""
    from hqconv.cli.progress_bar import ShownProgress
    from hqconv.conversion.option_values import torchrun_part, torchrun_rank

    check_max_error(max_error)
    options = without_defaults(options, context)
    if dry_run:
        planned = _plan(options)
        return Result(planned, OutputError.exit_code if planned["notes"] else 0, is_output=True)
    options["part"] = options["part"] or torchrun_part()
    quiet = quiet or torchrun_rank() > 0  # one progress bar is enough
    warnings = _Warnings(profile, log_file, quiet=quiet)
    with ShownProgress(quiet=quiet) as progress:
        finished = api.convert(**options, on_plan=warnings.on_plan, progress=progress.update)
    warnings.show(finished.warnings)
    if profile is not None:
        text = json_module.dumps({"profile_of": "hqconv convert", **finished.profile}, indent=2)
        write_whole(profile.parent, profile.name, f"{text}\n".encode())
    document = finished.to_dict()
    if max_error is None or not finished.is_complete:
        return Result(document)
    over = over_limit(document["errors"], max_error)
    document |= {"max_error": max_error, "over_max_error": over}
    if over:
        _say_worst(over, max_error, f"The artifact is complete and kept in {document['out']}; another")
    return Result(document, VerificationError.exit_code if over else 0)


@command(api.allocate)
def allocate(*, quiet: bool, **options: Any) -> Result:
    """Choose a schema for each layer within a budget of bytes or bits, and write a recipe for convert --config."""
    from hqconv.cli.progress_bar import ShownProgress

    def on_plan(candidates: Candidates, _: Path) -> None:
        for name, reason in candidates.left_out.items():
            warn(f"{name} is no candidate: {reason}", quiet=quiet)

    with ShownProgress(quiet=quiet) as progress:
        report = api.allocate(**options, on_plan=on_plan, progress=progress.update)
    for warning in report.warnings:
        warn(warning, quiet=quiet)
    return Result(report.to_dict())


@command(api.warm, is_artifact=True)
def warm(*, quiet: bool, **options: Any) -> Result:
    """Compile the kernels for serving an artifact. Works on any machine with the CUDA compiler."""
    return Result(api.warm(**options, announce=None if quiet else say))


@command(api.push, is_artifact=True)
def push(*, quiet: bool, **options: Any) -> Result:
    """Upload an artifact to the Hugging Face Hub. One commit replaces an older artifact."""
    return Result(api.push(**options, announce=None if quiet else say).to_dict())


@command(api.publish)
def publish(
    *,
    context: typer.Context,
    checks: str | None,
    max_error: float | None,
    log_file: Path | None,
    quiet: bool,
    **options: Any,
) -> Result:
    """Convert a model, verify the artifact and push it to the Hub; each step only if it is necessary."""
    from hqconv.cli.progress_bar import ShownProgress

    warnings = _Warnings(log_file, quiet=quiet)
    options = without_defaults(options, context) | {"checks": parse_checks(checks), "max_error": max_error}
    with ShownProgress(quiet=quiet) as progress:
        published = api.publish(
            **options,
            on_plan=warnings.on_plan,
            progress=progress.update,
            check_progress=progress.of_check,
            announce=None if quiet else say,
        )
    warnings.show(() if published.converted is None else published.converted.warnings)
    if published.over_max_error and max_error is not None:
        _say_worst(published.over_max_error, max_error, "Another")
    return Result(published.to_dict(), 0 if published.passed else VerificationError.exit_code)


def _plan(options: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as a document; its notes name everything that would stop the conversion."""
    options = {**options, "resume": options["resume"] or options["part"] is not None}
    plan_options, description_options = (
        {name: options[name] for name in inspect.signature(function).parameters if name in options}
        for function in (api.plan, api.describe_plan)
    )
    return api.describe_plan(api.plan(**plan_options), **description_options)


class _Warnings:
    """Warnings of a conversion, each shown once. files: output files of the command, outside of the artifact."""

    def __init__(self, *files: Path | None, quiet: bool) -> None:
        self._quiet, self._files = quiet, [file for file in files if file is not None]
        self._shown: set[str] = set()

    def show(self, warnings: Iterable[str]) -> None:
        """Show the warnings that were not shown before."""
        for warning in warnings:
            if warning not in self._shown:
                self._shown.add(warning)
                warn(warning, quiet=self._quiet)

    def on_plan(self, plan: ConversionPlan, out: Path) -> None:
        """Show the plan's warnings. Raises OutputError for a file inside the artifact, whose name is known now."""
        for file in self._files:
            if file.is_relative_to(out.resolve()):
                what = "The file would lie inside the artifact."
                raise OutputError(what, where=str(file), remedy="Name another path.")
        self.show((*plan.warnings, *plan.notices))


def _say_worst(over: list[dict[str, Any]], max_error: float, remedy: str) -> None:
    """Print the worst of the projections above --max-error on stderr. remedy: its first words."""
    worst, error = over[0], over[0]["relative_error"]
    found = number_text(error, max_error) if isinstance(error, float) else error
    say(
        f"error: {plural(len(over), 'projection')} above --max-error {max_error:g}.\n"
        f"  where: {worst['block']}, {worst['projection']}\n"
        f"  found: a relative error of {found}\n"
        f"  what to do: {remedy} --schema, or --quantizer mse, gives smaller errors."
    )
