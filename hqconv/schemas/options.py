"""Options of the commands, each a field with its type, default and help text; recipes, which are files of options.

The API's keyword arguments, the command line's options and the keys of recipes are read from the two dataclasses;
`planning.spec.ConversionOptions` has the parsed values. A recipe may have other schemas for some layers:

    schema = "mxfp4"
    input_schema = "fp8"
    target = "sm90"
    tp = 8

    [[override]]
    layers = "0, -1"        # numbers as in the checkpoint, runs such as 3-5; -1 is the last MoE layer
    schema = "fp8"

    [[override]]
    blocks = "mtp.*"        # a pattern of layer names, as of files: * ? [ab]
    schema = "none"         # left as they are

    [[override]]
    layers = "3-5"
    w13.schema = "int3-g64"  # of gate and up
    w2.schema = "int4-g32-e4m3"     # of down; one of the two may be left out

    dense = "int8"          # of the linear layers beside the experts; before the first [section]

    [dense_layers."*.o_proj"]       # a pattern of their names
    schema = "fp8"          # none: left as they are
"""

# ruff: noqa: RUF009 - `option` returns a field

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict, get_args

from hqconv.errors import RequestError, number_runs
from hqconv.schemas.artifact_names import GEMMS, KERNEL, LAYOUTS, Layout
from hqconv.schemas.grid import EVEN, LINEAR, PLACEMENTS, TP_SPLITS, Placement, TpSplit
from hqconv.schemas.input_schema import InputSchema, resolve_inputs
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, or_shipped, read_toml, shipped
from hqconv.schemas.weight_schema import (
    PARAM_DTYPES,
    RECOMMENDED,
    SOURCE,
    LayerSchema,
    ParamDtype,
    SchemaPair,
    WeightSchema,
    pair,
    resolve_layer_schema,
    resolve_schema,
)

Quantizer = Literal["rtn", "mse"]
QUANTIZERS: tuple[Quantizer, ...] = get_args(Quantizer)
RTN, MSE = QUANTIZERS  # round-to-nearest, and scales searched for the least squared error
GPTQ = "gptq"  # codes and scales by the error of outputs, in manifests; the option --calibrate asks for it
BUILTIN = "builtin"  # value of --calibrate: the text that hqconv ships
CheckName = Literal["files", "weights", "kernel", "server"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)  # of `verify`, in their order
SERVER = CHECKS[-1]  # which runs where a server is named, alone if no other is
_MOST = 1 << 40  # of any number: a larger one is a mistake


def refuse_unknown_checks(checks: Sequence[str] | None) -> None:
    """Raise RequestError if a name is no check of `verify`."""
    unknown = [check for check in checks or () if check not in CHECKS]
    if unknown:
        raise RequestError(
            "There is no such check.",
            where="--checks",
            expected=", ".join(CHECKS),
            found=unknown[0],
        )


def refuse_unknown_layers(indices: Iterable[int], known: Iterable[int]) -> None:
    """Raise RequestError for the index of no MoE layer, of those that `--layers` names."""
    if missing := sorted(set(indices) - set(known)):
        raise RequestError(
            "The model has no MoE layer of this number.",
            where="--layers",
            expected=f"layers of {', '.join(map(str, sorted(set(known))))}",
            found=missing[0],
        )


@dataclass(frozen=True)
class LayerChoice:
    """Schemas of one layer's GEMMs: None for those of all other layers. is_left: the layer is copied unchanged."""

    w13: WeightSchema | None = None
    w2: WeightSchema | None = None
    inputs: InputSchema | None = None
    is_left: bool = False

    def schema(self, base: LayerSchema) -> LayerSchema:
        """Return the layer's schema. base: that of a layer without a choice."""
        return pair(self.w13 or base.of("w13"), self.w2 or base.of("w2"))


