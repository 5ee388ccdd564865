"""The command line: parse, call, render. Heavy libraries are imported inside the commands that need them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from hqconv import api as jobs
from hqconv.artifact.manifest import is_unfinished
from hqconv.cli.options import choose_target, default_out, parse_bytes, parse_layers, parse_tokens
from hqconv.errors import HqconvError, RequestError
from hqconv.schemas import artifact
from hqconv.schemas.grid import LINEAR, ROUND_ROBIN, Grid
from hqconv.schemas.target import SOURCE, resolve_schema
from hqconv.version import __version__

EXIT_FAILED, EXIT_INTERNAL, EXIT_IO, EXIT_INTERRUPTED = 1, 1, 4, 130

app = typer.Typer(
    help="Converts Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run as they lie.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(StrEnum):
    """Parameter dtypes."""

    bfloat16 = "bfloat16"
    float16 = "float16"


class Layout(StrEnum):
    """What the expert tensors look like on disk."""

    kernel = artifact.KERNEL
    checkpoint = artifact.CHECKPOINT


class Placement(StrEnum):
    """How EP deals experts to ranks."""

    linear = LINEAR
    round_robin = ROUND_ROBIN


Src = Annotated[str, typer.Argument(metavar="SRC", help="Model folder, or Hub repo id (org/name).")]
Inspected = Annotated[str, typer.Argument(metavar="SRC|OUT", help="Model folder, Hub repo id, or artifact.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Output folder.  [default: ./<model>-<schema>[-tpT][-epP]]")
]
Schema = Annotated[
    str,
    typer.Option(
        help="Preset, shorthand such as int4-g64-zp, FILE.toml, or source: keep a quantized source's own."
    ),
]
InputSchema = Annotated[str, typer.Option(help="What activations are quantized to when serving.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="Serving GPU, sm75 … sm120.  [default: the CUDA device here; --layout checkpoint needs none]"
    ),
]
ParamDtype = Annotated[Dtype | None, typer.Option(help="Parameter dtype.  [default: the checkpoint's]")]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
Ep = Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")]
ExpertPlacement = Annotated[Placement, typer.Option(help="How experts are dealt to EP ranks.")]
RedundantExperts = Annotated[int, typer.Option(min=0, help="Copies of experts, appended.")]
LayoutOption = Annotated[Layout, typer.Option(help="Ready for the kernel, or a checkpoint for vLLM.")]
Device = Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu; the bytes are the same.")]
MaxMemory = Annotated[
    str, typer.Option(help="Host memory for the experts at work: 512MiB, 4GiB, 2GB, bytes.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Worker threads.  [default: all processors]")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted conversion.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an older conversion wrote.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan; write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repo.")]
Verified = Annotated[Path, typer.Argument(metavar="OUT", help="Artifact.")]
Source = Annotated[str | None, typer.Option(help="The checkpoint it was made from: folder or Hub repo id.")]
Checks = Annotated[
    str | None, typer.Option(help="Of files,weights,kernel.  [default: all that can run here]")
]
Layers = Annotated[
    str | None,
    typer.Option(help="Such as 0,3-5.  [default: all; for the kernel the first, middle and last]"),
]
Tokens = Annotated[str, typer.Option(help="Batch sizes for the kernel.")]
VerifyDevice = Annotated[str, typer.Option("--device", help="auto, cuda, cuda:N or cpu.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show errors only (and what --json or --dry-run print).")
]
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
        raise _fail(str(interrupt) or "Interrupted. Nothing was written.", EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_IO) from None
    except OSError as error:
        place = f"\n  where: {error.filename}" if error.filename else ""
        raise _fail(
            f"error: The operating system refused: {error.strerror or error}{place}", EXIT_IO
        ) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        remedy = "set HQCONV_DEBUG=1 to see the traceback, and please report it"
        text = f"internal error: {type(error).__name__}: {error}\n  what to do: {remedy}"
        raise _fail(text, EXIT_INTERNAL) from None


def _fail(text: str, exit_code: int) -> typer.Exit:
    if os.environ.get("HQCONV_DEBUG") == "1":
        traceback.print_exc()
    print(text, file=sys.stderr, flush=True)
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
        print(f"hqconv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@_guarded
def convert(
    src: Src,
    schema: Schema,
    out: Out = None,
    input_schema: InputSchema = "a16",
    target: Target = None,
    dtype: ParamDtype = None,
    tp: Tp = 1,
    ep: Ep = 1,
    expert_placement: ExpertPlacement = Placement.linear,
    redundant_experts: RedundantExperts = 0,
    layout: LayoutOption = Layout.kernel,
    device: Device = "auto",
    max_memory: MaxMemory = "4GiB",
    threads: Threads = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    revision: Revision = None,
    quiet: Quiet = False,
) -> None:
    """Convert the experts of SRC and write an artifact."""
    _check_early(src, resume, overwrite)
    chosen = None if schema == SOURCE else resolve_schema(schema)
    grid = Grid(tp, ep, expert_placement.value, redundant_experts)
    resources = jobs.resources(device, parse_bytes(max_memory), threads)
    sm_version = choose_target(target, layout.value, resources.device)
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with jobs.open_source(src, revision) as checkpoint:
        words = {"sm_version": sm_version, "layout": layout.value, "input_schema": input_schema}
        plan = jobs.plan_for(checkpoint, chosen, dtype.value if dtype else None, grid, **words)
        place = out or default_out(checkpoint.name, chosen.name if chosen else SOURCE, tp, ep)
        job = jobs.Job(checkpoint, plan, place, resources, resume=resume, overwrite=overwrite)
        done = jobs.dry_run(job) if dry_run else jobs.run(job, quiet=quiet)
    _show(done, json=json, quiet=quiet)


def _check_early(src: str, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise RequestError("--resume and --overwrite exclude each other.", remedy="Give one of the two.")
    if is_unfinished(Path(src)):
        raise RequestError(
            "The source is an unfinished conversion of hqconv, not a checkpoint.",
            where=src,
            remedy="Finish it with --resume, or give the model folder it is made from.",
        )


def _show(words: dict[str, Any], *, json: bool, quiet: bool = False) -> None:
    """Data to stdout; of a conversion nothing if quiet, unless asked for as JSON."""
    from hqconv.cli import render

    if json:
        render.print_json(words)
    elif not (quiet and words["kind"] == "summary"):
        render.show(words)


@app.command()
@_guarded
def verify(
    out: Verified,
    source: Source = None,
    checks: Checks = None,
    layers: Layers = None,
    tokens: Tokens = "1,17,256",
    device: VerifyDevice = "auto",
    max_memory: MaxMemory = "4GiB",
    threads: Threads = None,
    json: Json = False,
    revision: Revision = None,
) -> None:
    """Prove that an artifact is right: its files, its weights, and the production kernel on them."""
    words = jobs.verify(
        out,
        source,
        revision,
        checks=tuple(c.strip() for c in checks.split(",")) if checks else None,
        layers=parse_layers(layers),
        tokens=parse_tokens(tokens),
        resources=jobs.resources(device, parse_bytes(max_memory), threads),
    )
    _show(words, json=json)
    if not words["passed"]:
        raise typer.Exit(EXIT_FAILED)


@app.command()
@_guarded
def inspect(path: Inspected, json: Json = False) -> None:
    """Show what a model folder, a Hub repo or an artifact holds."""
    from hqconv.inspection.describe import describe

    _show(describe(path), json=json)


@app.command()
@_guarded
def schemas(json: Json = False) -> None:
    """List the presets and the integer shorthand."""
    from hqconv.inspection.describe import describe_schemas

    _show(describe_schemas(), json=json)


def main() -> None:
    """Entry point of the `hqconv` command."""
    app(prog_name="hqconv")
