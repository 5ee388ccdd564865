"""What `hqconv convert` does with its options: a plan, or the conversion with its progress, warnings and limit."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv import api
from hqconv.artifact.error_summary import check_max_error, over_limit
from hqconv.cli import interrupt, interrupt_messages
from hqconv.cli.text import say
from hqconv.conversion.torchrun import is_distributed

if TYPE_CHECKING:
    from hqconv.conversion.run import ConversionReport
    from hqconv.planning.plan import ConversionPlan


import json
from collections.abc import Callable

from hqconv.errors import OutputError, RequestError


def dry_run(options: dict[str, Any]) -> dict[str, Any]:
    """The words of a plan, with what stands in its way."""
    of_plan, from_dict = (
        {name: options[name] for name in inspect.signature(function).parameters if name in options}
        for function in (api.plan, api.describe_plan)
    )
    return api.describe_plan(api.plan(**of_plan), **from_dict)


def run(options: dict[str, Any], *, quiet: bool) -> ConversionReport:
    """Convert with the options of `hqconv.convert`, showing progress and warnings unless `quiet`."""
    from hqconv.cli.progress import ShownProgress

    nothing = interrupt_messages.of_source(options["src"])
    interrupt.expect(nothing)
    if options["out"] is not None:
        with suppress(OSError, ValueError):  # a place that cannot be is refused by its name
            interrupt.expect(*interrupt_messages.of_output(Path(options["out"]), nothing))
    said: list[str] = []

    def warn(warnings: Iterable[str]) -> None:
        for warning in () if quiet else warnings:
            if warning not in said:
                said.append(warning)
                say(f"warning: {warning}")

    def on_plan(planned: ConversionPlan, place: Path) -> None:
        interrupt.expect(*interrupt_messages.of_output(place, nothing))
        warn(planned.warnings)

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with ShownProgress(quiet=quiet) as progress:
        report = api.convert(**options, on_plan=on_plan, progress=progress.update, in_team=is_distributed())
    warn(report.warnings)
    return report


class MaxError:
    """`--max-error`: what a conversion may lose. Raises RequestError where it is none."""

    def __init__(self, max_error: float | None) -> None:
        check_max_error(max_error)
        self.max_error = max_error

    def judged(self, words: dict[str, Any]) -> bool:
        """Whether a summary keeps to the limit; what does not is put into its words and said on stderr."""
        if self.max_error is None:
            return True
        over = over_limit(words["errors"], self.max_error)
        words |= {"max_error": self.max_error, "over_max_error": over}
        if over:
            worst = over[0]
            say(
                f"error: {len(over)} projections lost more than --max-error {self.max_error:g} allows.\n"
                f"  where: {worst['block']}, {worst['projection']}\n"
                f"  found: a relative error of {worst['relative_error']}\n"
                f"  what to do: The artifact is complete and kept in {words['out']}; another --schema, or --quantizer "
                "mse, loses less."
            )
        return not over


def profile_writer(path: Path | None) -> Callable[[dict[str, Any]], None]:
    """What writes the figures to `path` after the work, or nothing for None; refuses now what cannot be written then.

    Raises RequestError where there is no such folder; what it returns raises OutputError where writing fails.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what, expected = "The profile cannot be written there.", "a file in a folder that exists"
        raise RequestError(what, where="--profile", expected=expected, found=str(path))

    def write(words: dict[str, Any]) -> None:
        if path is None:
            return
        try:
            path.write_text(json.dumps(words, indent=2) + "\n")
        except OSError as error:
            what, remedy = (
                "The profile cannot be written.",
                "The artifact is complete; choose another file next time.",
            )
            raise OutputError(
                what, where=str(path), found=error.strerror or str(error), remedy=remedy
            ) from error

    return write
