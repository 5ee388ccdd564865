"""The options of the commands: the API's parameters, with what the command line adds to them.

Names and defaults are written once, in the signatures of `hqconv.api`; here stands what each is for people.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqconv.errors import RequestError
from hqconv.schemas.recipe import load_recipe


@dataclass(frozen=True)
class Option:
    """One parameter on the command line: what Typer parses it to, its help, its flags and further settings.

    metavar: given for arguments, which have no flag.
    """

    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def annotation(self) -> Any:
        """The type of the command's parameter, for Typer."""
        if self.metavar:
            return Annotated[self.kind, typer.Argument(metavar=self.metavar, help=self.help, **self.settings)]
        return Annotated[self.kind, typer.Option(*self.flags, help=self.help, **self.settings)]


_AT_LEAST_ONE = {"min": 1}
_ANY_PATH = {"readable": False}  # whether it can be read is said in our own words
_PAGE = "Page to write.  [default: ./OUT.report.html]"
OPTIONS: dict[str, Option] = {
    "src": Option(str, "Model folder, or Hub repo id (org/name).", metavar="SRC"),
    "path": Option(str, "Model folder, Hub repo id, or artifact.", metavar="SRC|OUT"),
    "out": Option(
        Path | None,
        "Output folder.  [default: ./<model>-<schema>[-tpT][-epP]]",
        ("--out", "-o"),
        settings=_ANY_PATH,
    ),
    "schema": Option(
        str, "Preset, shorthand such as int4-g64-zp, FILE.toml, or source: keep a quantized source's own."
    ),
    "input_schema": Option(
        str, "What activations are quantized to when serving: a16, fp8, fp8-static, int8 …, or FILE.toml."
    ),
    "cuda": Option(
        str | None, "CUDA compiler that will serve, such as 13.0; asked for where the layout depends on it."
    ),
    "round_scales": Option(
        bool,
        "Keep codes whose scales the parameter dtype cannot hold, and round those; with --schema source, too.",
        ("--round-scales",),
    ),
    "quantizer": Option(
        Literal["rtn", "mse"],
        "How scales are chosen: round-to-nearest's, or searched for the least squared error.",
    ),
    "importance": Option(
        Path | None,
        "With mse: FILE.safetensors with what each input column's error counts (scripts/make_importance.py).",
        settings=_ANY_PATH,
    ),
    "config": Option(
        Path | None,
        "Recipe: these options in a TOML file, with other schemas for some blocks.",
        settings=_ANY_PATH,
    ),
    "target": Option(
        str | None,
        "Serving GPU, sm75 … sm121.  [default: the CUDA device here; --layout checkpoint needs none]",
    ),
    "dtype": Option(Literal["bfloat16", "float16"] | None, "Parameter dtype.  [default: the checkpoint's]"),
    "tp": Option(int, "Tensor-parallel ranks.", settings=_AT_LEAST_ONE),
    "ep": Option(int, "Expert-parallel ranks.", settings=_AT_LEAST_ONE),
    "expert_placement": Option(Literal["linear", "round_robin"], "How experts are dealt to EP ranks."),
    "redundant_experts": Option(int, "Copies of experts, appended.", settings={"min": 0}),
    "layout": Option(Literal["kernel", "checkpoint"], "Ready for the kernel, or a checkpoint for vLLM."),
    "device": Option(str, "auto, cuda, cuda:N or cpu; the bytes are the same."),
    "max_memory": Option(str, "Host memory for the experts at work: 512MiB, 4GiB, 2GB, bytes."),
    "max_gpu_memory": Option(str | None, "The same on the GPU.  [default: most of what is free]"),
    "threads": Option(int | None, "Worker threads.  [default: all processors]", settings=_AT_LEAST_ONE),
    "resume": Option(bool, "Go on with an interrupted conversion.", ("--resume",)),
    "overwrite": Option(bool, "Replace an artifact, once the new one is complete.", ("--overwrite",)),
    "revision": Option(str | None, "Branch, tag or commit of a Hub repo."),
    "source": Option(str | None, "The checkpoint it was made from: folder or Hub repo id."),
    "checks": Option(str | None, "Of files,weights,kernel.  [default: all that can run here]"),
    "layers": Option(str | None, "Such as 0,3-5.  [default: all; for the kernel the first, middle and last]"),
    "tokens": Option(str, "Batch sizes for the kernel."),
    "gpu": Option(str | None, "The server's GPU: h200, h100 … or FILE.json.  [default: the one here]"),
    "kernels": Option(
        Path | None, "Folder for the compiled kernels.  [default: OUT-kernels]", settings=_ANY_PATH
    ),
    "jobs": Option(int | None, "Compilers at once.  [default: all processors]", settings=_AT_LEAST_ONE),
    "first": Option(Path, "Artifact.", metavar="OUT1", settings=_ANY_PATH),
    "second": Option(Path, "Artifact of the same model.", metavar="OUT2", settings=_ANY_PATH),
    "page": Option(Path | None, _PAGE, ("--out", "-o"), settings=_ANY_PATH),
    "overwrite_page": Option(bool, "Replace whatever file lies there.", ("--overwrite",)),
    "sample": Option(
        int | None,
        "Experts of each block to count codes of.  [default: all, of a large artifact some seconds' worth]",
        settings=_AT_LEAST_ONE,
    ),
    # Of the command line alone:
    "report": Option(Path | None, "Write a page about all of it.", ("--report",), settings=_ANY_PATH),
    "dry_run": Option(bool, "Show the plan; write nothing.", ("--dry-run",)),
    "json": Option(bool, "Print one JSON document on stdout.", ("--json",)),
    "profile": Option(
        Path | None, "Write where the time went, stage by stage, as JSON.", ("--profile",), settings=_ANY_PATH
    ),
    "quiet": Option(bool, "Show errors only (and what --json or --dry-run print).", ("--quiet", "-q")),
}
# What one command means differently.
_ARTIFACT = Option(Path, "Artifact.", metavar="OUT", settings=_ANY_PATH)


