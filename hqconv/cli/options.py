"""The options of the commands: the API's parameters, with what the command line adds to them.

Names and defaults are written once, in the signatures of `hqconv.api`; here stands what each is for people.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hqconv.errors import RequestError
from hqconv.schemas import gpu_target, input_schema, weight_schema
from hqconv.schemas.config_files import RECIPES, or_shipped, shipped
from hqconv.schemas.options import ConversionOption, conversion_options
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

    def annotation(self, group: str | None) -> Any:
        """The type of the command's parameter, for Typer; `group`: the heading that it stands under in the help."""
        words = {"help": self.help, "rich_help_panel": group, **self.settings}
        if self.metavar:
            return Annotated[self.kind, typer.Argument(metavar=self.metavar, **words)]
        return Annotated[self.kind, typer.Option(*self.flags, **words)]


def _names_of(known: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """What a shell may complete to."""
    return lambda incomplete: [name for name in known() if name.startswith(incomplete)]


_AT_LEAST_ONE = {"min": 1}
_ANY_PATH = {"readable": False}  # whether it can be read is said in our own words
_PAGE = "Page to write.  [default: ./OUT.report.html]"
OPTIONS: dict[str, Option] = {
    "src": Option(str, "Model folder, or Hub repo id (org/name).", metavar="SRC"),
    "path": Option(str, "Model folder, Hub repo id, or artifact.", metavar="SRC|OUT"),
    "out": Option(
        Path | None,
        "Output folder.  [default: ./<model>-<schema>[-tpT][-epP], and what else is unusual]",
        ("--out", "-o"),
        settings=_ANY_PATH,
    ),
    "config": Option(
        Path | None,
        "Recipe: these options in a TOML file, with other schemas for some blocks; or the name of one of "
        "`hqconv schemas --recipes`.",
        settings={
            **_ANY_PATH,
            "autocompletion": _names_of(lambda: [Path(name).stem for name in shipped(RECIPES)]),
        },
    ),
    "device": Option(str, "auto, cuda, cuda:N or cpu; the bytes are the same."),
    "max_memory": Option(str, "Host memory for the experts at work: 512MiB, 4GiB, 2GB, bytes."),
    "max_gpu_memory": Option(str | None, "The same on the GPU.  [default: most of what is free]"),
    "threads": Option(int | None, "Worker threads.  [default: all processors]", settings=_AT_LEAST_ONE),
    "cache_limit": Option(
        str | None, "Of what is fetched from the Hub at a time: 40GB, bytes.  [default: four of its shards]"
    ),
    "keep_source": Option(bool, "Keep in the Hub's cache what is fetched.", ("--keep-source",)),
    "resume": Option(bool, "Go on with an interrupted conversion.", ("--resume",)),
    "overwrite": Option(bool, "Replace an artifact, once the new one is complete.", ("--overwrite",)),
    "source_digests": Option(
        bool,
        "Hash the source's files beside the conversion, and record their SHA-256.",
        ("--source-digests",),
    ),
    "revision": Option(
        str | None, "Branch, tag or commit of a Hub repo; of verify the source's, if there is one."
    ),
    "source": Option(str | None, "The checkpoint it was made from: folder or Hub repo id."),
    "checks": Option(str | None, "Of files,weights,kernel.  [default: all that can run here]"),
    "layers": Option(str | None, "Such as 0,3-5.  [default: all; for the kernel the first, middle and last]"),
    "tokens": Option(str, "Batch sizes for the kernel."),
    "max_error": Option(
        float | None, "End with 1 where a projection's relative error is larger, such as 0.15."
    ),
    "gpu": Option(str | None, "The server's GPU: h200, h100 … or FILE.json.  [default: the one here]"),
    "kernels": Option(
        Path | None, "Folder for the compiled kernels.  [default: OUT-kernels]", settings=_ANY_PATH
    ),
    "jobs": Option(int | None, "Compilers at once.  [default: all processors]", settings=_AT_LEAST_ONE),
    "repo": Option(str, "Hub repo (org/name), made if it is not there.", metavar="ORG/NAME"),
    "private": Option(bool, "Make the Hub repo a private one.", ("--private",)),
    "branch": Option(str | None, "Branch of the Hub repo.  [default: its main one]"),
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
    "push_to": Option(str | None, "Then push the artifact to this Hub repo, as `hqconv push` does."),
    "dry_run": Option(bool, "Show the plan; write nothing.", ("--dry-run",)),
    "recipes": Option(bool, "List the recipes and schema files that come with hqconv.", ("--recipes",)),
    "json": Option(bool, "Print one JSON document on stdout.", ("--json",)),
    "profile": Option(
        Path | None, "Write where the time went, stage by stage, as JSON.", ("--profile",), settings=_ANY_PATH
    ),
    "quiet": Option(bool, "Show errors only (and what --json or --dry-run print).", ("--quiet", "-q")),
}


def _conversion_option(option: ConversionOption) -> Option:
    """Return the command line's form of an option of the API."""
    kind: Any = option.plain_type
    if option.choices:
        kind = Literal[option.choices]
    elif option.is_path:
        kind = Path
    flags = (f"--{option.name.replace('_', '-')}",) if kind is bool else ()  # no --no-…
    settings = {**(_ANY_PATH if option.is_path else {}), **_SETTINGS.get(option.name, {})}
    return Option(kind | None if option.default is None else kind, option.help, flags, settings=settings)


# Limits and shell completion of conversion options.
_SETTINGS: dict[str, dict[str, Any]] = {
    "schema": {"autocompletion": _names_of(lambda: [*weight_schema.PRESETS, weight_schema.SOURCE])},
    "input_schema": {"autocompletion": _names_of(lambda: [*input_schema.NAMED_INPUTS])},
    "target": {"autocompletion": _names_of(lambda: [f"sm{number}" for number in gpu_target.TARGETS])},
    "tp": _AT_LEAST_ONE,
    "ep": _AT_LEAST_ONE,
    "redundant_experts": {"min": 0},
}
OPTIONS |= {
    name: _conversion_option(option) for name, option in conversion_options().items() if option.is_flag
}
# Headings of the help; options without one stand first.
_RANKS = ("tp", "ep", "expert_placement", "redundant_experts")
_GROUPS = {
    "What is made": (*(conversion_options().keys() - set(_RANKS)), "config", "source_digests"),
    "The Hub": ("revision", "cache_limit", "keep_source", "push_to", "private", "branch"),
    "Ranks": _RANKS,
    "How": ("device", "max_memory", "max_gpu_memory", "threads", "jobs"),
    "What is there already": ("resume", "overwrite", "dry_run"),
    "What is shown": ("json", "quiet", "profile", "report"),
}
# What one command means differently.
_ARTIFACT = Option(
    Path, "Artifact; for verify also on the Hub (org/name).", metavar="OUT", settings=_ANY_PATH
)


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
        recipe = load_recipe(or_shipped(config, RECIPES))
        found = {name: value for name, value in recipe.options.items() if not is_given(name)}
        found["overrides"] = recipe.overrides
    if not is_given("schema") and "schema" not in found:
        what, expected = "No schema is named.", "--schema NAME, or a recipe that names one"
        raise RequestError(what, where="--schema", expected=expected, remedy="`hqconv schemas` shows them.")
    return found
