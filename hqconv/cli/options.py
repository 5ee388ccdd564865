"""Options of the commands: the API's parameters, with help texts, flags and parsers.

Names and defaults are written once, in the signatures of `hqconv.api`; help texts are here.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqconv.errors import RequestError
from hqconv.schemas import gpu_target, input_schema, weight_schema
from hqconv.schemas.options import CHECKS, ConversionOption, conversion_options
from hqconv.schemas.recipe import no_schema
from hqconv.schemas.untrusted_files import RECIPES, shipped


@dataclass(frozen=True)
class Option:
    """One parameter on the command line: its type for Typer, its help, its flags and further settings.

    metavar: given for arguments, which have no flag.
    """

    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def annotation(self, group: str | None) -> Any:
        """The type of the command's parameter, for Typer; `group`: the heading that it stands under in the help."""
        settings = {
            "help": self.help.replace("[", r"\["),
            "rich_help_panel": group,
            **self.settings,
        }
        if self.metavar:
            return Annotated[self.kind, typer.Argument(metavar=self.metavar, **settings)]
        return Annotated[self.kind, typer.Option(*self.flags, **settings)]


def _names_of(known: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Completion of an option's value in a shell: the known names with the typed prefix."""
    return lambda incomplete: [name for name in known() if name.startswith(incomplete)]


def _list_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Completion of a comma-separated list: each known name that is not in the list yet."""

    def complete(incomplete: str) -> list[str]:
        before, comma, typed = incomplete.rpartition(",")
        return [
            f"{before}{comma}{name}"
            for name in known
            if name.startswith(typed) and name not in before.split(",")
        ]

    return complete


_AT_LEAST_ONE = {"min": 1}
_ANY_PATH = {"readable": False}  # readability is checked later, with hqconv's own message
OPTIONS: dict[str, Option] = {
    "src": Option(str, "Model folder, Hub repo id (org/name), or GGUF file.", metavar="SRC"),
    "checkpoint": Option(
        str, "Model folder, Hub repo id (org/name), or GGUF file to check.", metavar="CKPT"
    ),
    "against": Option(
        str | None,
        "Original that it was made from, in any form: a folder, a Hub repo id, a GGUF file.",
    ),
    "sample": Option(
        int | None,
        "Number of experts to check in each layer, evenly spread.  [default: all]",
        settings=_AT_LEAST_ONE,
    ),
    "path": Option(str, "Model folder, Hub repo id, GGUF file, or artifact.", metavar="SRC|OUT"),
    "out": Option(
        Path | None,
        "Output folder.  [default: ./<model>-<schema>[-tpT][-epP], plus other non-default options]",
        ("--out", "-o"),
        settings=_ANY_PATH,
    ),
    "config": Option(
        Path | None,
        "Recipe: a TOML file with these options and per-layer overrides, or a name from `hqconv schemas --recipes`.",
        settings={
            **_ANY_PATH,
            "autocompletion": _names_of(lambda: [Path(name).stem for name in shipped(RECIPES)]),
        },
    ),
    "device": Option(
        str, "Device that does the work: auto, cuda, cuda:N or cpu. The results are identical."
    ),
    "max_memory": Option(
        str,
        "Maximum host memory for experts in progress, e.g. 512MiB, 4GiB, 2GB, or a number of bytes.",
    ),
    "max_gpu_memory": Option(
        str | None,
        "Maximum GPU memory for experts in progress.  [default: most of the free memory]",
    ),
    "threads": Option(
        int | None, "Number of worker threads.  [default: all processors]", settings=_AT_LEAST_ONE
    ),
    "cache_limit": Option(
        str | None,
        "Maximum disk space for downloaded source shards, e.g. 40GB.  [default: size of four shards]",
    ),
    "keep_source": Option(bool, "Keep downloaded files in the Hub cache.", ("--keep-source",)),
    "part": Option(
        str | None,
        "Convert only this share of the model, e.g. 1/4. All parts use one output folder; the one that ends last "
        "finishes the artifact.  [default: the rank under torchrun]",
        ("--part",),
        settings={"metavar": "I/N"},
    ),
    "resume": Option(bool, "Continue an interrupted conversion.", ("--resume",)),
    "overwrite": Option(
        bool, "Replace an existing artifact after the new one is complete.", ("--overwrite",)
    ),
    "update": Option(
        bool,
        "Leave an artifact of the same request and source, or resume it; replace any other.",
        ("--update",),
    ),
    "source_digests": Option(
        bool,
        "Hash the source files during the conversion and record their SHA-256.",
        ("--source-digests",),
    ),
    "revision": Option(str | None, "Branch, tag or commit of the Hub repo."),
    "source": Option(str | None, "Source checkpoint of the conversion: a folder or a Hub repo id."),
    "checks": Option(
        str | None,
        "Comma-separated list of files, weights and kernel.  [default: all checks this machine can run]",
        settings={"autocompletion": _list_of(CHECKS)},
    ),
    "layers": Option(
        str | None,
        "Layers to check, e.g. 0,3-5.  [default: all; first, middle and last for the kernel check]",
    ),
    "tokens": Option(str, "Batch sizes of the kernel check, in tokens."),
    "max_error": Option(
        float | None,
        "Fail with exit code 1 if any projection's relative error exceeds this value, e.g. 0.15.",
    ),
    "evaluate": Option(
        Path | None,
        "Text that the finished artifact is evaluated on.  [default: what --calibrate does not read of its own]",
        settings=_ANY_PATH,
    ),
    "max_kl": Option(
        float | None,
        "Fail with exit code 1 if the evaluation's mean KL divergence exceeds this value, e.g. 0.05.",
    ),
    "size": Option(
        str | None,
        "Budget: bytes of the experts' tensors on all ranks, scales and padding included, e.g. 120GB.",
    ),
    "bits": Option(
        float | None,
        "Budget: the same as mean bits for each weight of the experts, to two decimals, e.g. 4.25.",
    ),
    "candidates": Option(
        str | None,
        "Comma-separated list of schemas, e.g. mxfp4,int4-g32,fp8.  [default: a list that fits target and activations]",
        settings={"autocompletion": _list_of(weight_schema.PRESETS)},
    ),
    "gpu": Option(
        str | None,
        "GPU of the server: t4, a100, l40s, h200, b200 … or FILE.json.  [default: GPU of this machine]",
        settings={"autocompletion": _names_of(lambda: [*gpu_target.GPUS])},
    ),
    "quantization": Option(
        str | None, "The server's --quantization, for a checkpoint, e.g. humming."
    ),
    "moe_backend": Option(
        str | None, "The server's --moe-backend, for a checkpoint, e.g. humming."
    ),
    "kernels": Option(
        Path | None,
        "Output folder for the compiled kernels.  [default: OUT-kernels]",
        settings=_ANY_PATH,
    ),
    "jobs": Option(
        int | None,
        "Number of parallel compiler processes.  [default: all processors]",
        settings=_AT_LEAST_ONE,
    ),
    "repo": Option(
        str, "Hub repo (org/name). It is created if it does not exist.", metavar="ORG/NAME"
    ),
    "private": Option(bool, "Create the Hub repo as a private repo.", ("--private",)),
    "branch": Option(str | None, "Branch of the Hub repo.  [default: main]"),
    "model": Option(str, "Model folder, Hub repo id (org/name), or GGUF file.", metavar="MODEL"),
    "text": Option(Path, "Text file of the kind that the model will read.", settings=_ANY_PATH),
    "num_tokens": Option(
        int, "Maximum number of tokens of the text.", ("--tokens",), settings=_AT_LEAST_ONE
    ),
    "context_length": Option(
        int, "Number of tokens in a batch.", ("--context",), settings=_AT_LEAST_ONE
    ),
    "compute_dtype": Option(str, "Dtype of the computation: float32, bfloat16 or float16."),
    "page": Option(
        Path | None,
        "Output file.  [default: ./OUT.report.html]",
        ("--out", "-o"),
        settings=_ANY_PATH,
    ),
    # Of the command line alone:
    "report": Option(
        Path | None,
        "Write an HTML report with the results to this file.",
        ("--report",),
        settings=_ANY_PATH,
    ),
    "dry_run": Option(bool, "Print the plan and exit without writing anything.", ("--dry-run",)),
    "for_gpu": Option(
        str | None,
        "Show the schemas to take for this GPU (a name or an architecture), and those that run on it.",
        ("--for",),
        settings={"autocompletion": _names_of(lambda: [*gpu_target.GPUS])},
    ),
    "recipes": Option(
        bool, "List the recipes and schema files that come with hqconv.", ("--recipes",)
    ),
    "json": Option(bool, "Print the result as one JSON document on stdout.", ("--json",)),
    "profile": Option(
        Path | None,
        "Write the time spent in each stage to this file, as JSON.",
        ("--profile",),
        settings=_ANY_PATH,
    ),
    "verbose": Option(
        bool,
        "Log the work on stderr: stages, units, downloads, retries, devices.",
        ("--verbose", "-v"),
    ),
    "log_file": Option(
        Path | None,
        "Append the log, with the files that are read and written, to this file.",
        ("--log-file",),
        settings=_ANY_PATH,
    ),
    "quiet": Option(bool, "Print errors only, plus the output of --json.", ("--quiet", "-q")),
}


def _conversion_option(option: ConversionOption) -> Option:
    """Return the command line's form of an option of the API."""
    kind: Any = option.plain_type
    if option.choices:
        kind = Literal[option.choices]
    own = (f"--{option.name.replace('_', '-')}",) if kind is bool else ()  # no --no-…
    settings = _SETTINGS.get(option.name, {})
    return Option(
        kind | None if option.default is None else kind, option.help, own, settings=settings
    )


# Limits and shell completion of conversion options.
_SETTINGS: dict[str, dict[str, Any]] = {
    "schema": {"autocompletion": _names_of(weight_schema.known_names)},
    "input_schema": {"autocompletion": _names_of(lambda: [*input_schema.NAMED_INPUTS])},
    "target": {
        "autocompletion": _names_of(
            lambda: [*gpu_target.GPUS, *(f"sm{sm}" for sm in gpu_target.TARGETS)]
        )
    },
    "tp": _AT_LEAST_ONE,
    "ep": _AT_LEAST_ONE,
    "redundant_experts": {"min": 0},
    "calibrate_tokens": {"min": 2},
    "calibrate_context": {"min": 2},
}
OPTIONS |= {
    name: _conversion_option(option)
    for name, option in conversion_options().items()
    if option.is_flag
}
# Headings of the help; options without one stand first.
_RANKS = ("tp", "tp_split", "ep", "expert_placement", "redundant_experts")
_SHARED = ("json", "quiet", "verbose", "log_file")  # options of every command
_GROUPS = {
    "Budget": ("size", "bits", "candidates"),
    "Quantization and layout": (
        *(conversion_options().keys() - set(_RANKS)),
        "config",
        "source_digests",
    ),
    "Hugging Face Hub": ("revision", "cache_limit", "keep_source", "private", "branch"),
    "Parallelism": _RANKS,
    "Resources": ("device", "max_memory", "max_gpu_memory", "threads", "part", "jobs"),
    "Existing output": ("resume", "overwrite", "update", "dry_run"),
    "Output": (*_SHARED, "profile", "report"),
}
_ARTIFACT = Option(Path, "Artifact folder.", metavar="OUT", settings=_ANY_PATH)
_OF_SOURCE = "Branch, tag or commit of the source, if --source is a Hub repo."
# Help texts that differ for one command: (command, option) → text.
_HELP_OF = {
    ("verify", "out"): "Artifact folder, or Hub repo id (org/name).",
    (
        "verify",
        "revision",
    ): "Branch, tag or commit: of the source with --source, else of the artifact on the Hub.",
    (
        "verify",
        "device",
    ): "Device of the weights and kernel checks: auto, cuda, cuda:N or cpu. cpu runs no kernel.",
    (
        "verify",
        "max_memory",
    ): "Maximum host memory for experts being checked, e.g. 512MiB, 4GiB, or a number of bytes.",
    (
        "verify",
        "threads",
    ): "Number of threads that hash files and check experts.  [default: all processors]",
    (
        "verify",
        "quiet",
    ): "Print nothing if the artifact passes, otherwise only the findings and errors.",
    (
        "allocate",
        "out",
    ): "Recipe, a TOML file for convert --config.  [default: ./<model>-<budget>.toml]",
    (
        "allocate",
        "calibrate",
    ): "TEXT that the model reads: a file, a folder, or builtin.  [default: builtin]",
    ("allocate", "revision"): "Branch, tag or commit of the source, if it is a Hub repo.",
    ("allocate", "threads"): "Number of threads that encode experts.  [default: all processors]",
    ("convert", "revision"): "Branch, tag or commit of the source, if it is a Hub repo.",
    ("convert", "quiet"): "Print errors only, plus the output of --json and --dry-run.",
    ("convert", "threads"): "Number of threads that encode experts.  [default: all processors]",
    (
        "evaluate",
        "source",
    ): "Source checkpoint that the artifact was made from: a folder or a Hub repo id.",
    ("evaluate", "text"): "Text file for the evaluation, which calibration did not see.",
    ("evaluate", "context_length"): "Number of tokens in a sequence.",
    ("evaluate", "device"): "Device that runs the model: auto, cuda, cuda:N or cpu.",
    (
        "evaluate",
        "max_memory",
    ): "Maximum memory on the CPU for hidden states, one layer and logits, e.g. 48GiB.",
    (
        "evaluate",
        "threads",
    ): "Number of threads of the computation on the CPU.  [default: all processors]",
    ("evaluate", "revision"): _OF_SOURCE,
    ("check", "layers"): "Layers to check, e.g. 0,3-5.  [default: all]",
    ("check", "threads"): "Number of threads that check experts.  [default: all processors]",
    (
        "check",
        "max_memory",
    ): "Maximum host memory for experts being checked, e.g. 512MiB, 4GiB, or a number of bytes.",
    (
        "check",
        "revision",
    ): "Branch, tag or commit of the checkpoint, if a Hub repo; --against takes org/name@REV.",
    (
        "check",
        "quiet",
    ): "Print nothing if there is no damage, otherwise only the findings and errors.",
    ("warm", "out"): "Artifact folder, or any checkpoint: a folder or a Hub repo id (org/name).",
    ("warm", "tp"): "Number of TP ranks of the server of a checkpoint; an artifact has its own.",
    ("warm", "ep"): "Number of EP ranks of the server of a checkpoint; an artifact has its own.",
    ("warm", "kernels"): "Output folder for the kernels of an artifact.  [default: OUT-kernels]",
}


def takes(
    function: Callable[..., Any], *own: str, is_artifact: bool = False, has_context: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the parameters of an API function, callbacks aside, its `own` and the shared ones, as keywords.

    `is_artifact`: its `out` is an artifact to look at, not a place to write to.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        found = [p for p in inspect.signature(function).parameters.values() if p.name in OPTIONS]
        name_of = command.__name__
        parameters = [_parameter(name_of, p.name, p.default, is_artifact) for p in found]
        parameters += [
            _parameter(name_of, n, False if OPTIONS[n].kind is bool else None, is_artifact)
            for n in (*own, *_SHARED)
        ]
        if has_context:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter("context", kind, annotation=typer.Context))
        # Required ones first, as Python has it.
        parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(command: str, name: str, default: Any, is_artifact: bool) -> inspect.Parameter:
    option = _ARTIFACT if is_artifact and name == "out" else OPTIONS[name]
    option = replace(option, help=_HELP_OF.get((command, name), option.help))
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    group = next((heading for heading, members in _GROUPS.items() if name in members), None)
    return inspect.Parameter(name, kind, default=default, annotation=option.annotation(group))


def at_home(value: Any) -> Any:
    """`~/x` as shells expand it, which they do not inside `--out=~/x`."""
    if not isinstance(value, str | Path) or not str(value).startswith("~"):
        return value
    if isinstance(value, str) and Path(value).exists():
        return value
    return type(value)(os.path.expanduser(value))  # noqa: PTH111 - of a user that is not known it leaves the text


def parse_checks(text: str | None) -> tuple[str, ...] | None:
    """Parse the checks of `--checks files,weights`; None without the option."""
    return tuple(part.strip() for part in text.split(",")) if text else None


def parse_layers(text: str | None) -> frozenset[int] | None:
    """Parse the layers of `--layers 0,3-5`; None without the option. Raises RequestError for anything else."""
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            expected = "layer numbers and ranges, such as 0,3-5"
            raise RequestError(
                "The layers cannot be read.", where="--layers", expected=expected, found=text
            )
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(layers)


def parse_tokens(text: str) -> tuple[int, ...]:
    """Parse the batch sizes of `--tokens 1,17,256`. Raises RequestError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", part) for part in parts):
        expected = "batch sizes from 1 to 999999, such as 1,17,256"
        raise RequestError(
            "The batch sizes cannot be read.", where="--tokens", expected=expected, found=text
        )
    return tuple(int(part) for part in parts)


def without_defaults(options: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Leave out options of a conversion that were not given on the command line: a recipe may have them.

    Raises RequestError if there is neither a schema nor a recipe.
    """

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name != "DEFAULT"

    if options["config"] is None and not is_given("schema"):
        raise no_schema()
    return {
        name: value
        for name, value in options.items()
        if name not in conversion_options() or is_given(name)
    }