@dataclass(frozen=True)
class Override:
    """A choice for some layers, by a pattern of their names (`blocks`) or by runs of layer numbers (`layers`).

    where: place in a recipe, for messages. recipe: name of the recipe, for the default name of the output.
    """

    blocks: str | None
    layers: tuple[tuple[int, int], ...]
    choice: LayerChoice
    where: str
    recipe: str = ""

    def matches(self, layer_of: Mapping[str, int]) -> list[str]:
        """Return the names that the override is for, of `layer_of`: name → number.

        Raises RequestError for a pattern, and for a run of numbers, without any layer.
        """
        found: dict[str, list[str]] = {}
        if self.blocks is not None:
            found[self.blocks] = [name for name in layer_of if fnmatchcase(name, self.blocks)]
        num_layers = max(layer_of.values(), default=0) + 1
        for first, last in self.layers:
            text = f"layers {first}" if first == last else f"layers {first}-{last}"
            begin = first if first >= 0 else first + num_layers
            end = last if last >= 0 else last + num_layers
            found[text] = [name for name, number in layer_of.items() if begin <= number <= end]
        for text, names in found.items():
            if not names:
                known = ", ".join(number_runs(layer_of.values()))
                raise RequestError(
                    "An override is for no layer.",
                    where=self.where,
                    expected=f"layers of {known}, or a pattern of names such as {min(layer_of)}",
                    found=text,
                )
        return [name for name in layer_of if any(name in names for names in found.values())]


def assign(overrides: Sequence[Override], layer_of: Mapping[str, int]) -> dict[str, LayerChoice]:
    """Return the choice for each layer that an override is for; later overrides win, field by field.

    layer_of: name → number of every layer. Raises RequestError for an override that matches no layer.
    """
    found: dict[str, LayerChoice] = {}
    for override in overrides:
        new = override.choice
        for name in override.matches(layer_of):
            old = found.get(name, LayerChoice())
            has_schema = new.w13 is not None or new.w2 is not None
            found[name] = LayerChoice(
                new.w13 or old.w13,
                new.w2 or old.w2,
                new.inputs or old.inputs,
                new.is_left or (old.is_left and not has_schema),
            )
    return found


