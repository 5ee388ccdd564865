"""Recipes: TOML files with options of a conversion and other schemas for some layers.

schema = "mxfp4"
input_schema = "fp8"
target = "sm90"
tp = 8

[[override]]
layers = "0, -1"        # numbers as in the checkpoint, runs such as 3-5; negative ones count from the last MoE layer
schema = "fp8"

[[override]]
blocks = "mtp.*"        # a pattern of layer names, as of files: * ? [ab]
schema = "none"         # left as they are

[[override]]
layers = "3-5"
w13.schema = "int3-g64"  # of gate and up
w2.schema = "int4-g32-e4m3"     # of down; one of the two may be left out
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.options import BUILTIN, ConversionArguments, LayerChoice, Override, plain_type
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, or_shipped, read_toml, shipped
from hqconv.schemas.weight_schema import SOURCE, resolve_layer_schema, resolve_schema

LEFT = "none"  # experts that are copied unchanged
_SECTION = "override"
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
    for key, value in document.items():
        if key not in _TYPES or type(value) is not _TYPES[key]:
            what = "The recipe has a key that is unknown or of the wrong type."
            expected = _TYPES[key].__name__ if key in _TYPES else f"one of {', '.join(_TYPES)}"
            raise RequestError(what, where=f"{path}: {key}", expected=expected, found=repr(value))
        if key in ("schema", "input_schema"):
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
    return Recipe(document, tuple(overrides))


def with_recipe(config: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe, a file or the name of a packaged one; options in `given` but None win.

    Raises RequestError as `load_recipe`, and if neither the recipe nor `given` names a schema.
    """
    options: dict[str, Any] = {}
    if config is not None:
        recipe = load_recipe(or_shipped(Path(config), RECIPES))
        options = {**recipe.options, "overrides": recipe.overrides}
    options |= {name: value for name, value in given.items() if value is not None}
    if "schema" not in options:
        raise RequestError(
            "No schema is named.",
            where="--schema",
            expected="--schema NAME, or a recipe that names one",
            found=config or "",
            remedy="`hqconv schemas` shows them.",
        )
    return options


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
        what = "An override chooses its layers by one key."
        raise RequestError(what, where=where, expected="one of blocks and layers")
    schemas = {key: _schema_path(path.parent, values[key]) for key in _CHANGES if key in values}
    if not schemas or SOURCE in schemas.values():
        what = "An override gives its layers another schema, by name."
        raise RequestError(what, where=where, expected=f"one of {', '.join(_CHANGES)}")
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
            expected = "numbers and runs, such as 0, 3-5"
            raise RequestError(
                "The layers cannot be read.", where=where, expected=expected, found=text
            )
        runs.append((int(match[1]), int(match[2] or match[1])))
    return tuple(runs)
