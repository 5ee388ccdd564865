"""The command `hqconv` and its commands. Heavy libraries are imported in functions."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from hqconv.cli.command import (
    CONVERSION,
    HUB,
    MODES,
    RUN,
    WORK,
    LongCommand,
    Result,
    Screen,
    command,
    flag,
    parse_numbers,
)
from hqconv.cli.output import discard_stdout, fail, say
from hqconv.errors import OutputError, RequestError, VerificationError
from hqconv.io.durable_files import FileKind, output_file, write_whole
from hqconv.schemas.options import NOT_ALLOCATED, split_options
from hqconv.version import __version__

if TYPE_CHECKING:
    from hqconv.planning.plan import ConversionPlan

# Typer does not export UsageError and contains its own Click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_FAILED = VerificationError.exit_code
_WITH_OUT = ("convert", "allocate", "publish", "report")  # their output is -o


class CommandGroup(TyperGroup):
    """Group of all commands. A wrong command line is one message of hqconv, with --json also a JSON document."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **options: Any) -> NoReturn:
        """Run the command of a command line, and exit."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, *positional, **{**options, "standalone_mode": False})
        except SystemExit as end:
            # of a signal, or of rich where the reader of the help has gone away
            discard_stdout()
            code = 0 if end.code == 1 else end.code
        except OSError as error:
            discard_stdout()
            say(f"error: The help cannot be printed: {error.strerror or error}.")
            code = OutputError.exit_code
        except _UsageError as error:
            code = fail(_request_error(error, given), json="--json" in given).exit_code
        sys.exit(code)


def _request_error(error: Any, args: Sequence[str]) -> RequestError:
    """Return the RequestError for a usage error of Typer: its command, and what is wrong."""
    names = args[:1] if error.ctx is None else error.ctx.command_path.split()[1:]
    path = " ".join(["hqconv", *names])
    found = error.format_message()
    remedy = f"`{path} --help` shows what there is."
    if error.ctx is not None and found.startswith("Missing option"):
        params = [param for param in error.ctx.command.params if param.required]
        missing = [param.opts[0] for param in params if not {*param.opts} & {*args}]
        found = f"Missing option: {', '.join(name for name in missing if name.startswith('--'))}."
    if (extra := re.search(r"extra argument\S* \((\S+?)\)", found)) and names[0] in _WITH_OUT:
        remedy = f"The output is an option: -o {extra[1]}."
    return RequestError("The command line is wrong.", where=path, found=found, remedy=remedy)


app = typer.Typer(
    cls=CommandGroup,
    help="Convert Mixture-of-Experts checkpoints into artifacts that the Humming GPU kernels run without repacking.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, flag("Show the version and exit.", "--version")] = False,
) -> None:
    if version:
        print(f"hqconv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command of the command line, and exit."""
    from hqconv.io.file_access import raise_limit

    raise_limit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    app(prog_name="hqconv")


# --- options of several commands

Src = Annotated[
    str, typer.Argument(metavar="SRC", help="Model folder, Hub repo id (org/name), or GGUF file.")
]
Artifact = Annotated[str, typer.Argument(metavar="OUT", help="Artifact folder.")]
Repo = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="Hub repo, created if it does not exist.")
]
OutFolder = Annotated[
    str | None, flag("Output folder.  [default: ./<model>-<schema>…]", "--out", "-o")
]
Config = Annotated[
    str | None,
    flag(
        "Recipe: FILE.toml with options and per-layer schemas, or a name of `hqconv schemas --recipes`."
    ),
]
Revision = Annotated[str | None, flag("Branch, tag or commit of the Hub repo.")]
Source = Annotated[
    str | None, flag("Source checkpoint of the conversion: a folder or a Hub repo id.")
]
Layers = Annotated[
    str | None, flag("Layers to check, e.g. 0,3-5.  [default: all, or a sample for the kernel]")
]
Checks = Annotated[
    str | None,
    flag(
        "Comma-separated list of files, weights and kernel.  [default: all checks this machine can run]"
    ),
]
MaxError = Annotated[
    float | None,
    flag(
        "Fail with exit code 1 if any projection's relative error exceeds this value, e.g. 0.15.",
        min=0,
    ),
]
Evaluate = Annotated[
    str | None,
    flag(
        "Text that the artifact is evaluated on.  [default: the part that --calibrate does not read]"
    ),
]
MaxKl = Annotated[
    float | None,
    flag(
        "Fail with exit code 1 if the evaluation's mean KL divergence exceeds this value, e.g. 0.05.",
        min=0,
    ),
]
Private = Annotated[bool, flag("Create the Hub repo as a private repo.", "--private")]
Branch = Annotated[str | None, flag("Branch of the Hub repo.  [default: main]")]


