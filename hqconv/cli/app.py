"""The command line: parse, call the API, render. Heavy libraries are imported inside the functions that need them."""

from __future__ import annotations

import inspect as inspection
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hqconv
from hqconv import api
from hqconv.cli.options import parse_checks, parse_layers, parse_tokens, recipe_options, takes
from hqconv.cli.profile import profile_writer
from hqconv.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    HqconvError,
    OutputError,
    RequestError,
    VerificationError,
    printable,
)
from hqconv.pipeline.environment import in_team, is_first

if TYPE_CHECKING:
    from hqconv.planning.plan import Plan

app = typer.Typer(
    help="Converts Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run as they lie.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_NOTHING = "Interrupted. Nothing was written."
Version = Annotated[bool, typer.Option("--version", help="Show the version.")]


# --- errors ------------------------------------------------------------------------------------------------


@contextmanager
def _one_message() -> Iterator[None]:
    """Turns every exception into one message on stderr and the contract's exit code."""
    try:
        yield
        sys.stdout.flush()
    except HqconvError as error:
        raise _fail(f"error: {error.message()}", error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        raise _fail(str(interrupt) or _NOTHING, EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(OutputError.exit_code) from None
    except OSError as error:
        place = f"\n  where: {error.filename}" if error.filename else ""
        text = f"error: The operating system refused: {error.strerror or error}{place}"
        raise _fail(text, OutputError.exit_code) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        remedy = "Set HQCONV_DEBUG=1 to see the traceback, and please report it."
        text = f"internal error: {type(error).__name__}: {error}\n  what to do: {remedy}"
        raise _fail(text, EXIT_BUG) from None


def _fail(text: str, exit_code: int) -> typer.Exit:
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    with suppress(OSError):  # a full disk under stderr
        print(printable(text), file=sys.stderr, flush=True)
    return typer.Exit(exit_code)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _one_message():
            command(*args, **kwargs)

    return run


# --- commands ----------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Version = False) -> None:
    if version:
        print(f"hqconv {hqconv.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@_guarded
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
    from hqconv.cli.progress import ConversionProgress, say

    places: list[Path] = []
    said: list[str] = []

    def warn(warnings: Iterable[str]) -> None:
        for warning in () if quiet else warnings:
            if warning not in said:
                said.append(warning)
                say(f"warning: {warning}")

    def on_plan(planned: Plan, place: Path) -> None:
        _end_at_once(False)
        places.append(place)
        warn(planned.warnings)

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with ConversionProgress(quiet=quiet) as progress:
            report = api.convert(**options, on_plan=on_plan, progress=progress.update, in_team=in_team())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(places)) from None
    warn(report.warnings)
    write_profile(report.profile)
    words = report.words()
    if place:
        words["pushed"] = api.push(report.out, **place, announce=None if quiet else say).words()
    if json or not quiet:
        _show(words, json=json)


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


def _end_at_once(is_wanted: bool) -> None:
    """Whether Ctrl-C ends the process on the spot: until something is written, and while libraries are loaded.

    Some of them catch the interrupt while they are imported, and go on half loaded.
    """
    if signal.getsignal(signal.SIGINT) in (
        _die,
        signal.default_int_handler,
    ):  # else it is ignored: a background job
        signal.signal(signal.SIGINT, _die if is_wanted else signal.default_int_handler)


def _die(*_: object) -> None:
    with suppress(OSError):
        print(_NOTHING, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def _interrupted(places: list[Path]) -> str:
    """What an interrupted conversion left, and how to go on."""
    if not places:
        return _NOTHING
    from hqconv.artifact.manifest import is_artifact
    from hqconv.pipeline.folder import place_of_work

    out = places[0]
    if not (is_artifact(out) or place_of_work(out)):
        return _NOTHING
    if place_of_work(out) is None:
        return f"Interrupted. {out} holds a finished artifact."
    state = "still holds the old artifact; the new one" if is_artifact(out) else "is no artifact yet; it"
    return (
        f"Interrupted. {out} {state} is unfinished.\n"
        "  what to do: run the same command with --resume to go on, or with --overwrite to start anew"
    )


def _show(words: dict[str, Any], *, json: bool) -> None:
    """Data to stdout."""
    from hqconv.cli import render

    if json:
        render.print_json(words)
    else:
        render.show(words)


@app.command()
@_guarded
@takes(api.verify, "json", is_artifact=True)
def verify(*, checks: str | None, layers: str | None, tokens: str, json: bool, **options: Any) -> None:
    """Prove that an artifact is right: its files, its weights, and the production kernel on them."""
    report = api.verify(
        **options, checks=parse_checks(checks), layers=parse_layers(layers), tokens=parse_tokens(tokens)
    )
    _show(report.words(), json=json)
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)


@app.command()
@_guarded
@takes(api.warm, "json", is_artifact=True)
def warm(*, json: bool, **options: Any) -> None:
    """Compile the kernels that serving an artifact needs, on any machine with the CUDA compiler."""
    from hqconv.cli.progress import say

    _show(api.warm(**options, announce=say), json=json)


@app.command()
@_guarded
@takes(api.push, "json", "quiet", is_artifact=True)
def push(*, json: bool, quiet: bool, **options: Any) -> None:
    """Put an artifact into a repo of the Hugging Face Hub, its manifest last."""
    from hqconv.cli.progress import say

    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    report = api.push(**options, announce=None if quiet else say)
    if json or not quiet:
        _show(report.words(), json=json)


@app.command()
@_guarded
@takes(api.inspect, "json")
def inspect(*, json: bool, **options: Any) -> None:
    """Show what a model folder, a Hub repo or an artifact holds."""
    _show(api.inspect(**options), json=json)


@app.command()
@_guarded
@takes(lambda: None, "json")
def schemas(*, json: bool) -> None:
    """List the schemas of weights and of activations."""
    from hqconv.inspection.schemas import describe_schemas

    _show(describe_schemas(), json=json)


def main() -> None:
    """Entry point of the `hqconv` command."""
    from hqconv.checkpoint.descriptors import raise_limit

    _end_at_once(True)
    raise_limit()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # terminals that know fewer letters
    app(prog_name="hqconv")