def group_by_schema(layers: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Return `fp8, a16 activations` → names, of layers (name, schema, input schema) that differ from the usual ones."""
    found: dict[str, list[str]] = {}
    for name, schema, inputs in layers:
        found.setdefault(f"{schema}, {inputs} activations", []).append(name)
    return found


def option(help_text: str, default: Any = None, **details: Any) -> Any:
    """Declare an option. details: `choices`; `least` and `most`; `in_recipes` and `is_flag` (of the command line)."""
    return field(default=default, metadata={"help": help_text, **details})


@dataclass(frozen=True, kw_only=True)
class ConversionArguments:
    """Options that decide the bytes of an artifact. Raises RequestError for impossible numbers and choices."""

    schema: str | Path | WeightSchema | SchemaPair | None = option(
        "Weight format: a name of `hqconv schemas`, FILE.toml, a pair for w13+w2, or source: that of a quantized "
        f"source.  [default: {RECOMMENDED[0]}; source if the experts are quantized]"
    )
    target: str | None = option(
        "Serving GPU: name (t4, a100, l40s, h200, b200 …) or architecture (sm75 … sm121).  [default: that of an "
        "artifact whose codes are kept; this machine's GPU; sm90]"
    )
    dtype: ParamDtype | None = option(
        "Parameter dtype of the served model.  [default: dtype of the checkpoint]",
        choices=PARAM_DTYPES,
    )
    tp: int = option("TP size of the server.", 1, least=1)
    tp_split: TpSplit = option(
        "Parts of the intermediate size on TP ranks: even, or whole scale groups, of which the last ranks may hold "
        "fewer.",
        EVEN,
        choices=TP_SPLITS,
    )
    ep: int = option("EP size of the server.", 1, least=1)
    expert_placement: Placement = option(
        "Placement of experts on EP ranks.", LINEAR, choices=PLACEMENTS
    )
    redundant_experts: int = option(
        "Number of redundant experts (copies of the first experts).", 0, least=0
    )
    layout: Layout = option(
        "Tensors ready for the kernel, or a checkpoint for the serving engine.",
        KERNEL,
        choices=LAYOUTS,
    )
    input_schema: str | Path | InputSchema = option(
        "Quantization of activations when serving: a16, fp8, fp8-static, int8 …, or FILE.toml.",
        "a16",
    )
    dense: str | Path | WeightSchema | None = option(
        "Schema of the linear layers beside the experts (attention, shared experts, dense MLPs), or none.  "
        "[default: none]"
    )
    dense_layers: Mapping[str, str] | None = option(
        "Other schemas, or none, for some of these layers: a pattern of names → schema.",
        in_recipes=False,
        is_flag=False,
    )
    cuda: str | None = option(
        "CUDA compiler of the serving machine, such as 13.0; needed where the layout depends on it."
    )
    overrides: Sequence[Override] = option(
        "Other schemas for some layers: `hqconv.schemas.options.load_recipe(path).overrides`.",
        (),
        in_recipes=False,
        is_flag=False,
    )
    allow_unserved: bool = option(
        "Convert schemas that no known server runs, with a warning.", False, in_recipes=False
    )
    round_scales: bool = option(
        "Keep codes whose scales the parameter dtype cannot hold, and round these scales to it.",
        False,
    )
    quantizer: Quantizer = option(
        "Choice of scales and codes: round-to-nearest, or a search for the least squared error.",
        RTN,
        choices=QUANTIZERS,
    )
    calibrate: str | Path | None = option(
        "Choose codes by the error of the experts' outputs on a text: a file, or builtin. Needs transformers."
    )
    calibrate_tokens: int = option("Maximum number of tokens of the text.", 65536, least=2)
    calibrate_context: int = option("Number of tokens in a sequence of the text.", 2048, least=2)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of how a command works: no byte of an artifact depends on them. Raises RequestError as above."""

    device: str = option(
        "Device that does the work: auto, cuda, cuda:N or cpu. Only calibrated codes depend on it.",
        "auto",
    )
    max_memory: str | int = option(
        "Maximum host memory for experts in progress, e.g. 512MiB, 2GB.", "4GiB"
    )
    max_gpu_memory: str | int | None = option(
        "Maximum GPU memory for experts in progress.  [default: most of the free memory]"
    )
    threads: int | None = option(
        "Number of worker threads.  [default: all processors]", least=1, most=4096
    )
    cache_limit: str | int | None = option(
        "Maximum disk space for downloaded source shards, e.g. 40GB.  [default: size of four shards]"
    )
    keep_source: bool = option("Keep downloaded files in the Hub cache.", False)
    part: str | None = option(
        "Convert only this share of the model, e.g. 1/4. All parts use one output folder; the one that ends last "
        "finishes the artifact.  [default: the rank under torchrun]"
    )
    resume: bool = option("Continue an interrupted conversion.", False)
    overwrite: bool = option("Replace an existing artifact after the new one is complete.", False)
    update: bool = option(
        "Leave an artifact of the same request and source, or resume it; replace any other.", False
    )
    source_digests: bool = option(
        "Hash the source files during the conversion and record their SHA-256.", False
    )

    def __post_init__(self) -> None:
        check_values(self)
        modes = [name for name in ("overwrite", "update", "resume", "part") if getattr(self, name)]
        if len(modes) > 1 and modes != ["resume", "part"]:  # a part always resumes
            _refuse_both(modes[0], modes[1])
        if self.keep_source and self.cache_limit is not None:
            _refuse_both("cache-limit", "keep-source")


# Options of a conversion that `hqconv.allocate` has no use for: it chooses them.
NOT_ALLOCATED = (
    "schema",
    "layout",
    "overrides",
    "allow_unserved",
    "quantizer",
    "dense",
    "dense_layers",
)


class ConversionKeywords(TypedDict, total=False):
    """Keyword arguments of the API that become `ConversionArguments`."""

    schema: str | Path | WeightSchema | SchemaPair | None
    target: str | None
    dtype: ParamDtype | None
    tp: int
    tp_split: TpSplit
    ep: int
    expert_placement: Placement
    redundant_experts: int
    layout: Layout
    input_schema: str | Path | InputSchema
    dense: str | Path | WeightSchema | None
    dense_layers: Mapping[str, str] | None
    cuda: str | None
    overrides: Sequence[Override]
    allow_unserved: bool
    round_scales: bool
    quantizer: Quantizer
    calibrate: str | Path | None
    calibrate_tokens: int
    calibrate_context: int


class RunKeywords(TypedDict, total=False):
    """Keyword arguments of the API that become `RunOptions`."""

    device: str
    max_memory: str | int
    max_gpu_memory: str | int | None
    threads: int | None
    cache_limit: str | int | None
    keep_source: bool
    part: str | None
    resume: bool
    overwrite: bool
    update: bool
    source_digests: bool


class ConvertKeywords(ConversionKeywords, RunKeywords, total=False):
    """Keyword arguments of `hqconv.convert` that are options."""


def plain_type(declared: Field[Any]) -> type:
    """Return the type of an option in a recipe and on the command line: a schema, a size and a path are texts."""
    if "least" in declared.metadata:
        return int
    return bool if isinstance(declared.default, bool) else str


def check_values(options: Any) -> None:
    """Raise RequestError for a number out of its option's range, and for a value that is none of the choices."""
    for declared in fields(options):
        value = getattr(options, declared.name)
        details = declared.metadata
        expected = ""
        if "least" in details:
            least = details["least"]
            most = details.get("most", _MOST)
            if type(value) is not int or not least <= value <= most:
                expected = f"a whole number from {least} to {most}"
        elif "choices" in details and value not in details["choices"]:
            expected = ", ".join(details["choices"])
        if expected and (value is not None or declared.default is not None):
            flag = declared.name.replace("_", "-")
            raise RequestError(
                "The option does not know this value.",
                where=f"--{flag}",
                expected=expected,
                found=repr(value)[:80],
            )


def _refuse_both(first: str, second: str) -> NoReturn:
    raise RequestError(f"--{first} and --{second} exclude each other.", remedy="Give one of them.")


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
    """Return the keyword arguments of a conversion that decide bytes, and the options of how it works."""
    run: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        kind = run if name in RunKeywords.__annotations__ else arguments
        kind[name] = value
    return arguments, RunOptions(**run)


LEFT = "none"  # layers that are copied unchanged
_SECTION = "override"
_DENSE_SECTION = "dense_layers"
_CHANGES = ("schema", "w13.schema", "w2.schema", "input_schema")
# Options that a recipe may name, and the type of each in the TOML file.
_TYPES = {
    option.name: plain_type(option)
    for option in fields(ConversionArguments)
    if option.metadata.get("in_recipes", True)
}


@dataclass(frozen=True)
class Recipe:
    """Options by the names of the API's parameters, and overrides, of which later ones win."""

    options: Mapping[str, Any]
    overrides: tuple[Override, ...]


def load_recipe(path: Path) -> Recipe:
    """Read a recipe: its keys are fields of `ConversionArguments`.

    Relative paths of schemas and of other files are looked up in the recipe's folder. Raises RequestError for a file
    that cannot be read, and for unknown keys.
    """
    document = read_toml(path, "recipe", [name.removesuffix(".toml") for name in shipped(RECIPES)])
    sections = document.pop(_SECTION, [])
    dense_layers = _dense_layers(path, document.pop(_DENSE_SECTION, {}))
    for key, value in document.items():
        if key not in _TYPES or type(value) is not _TYPES[key]:
            expected = _TYPES[key].__name__ if key in _TYPES else f"one of {', '.join(_TYPES)}"
            raise RequestError(
                "The recipe has a key that is unknown or of the wrong type.",
                where=f"{path}: {key}",
                expected=expected,
                found=repr(value),
            )
        if key in ("schema", "input_schema", "dense"):
            document[key] = _schema_path(path.parent, str(value))
        elif key == "calibrate" and value != BUILTIN:
            document[key] = path.parent / str(value)  # an absolute path does not change
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        raise RequestError(
            "The recipe's overrides are no list.",
            where=f"{path}: {_SECTION}",
            expected="[[override]] before each",
        )
    overrides = [
        _override(path, f"{path}: {_SECTION} {number}", section)
        for number, section in enumerate(sections, start=1)
    ]
    if dense_layers:
        document[_DENSE_SECTION] = dense_layers
    return Recipe(document, tuple(overrides))


def _dense_layers(path: Path, section: Any) -> dict[str, str]:
    """Return the schemas of linear layers by pattern. Raises RequestError for anything else."""
    found = {}
    for pattern, values in section.items() if isinstance(section, dict) else [("", section)]:
        if not isinstance(values, dict) or [*values] != ["schema"]:
            raise RequestError(
                "Linear layers are given another schema by its name alone.",
                where=f"{path}: {_DENSE_SECTION}",
                expected='schema = "…"',
                found=repr(values)[:80],
            )
        found[pattern] = _schema_path(path.parent, str(values["schema"]))
    return found


def with_recipe(config: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe, a file or the name of a packaged one; options in `given` but None win.

    Raises RequestError as `load_recipe`.
    """
    options: dict[str, Any] = {}
    if config is not None:
        recipe = load_recipe(or_shipped(Path(config), RECIPES))
        options = {**recipe.options, "overrides": recipe.overrides}
    return options | {name: value for name, value in given.items() if value is not None}


def _schema_path(folder: Path, text: str) -> str:
    """Return a schema's name, or the path of its file: in the recipe's folder, or of the package."""
    names = text.split("+")
    for index, name in enumerate(names):
        if name.endswith(".toml"):
            is_shipped = not (folder / name).exists() and name in shipped(SCHEMAS)
            names[index] = str((SCHEMAS if is_shipped else folder) / name)
    return "+".join(names)


def _override(path: Path, where: str, section: Mapping[str, Any]) -> Override:
    values = dict(section)
    for gemm in GEMMS:
        if isinstance(values.get(gemm), dict):
            values |= {f"{gemm}.{key}": value for key, value in values.pop(gemm).items()}
    for key, value in values.items():
        if key not in ("blocks", "layers", *_CHANGES) or not isinstance(value, str):
            raise RequestError(
                "An override has a key that is unknown or no text.",
                where=f"{where}: {key}",
                expected=f"blocks, layers, {', '.join(_CHANGES)}",
                found=repr(value),
            )
    if ("blocks" in values) == ("layers" in values):
        raise RequestError(
            "An override chooses its layers by one key.",
            where=where,
            expected="one of blocks and layers",
        )
    schemas = {key: _schema_path(path.parent, values[key]) for key in _CHANGES if key in values}
    if not schemas or SOURCE in schemas.values():
        raise RequestError(
            "An override gives its layers another schema, by name.",
            where=where,
            expected=f"one of {', '.join(_CHANGES)}",
        )
    return Override(
        blocks=values.get("blocks"),
        layers=parse_runs(values["layers"], f"{where}: layers") if "layers" in values else (),
        choice=_choice(schemas),
        where=where,
        recipe=path.stem,
    )


def _choice(schemas: dict[str, str]) -> LayerChoice:
    """Return the choice of an override: its schema for both GEMMs, but for those that have one of their own."""
    name = schemas.pop("input_schema", None)
    inputs = None if name is None else resolve_inputs(name)
    if schemas == {"schema": LEFT}:
        return LayerChoice(inputs=inputs, is_left=True)
    found = {
        key.partition(".")[0]: resolve_schema(text)
        for key, text in schemas.items()
        if key != "schema"
    }
    if "schema" in schemas:
        base = resolve_layer_schema(schemas["schema"])
        found = {gemm: base.of(gemm) for gemm in GEMMS} | found
    return LayerChoice(found.get("w13"), found.get("w2"), inputs)


def parse_runs(text: str, where: str) -> tuple[tuple[int, int], ...]:
    """Parse the layers `0, 3-5, -1` into first and last numbers. Raises RequestError for anything else."""
    runs = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise RequestError(
                "The layers cannot be read.",
                where=where,
                expected="numbers and runs, such as 0, 3-5",
                found=text,
            )
        runs.append((int(match[1]), int(match[2] or match[1])))
    return tuple(runs)