def _names(text: str | None) -> Any:
    """Split a list with commas; None without one."""
    return None if text is None else [name.strip() for name in text.split(",")]


# --- commands


@app.command(cls=LongCommand)
@command(*CONVERSION, *RUN)
def convert(
    screen: Screen,
    src: Src,
    out: OutFolder = None,
    config: Config = None,
    revision: Revision = None,
    max_error: MaxError = None,
    evaluate: Evaluate = None,
    max_kl: MaxKl = None,
    dry_run: Annotated[
        bool, flag("Print the plan and exit without writing anything.", "--dry-run")
    ] = False,
    profile: Annotated[
        str | None, flag("Write the time spent in each stage to this file, as JSON.")
    ] = None,
    **options: Any,
) -> Result:
    """Quantize the experts of a checkpoint and write an artifact."""
    from hqconv import api
    from hqconv.artifact.error_summary import over_limits
    from hqconv.conversion.option_values import torchrun_part

    def on_plan(plan: ConversionPlan, place: Path) -> None:
        if profile is not None and Path(profile).is_relative_to(place.resolve()):
            raise OutputError(
                "The profile would lie inside the artifact.",
                where=profile,
                remedy="Name another path.",
            )
        screen.on_plan(plan)

    options.setdefault("part", torchrun_part())
    if dry_run:
        arguments, run = split_options(options)
        plan = api.plan(src, config=config, revision=revision, device=run.device, **arguments)
        document = api.describe_plan(plan, out, **vars(run))
        return Result(document, OutputError.exit_code if document["notes"] else 0, is_output=True)
    with screen.progress() as progress:
        report = api.convert(
            src,
            out,
            config=config,
            revision=revision,
            evaluate=evaluate,
            max_kl=max_kl,
            on_plan=on_plan,
            progress=progress.update,
            **options,
        )
    screen.warn(*report.warnings)
    if profile is not None:
        place = Path(profile)
        text = json.dumps({"profile_of": "hqconv convert", **report.profile}, indent=2)
        try:
            write_whole(place.parent, place.name, f"{text}\n".encode())
        except OutputError as error:
            raise OutputError(
                "The conversion is complete; its profile could not be written.",
                where=error.where,
                found=error.found or error.what,
                remedy="Go on with the artifact. For a profile name a place with free space.",
            ) from error
    document = report.to_dict()
    if not report.is_complete:
        return Result(document)
    over = over_limits(report.errors, report.evaluation, max_error, max_kl)
    limits = {"max_error": max_error, "max_kl": max_kl}
    for name, limit in limits.items():
        if limit is not None:
            document |= {name: limit, f"over_{name}": over[f"over_{name}"]}
    return Result(document, _exceeded(over, limits, report.evaluation))


