"""Commands of the command line: parse options, call the API, render. Heavy libraries are imported inside functions."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import hqconv
from hqconv import api
from hqconv.cli import convert_command, interrupt, report_commands
from hqconv.cli.convert_command import profile_writer
from hqconv.cli.options import parse_checks, parse_layers, parse_tokens, takes, without_defaults
from hqconv.cli.output import ClosedStream, discard_stdout, guarded, of_rank, print_error, print_json, say, warn
from hqconv.conversion.parts import torchrun_part, torchrun_rank
from hqconv.errors import HqconvError, OutputError, RequestError, VerificationError

# Typer does not export UsageError and contains its own Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class CommandGroup(TyperGroup):
    """Group of all commands. A wrong command line is one message of hqconv, with --json also a JSON document."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **options: Any) -> NoReturn:
        """Run the command of a command line, and exit."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, *positional, **{**options, "standalone_mode": False})
        except SystemExit:  # raised by rich where the reader of the help has gone away, and after a shell completion
            discard_stdout()
            code = 0
        except OSError as error:
            discard_stdout()
            say(f"error: The help cannot be printed: {error.strerror or error}.")
            code = OutputError.exit_code
        except _UsageError as error:
            wrong = _request_error(error, given)
            say(f"error: {wrong.message()}")
            if "--json" in given:
                print_error(wrong, wrong.exit_code)
            code = wrong.exit_code
        sys.exit(code)


def _request_error(error: Any, args: Sequence[str]) -> RequestError:
    """Return the RequestError for a usage error of Typer: its command, and what is wrong."""
    path = " ".join(["hqconv", *(args[:1] if error.ctx is None else error.ctx.command_path.split()[1:])])
    listed = "commands" if path == "hqconv" else "options"
    return RequestError(
        "The command line is wrong.",
        where=path,
        found=error.format_message().replace("Value error, ", ""),
        remedy=f"`{path} --help` lists the {listed}.",
    )


app = typer.Typer(
    cls=CommandGroup,
    help="Convert Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run without repacking.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Version = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Version = False) -> None:
    if version:
        print(f"hqconv {hqconv.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@guarded
@takes(api.convert, *("dry_run", "profile", "max_error"))
def convert(
    *,
    context: typer.Context,
    dry_run: bool,
    profile: Path | None,
    json: bool,
    quiet: bool,
    max_error: float | None,
    **options: Any,
) -> None:
    """Quantize the experts of a checkpoint and write an artifact."""
    limit = convert_command.MaxError(max_error)
    options = without_defaults(options, context)
    if dry_run:
        planned = convert_command.dry_run(options)
        _print(planned, json=json)
        _end(OutputError, is_wrong=bool(planned["notes"]))
        return
    options["part"] = options["part"] or torchrun_part()
    profile = None if profile is None else of_rank(profile)
    write_profile = profile_writer(profile)
    finished = convert_command.run(options, quiet=quiet or torchrun_rank() > 0)  # one progress bar is enough
    write_profile(finished.profile)
    document = finished.to_dict()
    is_good = not finished.is_complete or limit.is_kept(document)
    if json or not quiet:
        _print_result(document, json=json)
    _end(VerificationError, is_wrong=not is_good)


@app.command()
@guarded
@takes(api.allocate)
def allocate(*, json: bool, quiet: bool, **options: Any) -> None:
    """Choose a schema for each layer within a budget of bytes or bits, and write a recipe for convert --config."""
    document = convert_command.allocate(options, quiet=quiet).to_dict()
    if json or not quiet:
        _print_result(document, json=json)


def _end(kind: type[HqconvError], *, is_wrong: bool) -> None:
    """Exit with the code of this kind of error if `is_wrong`; the problem is already shown."""
    if is_wrong:
        raise typer.Exit(kind.exit_code)


def _print(document: dict[str, Any], *, json: bool) -> None:
    """Print a document to stdout, as JSON or as tables. A reader that has gone away has seen enough: no error."""
    try:
        if json:
            print_json(document)
        else:
            from hqconv.cli import render

            render.show(document)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def _print_result(document: dict[str, Any], *, json: bool) -> None:
    """Print the result of finished work. A closed or full stdout does not change the exit code."""
    try:
        _print(document, json=json)
    except (OSError, UnicodeError) as error:
        discard_stdout()
        warn(f"The report could not be written to stdout: {error}.")


@app.command()
@guarded
@takes(api.verify, "report", is_artifact=True)
def verify(
    *, checks: str | None, layers: str | None, tokens: str, report: Path | None, json: bool, quiet: bool, **options: Any
) -> None:
    """Check an artifact: its files, its decoded weights against the source, and the output of the GPU kernel."""
    from hqconv.cli.progress_bar import ShownProgress

    write_page = report_commands.page_writer(options["out"], report)
    options |= {"checks": parse_checks(checks), "layers": parse_layers(layers), "tokens": parse_tokens(tokens)}
    with ShownProgress(quiet=quiet) as progress:
        verified = api.verify(**options, progress=progress.of_check)
    if json or not (quiet and verified.passed):
        _print_result(verified.to_dict(), json=json)
    write_page(verified)
    _end(VerificationError, is_wrong=not verified.passed)


@app.command()
@guarded
@takes(report_commands.report, is_artifact=True)
def report(*, json: bool, quiet: bool, **options: Any) -> None:
    """Write an HTML report about an artifact: errors, experts, codes, checks, provenance. No network is needed."""
    document = report_commands.report(**options)
    if json or not quiet:
        _print_result(document, json=json)
    of_checks = document["verification"]
    _end(VerificationError, is_wrong=of_checks is not None and not of_checks["passed"])


@app.command()
@guarded
@takes(api.warm, is_artifact=True)
def warm(*, json: bool, quiet: bool, **options: Any) -> None:
    """Compile the kernels for serving an artifact. Works on any machine with the CUDA compiler."""
    document = api.warm(**options, announce=None if quiet else say)
    if json or not quiet:
        _print_result(document, json=json)


@app.command()
@guarded
@takes(api.push, is_artifact=True)
def push(*, json: bool, quiet: bool, **options: Any) -> None:
    """Upload an artifact to the Hugging Face Hub. One commit replaces an older artifact."""

    pushed = api.push(**options, announce=None if quiet else say)
    if json or not quiet:
        _print_result(pushed.to_dict(), json=json)


@app.command()
@guarded
@takes(api.publish)
def publish(
    *, context: typer.Context, checks: str | None, max_error: float | None, json: bool, quiet: bool, **options: Any
) -> None:
    """Convert a model, verify the artifact and push it to the Hub; each step only if it is necessary."""
    limit = convert_command.MaxError(max_error)
    options = without_defaults(options, context) | {"checks": parse_checks(checks), "max_error": max_error}
    published = convert_command.publish(options, quiet=quiet)
    if published.over_max_error:
        limit.say_worst(published.over_max_error, "Another")
    if json or not quiet:
        _print_result(published.to_dict(), json=json)
    _end(VerificationError, is_wrong=not published.passed)


@app.command()
@guarded
@takes(api.collect_importance)
def importance(*, json: bool, quiet: bool, **options: Any) -> None:
    """Make a file for convert --importance from a text. Needs transformers."""
    document = api.collect_importance(**options, announce=None if quiet else say)
    if json or not quiet:
        _print_result(document, json=json)


@app.command()
@guarded
@takes(api.evaluate, is_artifact=True)
def evaluate(*, json: bool, quiet: bool, **options: Any) -> None:
    """Measure an artifact on a text: KL divergence and perplexity against the source. Needs transformers."""
    document = api.evaluate(**options, announce=None if quiet else say)
    if json or not quiet:
        _print_result(document, json=json)


@app.command()
@guarded
@takes(api.inspect)
def inspect(*, json: bool, quiet: bool, **options: Any) -> None:
    """Describe a model folder, a Hub repo or an artifact."""
    document = api.inspect(**options)
    if json or not quiet:
        _print(document, json=json)
    _end(VerificationError, is_wrong=bool(document.get("is_damaged")))


@app.command()
@guarded
@takes(report_commands.schemas)
def schemas(*, json: bool, quiet: bool, **options: Any) -> None:
    """List the weight and activation schemas, those for one GPU in order, or the recipes that come with hqconv."""
    document = report_commands.schemas(**options)
    if json or not quiet:
        _print(document, json=json)


def main() -> None:
    """Entry point of the `hqconv` command."""
    from hqconv.io.file_access import raise_limit

    interrupt.listen()
    raise_limit()
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = ClosedStream()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    app(prog_name="hqconv")
