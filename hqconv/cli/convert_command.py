"""Steps of `hqconv convert`, `allocate` and `publish`: dry run, work with progress and warnings, limit, profile."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.artifact.error_summary import check_max_error, over_limit
from hqconv.cli.output import say, warn
from hqconv.errors import OutputError, RequestError, number_text, plural

if TYPE_CHECKING:
    from hqconv.conversion.allocate import AllocationReport
    from hqconv.conversion.convert import ConversionReport
    from hqconv.planning.candidates import Candidates
    from hqconv.planning.plan import ConversionPlan
    from hqconv.reports.publication import PublishReport


def dry_run(options: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as a document; its notes name everything that would stop the conversion."""
    options = {**options, "resume": options["resume"] or options["part"] is not None}
    plan_options, description_options = (
        {name: options[name] for name in inspect.signature(function).parameters if name in options}
        for function in (api.plan, api.describe_plan)
    )
    return api.describe_plan(api.plan(**plan_options), **description_options)


class _Warnings:
    """Warnings of a conversion, each shown once."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown: set[str] = set()

    def show(self, warnings: Iterable[str]) -> None:
        """Show the warnings that were not shown before."""
        for warning in warnings:
            if warning not in self._shown:
                self._shown.add(warning)
                warn(warning, quiet=self._quiet)

    def on_plan(self, plan: ConversionPlan, _: Path) -> None:
        """Show the plan's warnings."""
        self.show((*plan.warnings, *plan.notices))


def run(options: dict[str, Any], *, quiet: bool) -> ConversionReport:
    """Convert with the options of `hqconv.convert`. Show progress and warnings unless `quiet`."""
    from hqconv.cli.progress_bar import ShownProgress

    warnings = _Warnings(quiet=quiet)
    with ShownProgress(quiet=quiet) as progress:
        report = api.convert(**options, on_plan=warnings.on_plan, progress=progress.update)
    warnings.show(report.warnings)
    return report


def allocate(options: dict[str, Any], *, quiet: bool) -> AllocationReport:
    """Allocate with the options of `hqconv.allocate`. Show progress and warnings unless `quiet`."""
    from hqconv.cli.progress_bar import ShownProgress

    def on_plan(candidates: Candidates, _: Path) -> None:
        for name, reason in candidates.left_out.items():
            warn(f"{name} is no candidate: {reason}", quiet=quiet)

    with ShownProgress(quiet=quiet) as progress:
        report = api.allocate(**options, on_plan=on_plan, progress=progress.update)
    for warning in report.warnings:
        warn(warning, quiet=quiet)
    return report


def publish(options: dict[str, Any], *, quiet: bool) -> PublishReport:
    """Convert, verify and push with the options of `hqconv.publish`. Show progress and warnings unless `quiet`."""
    from hqconv.cli.progress_bar import ShownProgress

    warnings = _Warnings(quiet=quiet)
    with ShownProgress(quiet=quiet) as progress:
        report = api.publish(
            **options,
            on_plan=warnings.on_plan,
            progress=progress.update,
            check_progress=progress.of_check,
            announce=None if quiet else say,
        )
    warnings.show(() if report.converted is None else report.converted.warnings)
    return report


class MaxError:
    """Error limit of `--max-error`. Raises RequestError for an invalid limit."""

    def __init__(self, max_error: float | None) -> None:
        check_max_error(max_error)
        self.max_error = max_error

    def is_kept(self, document: dict[str, Any]) -> bool:
        """Compare the errors of a conversion with the limit.

        Projections above the limit are added to the document, and the worst of them is printed on stderr.
        """
        if self.max_error is None:
            return True
        over = over_limit(document["errors"], self.max_error)
        document |= {"max_error": self.max_error, "over_max_error": over}
        if over:
            self.say_worst(over, f"The artifact is complete and kept in {document['out']}; another")
        return not over

    def say_worst(self, over: list[dict[str, Any]], remedy: str) -> None:
        """Print the worst of the projections above the limit on stderr. remedy: its first words."""
        assert self.max_error is not None
        worst, error = over[0], over[0]["relative_error"]
        found = number_text(error, self.max_error) if isinstance(error, float) else error
        say(
            f"error: {plural(len(over), 'projection')} above --max-error {self.max_error:g}.\n"
            f"  where: {worst['block']}, {worst['projection']}\n"
            f"  found: a relative error of {found}\n"
            f"  what to do: {remedy} --schema, or --quantizer mse, gives smaller errors."
        )


def profile_writer(path: Path | None) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes the profile to `path` after the conversion; it does nothing for None.

    Raises RequestError now if the folder does not exist. The function raises OutputError if writing fails.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what, expected = "The profile cannot be written there.", "a file in an existing folder"
        raise RequestError(what, where="--profile", expected=expected, found=str(path))

    def write(profile: dict[str, Any]) -> None:
        if path is None:
            return
        try:
            path.write_text(json.dumps(profile, indent=2) + "\n")
        except OSError as error:
            raise OutputError(
                "The profile cannot be written.",
                where=str(path),
                found=error.strerror or str(error),
                remedy="The artifact is complete; choose another file next time.",
            ) from error

    return write