def _exceeded(
    over: Mapping[str, Any], limits: Mapping[str, Any], evaluation: Mapping[str, Any] | None
) -> int:
    """Print a message for each limit that is exceeded, or cannot be judged, and return the exit code.

    over: of `over_limits`.
    """
    errors = []
    if over["over_max_error"]:
        worst = over["over_max_error"][0]
        errors.append(
            VerificationError(
                f"The relative error of {len(over['over_max_error'])} projections is above --max-error.",
                where=f"{worst['block']}, {worst['projection']}",
                expected=limits["max_error"],
                found=worst["relative_error"],
                remedy="Another --schema, or --quantizer mse, gives smaller errors. They are errors of weights, which "
                "--calibrate makes larger, and those of outputs smaller.",
            )
        )
    if over["over_max_kl"]:
        errors.append(
            VerificationError(
                "The mean KL divergence is above --max-kl, or not known.",
                where="" if evaluation is None else evaluation["text"]["name"],
                expected=limits["max_kl"],
                found="no evaluation" if evaluation is None else evaluation["kl"]["mean"],
                remedy="Another --schema, or more --calibrate-tokens, gives a smaller one.",
            )
        )
    for error in errors:
        say(f"error: {error}")
    return _FAILED if errors else 0


@app.command(cls=LongCommand)
@command(*(name for name in CONVERSION if name not in NOT_ALLOCATED), *WORK, "max_gpu_memory")
def allocate(
    screen: Screen,
    src: Src,
    out: Annotated[
        str | None,
        flag(
            "Recipe, a TOML file for `convert --config`.  [default: ./<model>-<budget>.toml]",
            "--out",
            "-o",
        ),
    ] = None,
    size: Annotated[
        str | None, flag("Budget: bytes of the experts' tensors on all ranks, e.g. 120GB.")
    ] = None,
    bits: Annotated[
        float | None,
        flag("Budget: mean bits for each weight of the experts, to two decimals, e.g. 4.25."),
    ] = None,
    candidates: Annotated[
        str | None,
        flag(
            "Comma-separated list of schemas, e.g. mxfp4,int4-g32,fp8.  "
            "[default: a list that fits target and activations]"
        ),
    ] = None,
    revision: Revision = None,
    **options: Any,
) -> Result:
    """Choose a schema for each GEMM of each layer within a budget, and write a recipe for convert --config."""
    from hqconv import api

    with screen.progress() as progress:
        document = api.allocate(
            src,
            out,
            size=size,
            bits=bits,
            candidates=candidates,
            revision=revision,
            progress=partial(progress.of_check, "measured"),
            **options,
        )
    return Result(document)


@app.command()
@command(*WORK, *HUB)
def verify(
    screen: Screen,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Artifact folder, or Hub repo id (org/name).")
    ],
    source: Source = None,
    revision: Annotated[
        str | None,
        flag("Branch, tag or commit: of the source with --source, else of the artifact."),
    ] = None,
    checks: Checks = None,
    layers: Layers = None,
    tokens: Annotated[str, flag("Batch sizes of the kernel check, in tokens.")] = "1,17,256",
    max_error: MaxError = None,
    server: Annotated[
        str | None,
        flag(
            "Address of a running server, http://host:port: compare its log-probabilities with OUT's. OUT may be "
            "a plain checkpoint that evaluate made a reference for. Other checks run if --checks names them."
        ),
    ] = None,
    model: Annotated[
        str | None, flag("Name of the model, if the server of --server has several.")
    ] = None,
    report: Annotated[
        str | None, flag("Write an HTML report with the results to this file.")
    ] = None,
    **options: Any,
) -> Result:
    """Check an artifact: files, decoded weights against the source, the GPU kernel's output; or a running server."""
    from hqconv import api

    page = None
    if report is not None:
        page = output_file(Path(report), "--report", _PAGE, [Path(out), Path(source or out)])
    with screen.progress() as progress:
        verified = api.verify(
            out,
            source,
            checks=_names(checks),
            layers=None if layers is None else parse_numbers(layers, "--layers"),
            tokens=parse_numbers(tokens, "--tokens", 1),
            max_error=max_error,
            server=server,
            model=model,
            revision=revision,
            progress=progress.of_check,
            **options,
        )
    document = verified.to_dict()
    if page is not None:
        from hqconv.cli.page import write_page

        write_page(Path(out), page, document)
        say(f"The page is in {page}.")
    return Result(document, 0 if verified.passed else _FAILED)


