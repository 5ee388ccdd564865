"""Steps of `hqconv convert`: the dry run, the conversion with progress and warnings, the error limit, the profile."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.artifact.error_summary import check_max_error, over_limit
from hqconv.cli import interrupt
from hqconv.cli.output import say, warn
from hqconv.conversion.torchrun import is_distributed
from hqconv.errors import OutputError, RequestError, number_text, plural

if TYPE_CHECKING:
    from hqconv.conversion.convert import ConversionReport
    from hqconv.planning.plan import ConversionPlan


def dry_run(options: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as a document; its notes name everything that would stop the conversion."""
    plan_options, description_options = (
        {name: options[name] for name in inspect.signature(function).parameters if name in options}
        for function in (api.plan, api.describe_plan)
    )
    return api.describe_plan(api.plan(**plan_options), **description_options)


def run(options: dict[str, Any], *, quiet: bool) -> ConversionReport:
    """Convert with the options of `hqconv.convert`. Show progress and warnings unless `quiet`."""
    from hqconv.cli.progress_bar import ShownProgress

    nothing = interrupt.source_case(options["src"])
    interrupt.expect(nothing)
    if options["out"] is not None:
        with suppress(OSError, ValueError):  # an impossible path is refused later, with its name
            interrupt.expect(*interrupt.output_cases(Path(options["out"]), nothing, is_update=options["update"]))
    shown: list[str] = []

    def warn_once(warnings: Iterable[str]) -> None:
        for warning in warnings:
            if warning not in shown:
                shown.append(warning)
                warn(warning, quiet=quiet)

    def on_plan(plan: ConversionPlan, out: Path) -> None:
        interrupt.expect(*interrupt.output_cases(out, nothing, is_update=options["update"]))
        warn_once((*plan.warnings, *plan.notices))

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with ShownProgress(quiet=quiet) as progress:
        report = api.convert(**options, on_plan=on_plan, progress=progress.update, in_team=is_distributed())
    warn_once(report.warnings)
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
            worst, error = over[0], over[0]["relative_error"]
            found = number_text(error, self.max_error) if isinstance(error, float) else error
            say(
                f"error: {plural(len(over), 'projection')} above --max-error {self.max_error:g}.\n"
                f"  where: {worst['block']}, {worst['projection']}\n"
                f"  found: a relative error of {found}\n"
                f"  what to do: The artifact is complete and kept in {document['out']}; another --schema, or "
                "--quantizer mse, gives smaller errors."
            )
        return not over


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
