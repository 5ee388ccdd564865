"""Options of a conversion: one row each with name, type, default and help; and other schemas for some layers.

The API's keyword arguments, the command line's options and the keys of recipes are generated from this table;
`planning.spec.ConversionOptions` holds the parsed values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from hqconv.errors import RequestError, number_runs
from hqconv.schemas.artifact_names import KERNEL, Layout
from hqconv.schemas.grid import EVEN, LINEAR, Placement, TpSplit
from hqconv.schemas.input_schema import InputSchema
from hqconv.schemas.weight_schema import LayerSchema, ParamDtype, SchemaPair, WeightSchema, pair

Quantizer = Literal["rtn", "mse"]
QUANTIZERS: tuple[Quantizer, ...] = get_args(Quantizer)
RTN, MSE = QUANTIZERS  # round-to-nearest, and scales searched for the least squared error
GPTQ = "gptq"  # codes and scales by the error of outputs, in manifests; the option --calibrate asks for it
BUILTIN = "builtin"  # value of --calibrate: the text that hqconv ships
CheckName = Literal["files", "weights", "kernel"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)  # of `verify`, in their order
ENCODING_KEYS = (
    "round_scales",
    "quantizer",
    "quantizer_version",
    "calibration",
)  # of a manifest, where they apply


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
        expected = f"layers of {', '.join(map(str, sorted(set(known))))}"
        what = "The model has no MoE layer of this number."
        raise RequestError(what, where="--layers", expected=expected, found=missing[0])


@dataclass(frozen=True)
class LayerChoice:
    """Schemas of one layer's GEMMs: None for those of all other layers. is_left: the layer is copied unchanged."""

    w13: WeightSchema | None = None
    w2: WeightSchema | None = None
    inputs: InputSchema | None = None
    is_left: bool = False

    @property
    def has_schema(self) -> bool:
        """True if a GEMM has a schema of the choice."""
        return self.w13 is not None or self.w2 is not None

    def schema(self, base: LayerSchema) -> LayerSchema:
        """Return the layer's schema. base: that of a layer without a choice."""
        return (
            pair(self.w13 or base.of("w13"), self.w2 or base.of("w2")) if self.has_schema else base
        )


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
        """Return the names that the override is for, of `layer_of`: name → number. Raises RequestError if none."""
        last = max(layer_of.values(), default=0)
        found = [
            name for name in layer_of if self.blocks is not None and fnmatchcase(name, self.blocks)
        ]
        if self.blocks is not None and not found:
            raise self._no_match(
                self.blocks, f"a pattern of names such as {next(iter(layer_of), 'a layer')}"
            )
        for first, end in self.layers:
            run = range(_counted(first, last), _counted(end, last) + 1)
            in_run = [name for name, layer in layer_of.items() if layer in run]
            if not in_run:
                text = str(first) if first == end else f"{first}-{end}"
                raise self._no_match(
                    f"layers {text}", f"layers of {', '.join(number_runs(layer_of.values()))}"
                )
            found += in_run
        return list(dict.fromkeys(found))

    def _no_match(self, found: str, expected: str) -> RequestError:
        what = "An override is for no layer."
        return RequestError(what, where=self.where, expected=expected, found=found)


def _counted(number: int, last: int) -> int:
    return number if number >= 0 else last + 1 + number