_PAGE = FileKind(
    "a report of hqconv", lambda head: b'<meta name="generator" content="hqconv report">' in head
)


@app.command()
@command()
def report(
    screen: Screen,
    out: Artifact,
    page: Annotated[
        str | None, flag("Output file.  [default: ./OUT.report.html]", "--out", "-o")
    ] = None,
) -> Result:
    """Write an HTML report about an artifact: facts, errors, worst experts, evaluation. No network is needed."""
    from hqconv.cli.page import write_page

    root = Path(out)
    place = Path(page or f"{root.resolve().name}.report.html")
    return Result(write_page(root, output_file(place, "-o", _PAGE, [root])))


@app.command()
@command()
def warm(
    screen: Screen,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="Artifact folder, or any checkpoint: a folder or a Hub repo id."
        ),
    ],
    gpu: Annotated[
        str | None,
        flag(
            "GPU of the server: t4, a100, l40s, h200, b200 … or FILE.json.  [default: GPU of this machine]"
        ),
    ] = None,
    tp: Annotated[
        int,
        flag("Number of TP ranks of the server of a checkpoint; an artifact has its own.", min=1),
    ] = 1,
    ep: Annotated[
        int,
        flag("Number of EP ranks of the server of a checkpoint; an artifact has its own.", min=1),
    ] = 1,
    quantization: Annotated[
        str | None, flag("The server's --quantization, for a checkpoint, e.g. humming.")
    ] = None,
    moe_backend: Annotated[
        str | None, flag("The server's --moe-backend, for a checkpoint, e.g. humming.")
    ] = None,
    kernels: Annotated[
        str | None, flag("Output folder for the kernels of an artifact.  [default: OUT-kernels]")
    ] = None,
    jobs: Annotated[
        int | None, flag("Number of parallel compiler processes.  [default: all processors]", min=1)
    ] = None,
) -> Result:
    """Compile the kernels for serving an artifact or a checkpoint. Works on any machine with the CUDA compiler."""
    from hqconv.warm import compile_kernels

    document = compile_kernels.warm(
        out,
        gpu=gpu,
        tp=tp,
        ep=ep,
        quantization=quantization,
        moe_backend=moe_backend,
        kernels=kernels,
        jobs=jobs,
        announce=screen.say,
    )
    return Result(document)


@app.command()
@command()
def push(
    screen: Screen, out: Artifact, repo: Repo, private: Private = False, branch: Branch = None
) -> Result:
    """Upload an artifact to the Hugging Face Hub. One commit replaces an older artifact."""
    from hqconv import api

    pushed = api.push(out, repo, private=private, branch=branch, announce=screen.say)
    return Result(pushed.to_dict())


@app.command(cls=LongCommand)
@command(*CONVERSION, *(name for name in RUN if name not in MODES))
def publish(
    screen: Screen,
    src: Src,
    repo: Repo,
    out: OutFolder = None,
    config: Config = None,
    revision: Revision = None,
    private: Private = False,
    branch: Branch = None,
    checks: Checks = None,
    max_error: MaxError = None,
    evaluate: Evaluate = None,
    max_kl: MaxKl = None,
    **options: Any,
) -> Result:
    """Convert a model, verify the artifact and push it to the Hub; each step only if it is necessary."""
    from hqconv import api

    with screen.progress() as progress:
        published = api.publish(
            src,
            repo,
            out,
            config=config,
            revision=revision,
            private=private,
            branch=branch,
            checks=_names(checks),
            max_error=max_error,
            evaluate=evaluate,
            max_kl=max_kl,
            on_plan=lambda plan, _: screen.on_plan(plan),
            progress=progress.update,
            check_progress=progress.of_check,
            announce=screen.say,
            **options,
        )
    if published.converted is not None:
        screen.warn(*published.converted.warnings)
    document = published.to_dict()
    _exceeded(document, {"max_error": max_error, "max_kl": max_kl}, published.evaluation)
    return Result(document, 0 if published.passed else _FAILED)