def takes(
    function: Callable[..., Any], *own: str, is_artifact: bool = False, optional: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the parameters of an API function, callbacks aside, and its `own` ones, all as keywords.

    `is_artifact`: its `out` is an artifact to look at, not a place to write to. `optional`: what it may go without,
    though the function may not.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        found = [p for p in inspect.signature(function).parameters.values() if p.name in OPTIONS]
        parameters = [_parameter(p.name, p.default, is_artifact) for p in found]
        parameters = [p.replace(default=None) if p.name in optional else p for p in parameters]
        parameters += [_parameter(n, False if OPTIONS[n].kind is bool else None, is_artifact) for n in own]
        if "context" in inspect.signature(command).parameters:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter("context", kind, annotation=typer.Context))
        # Required ones first, as Python has it.
        parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(name: str, default: Any, is_artifact: bool) -> inspect.Parameter:
    option = _ARTIFACT if is_artifact and name == "out" else OPTIONS[name]
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=option.annotation())


def parse_checks(text: str | None) -> tuple[str, ...] | None:
    """The checks of `--checks files,weights`, or None where the option is not given."""
    return tuple(part.strip() for part in text.split(",")) if text else None


def parse_layers(text: str | None) -> frozenset[int] | None:
    """The layers of `--layers 0,3-5`, or None where the option is not given. Raises RequestError for anything else."""
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            expected = "layer numbers and ranges, such as 0,3-5"
            raise RequestError("The layers cannot be read.", where="--layers", expected=expected, found=text)
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(layers)


def parse_tokens(text: str) -> tuple[int, ...]:
    """The batch sizes of `--tokens 1,17,256`. Raises RequestError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", part) for part in parts):
        expected = "batch sizes from 1 to 999999, such as 1,17,256"
        raise RequestError("The batch sizes cannot be read.", where="--tokens", expected=expected, found=text)
    return tuple(int(part) for part in parts)


def recipe_options(config: Path | None, context: typer.Context) -> dict[str, Any]:
    """What a recipe says of the options that were not given with the command of `context`, and its overrides.

    Raises RequestError as `load_recipe`, and where neither names a schema.
    """

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name != "DEFAULT"

    found: dict[str, Any] = {}
    if config is not None:
        recipe = load_recipe(config)
        found = {name: value for name, value in recipe.options.items() if not is_given(name)}
        found["overrides"] = recipe.overrides
    if not is_given("schema") and "schema" not in found:
        what, expected = "No schema is named.", "--schema NAME, or a recipe that names one"
        raise RequestError(what, where="--schema", expected=expected, remedy="`hqconv schemas` shows them.")
    return found