def group_by_schema(named: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Return `fp8, a16 activations` → names, of layers (name, schema, input schema) that differ from the usual ones."""
    found: dict[str, list[str]] = {}
    for layer, schema, inputs in named:
        found.setdefault(f"{schema}, {inputs} activations", []).append(layer)
    return found


def assign(overrides: Sequence[Override], layer_of: Mapping[str, int]) -> dict[str, LayerChoice]:
    """Return the choice for each layer that an override is for; later overrides win, field by field.

    layer_of: name → number of every layer. Raises RequestError for an override that matches no layer.
    """
    found: dict[str, LayerChoice] = {}
    for override in overrides:
        new = override.choice
        for name in override.matches(layer_of):
            old = found.get(name, LayerChoice())
            is_left = new.is_left or (old.is_left and not new.has_schema)
            found[name] = LayerChoice(
                new.w13 or old.w13, new.w2 or old.w2, new.inputs or old.inputs, is_left
            )
    return found


@dataclass(frozen=True)
class _Row:
    """Help and default of one option, inside its type; a closed choice has a `Literal` type."""

    help: str
    default: Any = None
    in_recipes: bool = True
    is_flag: bool = True


class EncodingArguments(TypedDict, total=False):
    """Options that decide codes and scales beside the schema: parsed by `planning.layer_encoding.EncodingOptions`, and
    by `planning.calibration.CalibrationText`."""

    round_scales: Annotated[
        bool,
        _Row(
            "Keep codes whose scales the parameter dtype cannot hold, and round these scales to it.",
            False,
        ),
    ]
    quantizer: Annotated[
        Quantizer,
        _Row(
            "Choice of scales and codes: round-to-nearest, or a search for the least squared error.",
            RTN,
        ),
    ]
    calibrate: Annotated[
        str | Path | None,
        _Row(
            "Choose scales and codes by the error of the experts' outputs while the model reads a TEXT: a file, "
            "or builtin. Needs transformers."
        ),
    ]
    calibrate_tokens: Annotated[
        int, _Row("Number of tokens of TEXT that are read, at most.", 65536)
    ]
    calibrate_context: Annotated[int, _Row("Number of tokens in a sequence of TEXT.", 2048)]


class ConversionArguments(EncodingArguments, total=False):
    """Keyword arguments of `hqconv.plan` and `hqconv.convert` that decide the artifact."""

    schema: Annotated[
        str | Path | WeightSchema | SchemaPair | None,
        _Row(
            "Preset, shorthand such as int4-g64-zp or int4-g32-e4m3, FILE.toml, or two of them, of w13 and of w2: "
            "int3-g64+int4-g32-e4m3; or source: keep the format of a quantized source."
        ),
    ]
    target: Annotated[
        str | None,
        _Row(
            "Serving GPU: its name (t4, a100, l40s, h200, b200 …) or architecture (sm75 … sm121).  [default: the CUDA "
            "device of this machine; with --schema source the target of an artifact; --layout checkpoint needs none]"
        ),
    ]
    dtype: Annotated[
        ParamDtype | None,
        _Row("Parameter dtype of the served model.  [default: dtype of the checkpoint]"),
    ]
    tp: Annotated[int, _Row("Tensor-parallel size.", 1)]
    tp_split: Annotated[
        TpSplit,
        _Row(
            "Parts of the intermediate size on TP ranks: even, or whole scale groups, of which the last ranks may hold "
            "fewer.",
            EVEN,
        ),
    ]
    ep: Annotated[int, _Row("Expert-parallel size.", 1)]
    expert_placement: Annotated[Placement, _Row("Placement of experts on EP ranks.", LINEAR)]
    redundant_experts: Annotated[
        int, _Row("Number of redundant experts (copies of the first experts).", 0)
    ]
    layout: Annotated[
        Layout,
        _Row("Tensors ready for the kernel, or a checkpoint for the serving engine.", KERNEL),
    ]
    input_schema: Annotated[
        str | Path | InputSchema,
        _Row(
            "Quantization of activations when serving: a16, fp8, fp8-static, int8 …, or FILE.toml.",
            "a16",
        ),
    ]
    cuda: Annotated[
        str | None,
        _Row(
            "CUDA compiler of the serving machine, such as 13.0; needed where the layout depends on it."
        ),
    ]
    overrides: Annotated[
        Sequence[Override],
        _Row(
            "Other schemas for some layers: `hqconv.schemas.recipe.load_recipe(path).overrides`.",
            (),
            in_recipes=False,
            is_flag=False,
        ),
    ]
    allow_unserved: Annotated[
        bool,
        _Row("Convert schemas that no known server runs, with a warning.", False, in_recipes=False),
    ]


@dataclass(frozen=True)
class ConversionOption:
    """One option, for the API, the command line and recipes. is_flag: on the command line."""

    name: str
    annotation: Any
    help: str
    default: Any
    in_recipes: bool
    is_flag: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed choice, from its `Literal` type; empty for other options."""
        kinds = (self.annotation, *get_args(self.annotation))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def is_schema(self) -> bool:
        """True for the name of a schema, or its file."""
        return any(is_dataclass(kind) for kind in get_args(self.annotation))

    @property
    def is_path(self) -> bool:
        """True for a file's path that cannot be a name."""
        return Path in get_args(self.annotation) and not self.is_schema

    def check(self, value: Any) -> None:
        """Raise RequestError for a value that is none of the choices."""
        if self.choices and value is not None and value not in self.choices:
            raise RequestError(
                "The option does not know this value.",
                where=f"--{self.name.replace('_', '-')}",
                expected=", ".join(self.choices),
                found=str(value),
            )

    @property
    def plain_type(self) -> type:
        """The type in a TOML file: bool, int or str."""
        return self.annotation if self.annotation in (bool, int) else str


@functools.cache
def conversion_options() -> Mapping[str, ConversionOption]:
    """Return the rows of `ConversionArguments` by name, those of `EncodingArguments` last."""
    hints = get_type_hints(ConversionArguments, vars(sys.modules[__name__]), include_extras=True)
    found = {}
    for name in sorted(hints, key=lambda name: name in EncodingArguments.__annotations__):
        annotation, row = get_args(hints[name])
        found[name] = ConversionOption(
            name, annotation, row.help, row.default, row.in_recipes, row.is_flag
        )
    return found