@app.command()
@command(*WORK)
def evaluate(
    screen: Screen,
    out: Artifact,
    text: Annotated[str, flag("Text file for the evaluation, which calibration did not see.")],
    source: Annotated[
        str | None,
        flag("Source checkpoint that the artifact was made from: a folder or a Hub repo id."),
    ] = None,
    write_reference: Annotated[
        bool,
        flag(
            "OUT is a plain checkpoint: write its predictions, which verify compares a server with.",
            "--write-reference",
        ),
    ] = False,
    num_tokens: Annotated[
        int, flag("Maximum number of tokens of the text.", "--tokens", min=1)
    ] = 16384,
    context_length: Annotated[
        int, flag("Number of tokens in a sequence.", "--context", min=1)
    ] = 512,
    compute_dtype: Annotated[
        str, flag("Dtype of the computation: float32, bfloat16 or float16.")
    ] = "float32",
    revision: Revision = None,
    **options: Any,
) -> Result:
    """Measure an artifact on a text: KL divergence and perplexity against the source. Needs transformers."""
    from hqconv import api

    document = api.evaluate(
        out,
        source,
        text,
        num_tokens=num_tokens,
        context_length=context_length,
        compute_dtype=compute_dtype,
        revision=revision,
        write_reference=write_reference,
        **options,
    )
    return Result(document)


@app.command()
@command("max_memory", "threads", *HUB)
def check(
    screen: Screen,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT", help="Model folder, Hub repo id (org/name), or GGUF file to check."
        ),
    ],
    against: Annotated[
        str | None,
        flag("Original that it was made from, in any form: a folder, a Hub repo id, a GGUF file."),
    ] = None,
    layers: Layers = None,
    sample: Annotated[
        int | None,
        flag("Number of experts to check in each layer, evenly spread.  [default: all]", min=1),
    ] = None,
    revision: Annotated[
        str | None, flag("Branch, tag or commit of the checkpoint; --against takes org/name@REV.")
    ] = None,
    **options: Any,
) -> Result:
    """Check a checkpoint that anyone published: is it what it says? With --against also if it is the original's."""
    from hqconv import api

    with screen.progress() as progress:
        document = api.check(
            checkpoint,
            against,
            layers=None if layers is None else parse_numbers(layers, "--layers"),
            sample=sample,
            revision=revision,
            progress=partial(progress.of_check, "checking"),
            **options,
        )
    return Result(document, 0 if document["passed"] else _FAILED)


@app.command()
@command()
def inspect(
    screen: Screen,
    path: Annotated[
        str,
        typer.Argument(
            metavar="SRC|OUT", help="Model folder, Hub repo id, GGUF file, or artifact."
        ),
    ],
    revision: Revision = None,
) -> Result:
    """Describe a model folder, a Hub repo or an artifact."""
    from hqconv import api

    document = api.inspect(path, revision=revision)
    return Result(document, _FAILED if document.get("is_damaged") else 0, is_output=True)


@app.command()
@command()
def schemas(
    screen: Screen,
    recipes: Annotated[
        bool, flag("List the recipes and schema files that come with hqconv.", "--recipes")
    ] = False,
    gpu: Annotated[
        str | None,
        flag(
            "Show the schema to take for this GPU (a name or an architecture), and the command.",
            "--for",
        ),
    ] = None,
    shows_all: Annotated[bool, flag("With --for: show all schemas that run.", "--all")] = False,
) -> Result:
    """List the weight and activation schemas, those for one GPU, or the recipes that come with hqconv."""
    from hqconv.reports.documents import describe_gpu, describe_recipes, describe_schemas

    if recipes and gpu is not None:
        raise RequestError("--recipes and --for exclude each other.", remedy="Give one of them.")
    if recipes:
        return Result(describe_recipes(), is_output=True)
    if gpu is None:
        return Result(describe_schemas(), is_output=True)
    return Result({**describe_gpu(gpu), "shows_all": shows_all}, is_output=True)
