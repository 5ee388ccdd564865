"""The command line: parse, call the API, render. Heavy libraries are imported inside the functions that need them."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import hqconv
from hqconv import api
from hqconv.cli import conversion, interrupt, interrupt_messages, pages
from hqconv.cli.conversion import profile_writer
from hqconv.cli.errors import guarded
from hqconv.cli.help_format import DocumentedGroup, GroupedCommand
from hqconv.cli.json_documents import print_json
from hqconv.cli.options import parse_checks, parse_layers, parse_tokens, recipe_options, takes
from hqconv.cli.text import lead_nowhere, say
from hqconv.conversion.torchrun import is_rank_zero
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError
from hqconv.serving.warm.kernel_store import folder_beside

app = typer.Typer(
    cls=DocumentedGroup,
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
    *("config", "dry_run", "profile", "json", "quiet", "max_error", "push_to", "private", "branch"),
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
    max_error: float | None,
    push_to: str | None,
    private: bool,
    branch: str | None,
    **options: Any,
) -> None:
    """Convert the experts of SRC and write an artifact."""
    place = _place_to_push(push_to, private=private, branch=branch)
    limit = conversion.MaxError(max_error)
    options |= recipe_options(config, context)
    if dry_run:
        planned = conversion.dry_run(options)
        _show(planned, json=json)
        _end(OutputError, is_wrong=bool(planned["notes"]))
        return
    quiet = quiet or not is_rank_zero()  # of several processes the first speaks
    json = json and is_rank_zero()
    write_profile = profile_writer(profile if is_rank_zero() else None)
    pages = conversion.run(options, quiet=quiet)
    write_profile(pages.profile)
    words = pages.to_dict()
    is_good = limit.judged(words)
    if place and is_good:
        words["pushed"] = api.push(pages.out, **place, announce=None if quiet else say).to_dict()
    if json or not quiet:
        _report(words, json=json)
    _end(VerificationError, is_wrong=not is_good)


def _end(kind: type[HqconvError], *, is_wrong: bool) -> None:
    """End with the exit code of such an error, where something is wrong that is shown already."""
    if is_wrong:
        raise typer.Exit(kind.exit_code)


def _place_to_push(push_to: str | None, *, private: bool, branch: str | None) -> dict[str, Any]:
    """Where an artifact is pushed to, by the first of several processes; nothing where it is not."""
    if push_to is None and (private or branch is not None):
        raise RequestError("--private and --branch are of a Hub repo.", remedy="Name it with --push-to.")
    is_wanted = push_to is not None and is_rank_zero()
    return {"repo": push_to, "private": private, "branch": branch} if is_wanted else {}


def _show(words: dict[str, Any], *, json: bool) -> None:
    """Data to stdout."""
    if json:
        print_json(words)
        return
    from hqconv.cli import render

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
@takes(api.verify, "report", "json", "quiet", is_artifact=True)
def verify(
    *,
    checks: str | None,
    layers: str | None,
    tokens: str,
    report: Path | None,
    json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Prove that an artifact is right: its files, its weights, and the production kernel on them."""
    from hqconv.cli.progress import ShownProgress

    write_page = pages.page_writer(options["out"], report, options["threads"])
    options |= {
        "checks": parse_checks(checks),
        "layers": parse_layers(layers),
        "tokens": parse_tokens(tokens),
    }
    with ShownProgress(quiet=quiet) as progress:
        verified = api.verify(**options, progress=progress.of_check)
    if json or not (quiet and verified.passed):
        _report(verified.to_dict(), json=json)
    write_page(verified)
    _end(VerificationError, is_wrong=not verified.passed)


@app.command(cls=GroupedCommand)
@guarded
@takes(pages.report, "json", "quiet", is_artifact=True)
def report(*, json: bool, quiet: bool, **options: Any) -> None:
    """Write a page about an artifact: errors, experts, codes, checks, provenance; it needs no network."""
    words = pages.report(**options)
    if json or not quiet:
        _report(words, json=json)
    of_checks = words["verification"]
    _end(VerificationError, is_wrong=of_checks is not None and not of_checks["passed"])


@app.command(cls=GroupedCommand)
@guarded
@takes(pages.compare, "json", "quiet")
def compare(*, json: bool, quiet: bool, **options: Any) -> None:
    """Show two artifacts of one model side by side: what they are made of, their sizes, what they lost."""
    words = pages.compare(**options)
    if json or not quiet:
        _show(words, json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.warm, "json", is_artifact=True)
def warm(*, json: bool, **options: Any) -> None:
    """Compile the kernels that serving an artifact needs, on any machine with the CUDA compiler."""
    kernels: Path | None = options["kernels"]
    interrupt.expect(*interrupt_messages.of_kernels(kernels or folder_beside(options["out"])))
    _report(api.warm(**options, announce=say), json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.push, "json", "quiet", is_artifact=True)
def push(*, json: bool, quiet: bool, **options: Any) -> None:
    """Put an artifact into a repo of the Hugging Face Hub, its manifest last."""
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    pages = api.push(**options, announce=None if quiet else say)
    if json or not quiet:
        _report(pages.to_dict(), json=json)


@app.command(cls=GroupedCommand)
@guarded
@takes(api.inspect, "json")
def inspect(*, json: bool, **options: Any) -> None:
    """Show what a model folder, a Hub repo or an artifact holds."""
    words = api.inspect(**options)
    _show(words, json=json)
    _end(VerificationError, is_wrong=bool(words.get("is_damaged")))


@app.command(cls=GroupedCommand)
@guarded
@takes(lambda: None, "recipes", "json")
def schemas(*, recipes: bool, json: bool) -> None:
    """List the schemas of weights and of activations, or the recipes that come with hqconv."""
    from hqconv.reports.schemas import describe_recipes, describe_schemas

    _show(describe_recipes() if recipes else describe_schemas(), json=json)


def main() -> None:
    """Entry point of the `hqconv` command."""
    from hqconv.io.file_access import raise_limit

    interrupt.listen()
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
