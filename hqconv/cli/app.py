"""The command line: parse, call the API, render. Heavy libraries are imported inside the functions that need them."""

from __future__ import annotations

import inspect as inspection
import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hqconv
from hqconv import api
from hqconv.cli import leftovers, stopping
from hqconv.cli.grouped import GroupedCommand
from hqconv.cli.messages import guarded, lead_nowhere
from hqconv.cli.options import parse_checks, parse_layers, parse_tokens, recipe_options, takes
from hqconv.cli.profile import profile_writer
from hqconv.cli.text import say
from hqconv.errors import (
    RequestError,
    VerificationError,
)
from hqconv.pipeline.environment import in_team, is_first
from hqconv.serving.kernels import folder_beside

if TYPE_CHECKING:
    from hqconv.planning.plan import Plan

app = typer.Typer(
    help="Converts Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run as they lie.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Version = Annotated[bool, typer.Option("--version", help="Show the version.")]


# --- commands ----------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Version = False) -> None:
    if version:
        print(f"hqconv {hqconv.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=GroupedCommand)
@guarded
@takes(
    api.convert,
    *("config", "dry_run", "profile", "json", "quiet", "push_to", "private", "branch"),
    optional=("schema",),
)
def convert(
    *,
    context: typer.Context,
    config: Path | None,
    dry_run: bool,
    profile: Path | None,
    json: bool,
    quiet: bool,
    push_to: str | None,
    private: bool,
    branch: str | None,
    **options: Any,
) -> None:
    """Convert the experts of SRC and write an artifact."""
    place = _place_to_push(push_to, private=private, branch=branch)
    options |= recipe_options(config, context)
    if dry_run:
        _show(_dry_run(options), json=json)
        return
    quiet = quiet or not is_first()  # of several processes the first speaks
    json = json and is_first()
    write_profile = profile_writer(profile if is_first() else None)
    from hqconv.cli.progress import ShownProgress

    nothing = leftovers.of_source(options["src"])
    stopping.expect(nothing)
    if options["out"] is not None:
        with suppress(OSError, ValueError):  # a place that cannot be is refused by its name
            stopping.expect(*leftovers.of_output(Path(options["out"]), nothing))
    said: list[str] = []

    def warn(warnings: Iterable[str]) -> None:
        for warning in () if quiet else warnings:
            if warning not in said:
                said.append(warning)
                say(f"warning: {warning}")

    def on_plan(planned: Plan, place: Path) -> None:
        stopping.expect(*leftovers.of_output(place, nothing))
        warn(planned.warnings)

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with ShownProgress(quiet=quiet) as progress:
        report = api.convert(**options, on_plan=on_plan, progress=progress.update, in_team=in_team())
    warn(report.warnings)
    write_profile(report.profile)
    words = report.words()
    if place:
        words["pushed"] = api.push(report.out, **place, announce=None if quiet else say).words()
    if json or not quiet:
        _report(words, json=json)


def _place_to_push(push_to: str | None, *, private: bool, branch: str | None) -> dict[str, Any]:
    """Where an artifact is pushed to, by the first of several processes; nothing where it is not."""
    if push_to is None and (private or branch is not None):
        raise RequestError("--private and --branch are of a Hub repo.", remedy="Name it with --push-to.")
    is_wanted = push_to is not None and is_first()
    return {"repo": push_to, "private": private, "branch": branch} if is_wanted else {}


def _dry_run(options: dict[str, Any]) -> dict[str, Any]:
    """The words of a plan, with what stands in its way."""
    of_plan, of_words = (
        {name: options[name] for name in inspection.signature(function).parameters if name in options}
        for function in (api.plan, api.describe_plan)
    )
    return api.describe_plan(api.plan(**of_plan), **of_words)


def _show(words: dict[str, Any], *, json: bool) -> None:
    """Data to stdout."""
    from hqconv.cli import render

    if json:
        render.print_json(words)
    else:
        render.show(words)


def _report(words: dict[str, Any], *, json: bool) -> None:
    """`_show` what was done: it is done, and the exit code says so, also where nobody can read of it."""
    try:
        _show(words, json=json)
        sys.stdout.flush()
    except BrokenPipeError:
        lead_nowhere()
    except (OSError, UnicodeError) as error:
        lead_nowhere()
        say(f"warning: The report could not be written to stdout: {error}.")


@app.command(cls=GroupedCommand)
@guarded
@takes(api.verify, "json", "quiet", is_artifact=True)
def verify(
    *, checks: str | None, layers: str | None, tokens: str, json: bool, quiet: bool, **options: Any
) -> None:
    """Prove that an artifact is right: its files, its weights, and the production kernel on them."""
    from hqconv.cli.progress import ShownProgress

    options |= {
        "checks": parse_checks(checks),
        "layers": parse_layers(layers),
        "tokens": parse_tokens(tokens),
    }
    with ShownProgress(quiet=quiet) as progress:
        report = api.verify(**options, progress=progress.of_check)
    if json or not (quiet and report.passed):
        _report(report.words(), json=json)
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.warm, "json", is_artifact=True)
def warm(*, json: bool, **options: Any) -> None:
    """Compile the kernels that serving an artifact needs, on any machine with the CUDA compiler."""
    kernels: Path | None = options["kernels"]
    stopping.expect(*leftovers.of_kernels(kernels or folder_beside(options["out"])))
    _report(api.warm(**options, announce=say), json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.push, "json", "quiet", is_artifact=True)
def push(*, json: bool, quiet: bool, **options: Any) -> None:
    """Put an artifact into a repo of the Hugging Face Hub, its manifest last."""
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    report = api.push(**options, announce=None if quiet else say)
    if json or not quiet:
        _report(report.words(), json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.inspect, "json")
def inspect(*, json: bool, **options: Any) -> None:
    """Show what a model folder, a Hub repo or an artifact holds."""
    _show(api.inspect(**options), json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(lambda: None, "recipes", "json")
def schemas(*, recipes: bool, json: bool) -> None:
    """List the schemas of weights and of activations, or the recipes that come with hqconv."""
    from hqconv.inspection.schemas import describe_recipes, describe_schemas

    _show(describe_recipes() if recipes else describe_schemas(), json=json)


def main() -> None:
    """Entry point of the `hqconv` command."""
    from hqconv.checkpoint.descriptors import raise_limit

    stopping.listen()
    raise_limit()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # terminals that know fewer letters
    try:
        app(prog_name="hqconv")
    except OSError:  # nobody could be told that the command line is wrong
        sys.exit(RequestError.exit_code)
