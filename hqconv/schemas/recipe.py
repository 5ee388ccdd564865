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

[layers."3-5"]          # another spelling of an override by layers; these come after the others
schema = "int3-g64+int4-g64"    # of w13 (gate and up) and of w2 (down)

[layers."3-5".w2]       # of one GEMM alone; in an [[override]]: w2.schema = …
schema = "int4-g32-e4m3"
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.options import BUILTIN, LayerChoice, Override, conversion_options
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, or_shipped, read_toml, shipped
from hqconv.schemas.weight_schema import (
    SOURCE,
    WeightSchema,
    resolve_layer_schema,
    resolve_schema,
    split_names,
)

LEFT = "none"  # experts that are copied unchanged
_SECTION, _TABLE = "override", "layers"
_KEYS = ("blocks", "layers", "schema", "input_schema")


@dataclass(frozen=True)
class Recipe:
    """Options by the names of the API's parameters, and overrides, of which later ones win."""

    options: Mapping[str, Any]
    overrides: tuple[Override, ...]


def load_recipe(path: Path) -> Recipe:
    """Read a recipe: its keys are the options of `schemas.options` that decide the artifact, not of one machine.

    Relative paths of schemas and of other files are looked up in the recipe's folder. Raises RequestError for a file
    that cannot be read, and for unknown keys.
    """
    document = read_toml(path, "recipe", [name.removesuffix(".toml") for name in shipped(RECIPES)])
    sections, tables = document.pop(_SECTION, []), document.pop(_TABLE, {})
    known = {name: option for name, option in conversion_options().items() if option.in_recipes}
    for key, value in document.items():
        if key not in known or type(value) is not known[key].plain_type:
            what = "The recipe has a key that is unknown or of the wrong type."
            expected = (
                known[key].plain_type.__name__ if key in known else f"one of {', '.join(known)}"
            )
            raise RequestError(what, where=f"{path}: {key}", expected=expected, found=repr(value))
        if known[key].is_schema:
            document[key] = _schema_path(path, str(value))
        elif known[key].is_path and value != BUILTIN:
            document[key] = path.parent / str(value)  # an absolute path does not change
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        raise RequestError(
            "The recipe's overrides are no list.",
            where=f"{path}: {_SECTION}",
            expected="[[override]] before each",
        )
    if not isinstance(tables, dict) or not all(
        isinstance(section, dict) for section in tables.values()
    ):
        what, expected = "The recipe's layers are no tables.", f'[{_TABLE}."0-3"] before each'
        raise RequestError(what, where=f"{path}: {_TABLE}", expected=expected)
    named = [
        (f"{path}: {_SECTION} {number}", section)
        for number, section in enumerate(sections, start=1)
    ]
    named += [
        (f"{path}: {_TABLE}.{runs}", {"layers": runs, **section})
        for runs, section in tables.items()
    ]
    return Recipe(document, tuple(_override(path, where, section) for where, section in named))


def with_recipe(config: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe, a file or the name of a packaged one; options in `given` but None win.

    Raises RequestError as `load_recipe`, and if neither the recipe nor `given` names a schema. Without a recipe the
    given options are returned.
    """
    if config is None:
        return dict(given)
    recipe = load_recipe(or_shipped(Path(config), RECIPES))
    options = {**recipe.options, "overrides": recipe.overrides}
    options |= {name: value for name, value in given.items() if value is not None}
    if "schema" not in options:
        raise no_schema(str(config))
    return options


def no_schema(found: str = "") -> RequestError:
    """Return the error for a conversion without a schema. found: the recipe that names none."""
    return RequestError(
        "No schema is named.",
        where="--schema",
        expected="--schema NAME, or a recipe that names one",
        found=found,
        remedy="`hqconv schemas` shows them.",
    )


def _schema_path(recipe: Path, text: str) -> str:
    """Return a schema's file in the recipe's folder, or the packaged file of that name if the folder has none."""
    if text.endswith(".toml") and (recipe.parent / text).is_file():
        return str(recipe.parent / text)
    return "+".join(_one_path(recipe, name) for name in split_names(text))


def _one_path(recipe: Path, text: str) -> str:
    if text.endswith(".toml") and not Path(text).is_absolute():
        in_folder = recipe.parent / text
        is_shipped = not os.path.lexists(in_folder) and text in shipped(SCHEMAS)
        return str(SCHEMAS / text if is_shipped else in_folder)
    return text


def _override(path: Path, where: str, section: Mapping[str, Any]) -> Override:
    of_gemms = {gemm: section[gemm] for gemm in GEMMS if isinstance(section.get(gemm), dict)}
    for key, value in section.items():
        if key in of_gemms:
            if value.keys() != {"schema"} or not isinstance(value["schema"], str):
                what = "A GEMM of an override has a schema, and nothing else."
                raise RequestError(
                    what, where=f"{where}: {key}", expected=f'{key}.schema = "…"', found=repr(value)
                )
        elif key not in _KEYS or not isinstance(value, str):
            raise RequestError(
                "An override has a key that is unknown or no text.",
                where=f"{where}: {key}",
                expected=f"{', '.join(_KEYS)}, w13.schema, w2.schema",
                found=repr(value),
            )
    if ("blocks" in section) == ("layers" in section):
        what = "An override chooses its layers by one key."
        raise RequestError(what, where=where, expected="one of blocks and layers")
    if not {"schema", "input_schema", *of_gemms} & set(section):
        expected = "schema, input_schema, w13.schema or w2.schema"
        raise RequestError("An override changes nothing.", where=where, expected=expected)
    return Override(
        blocks=section.get("blocks"),
        layers=_runs(section["layers"], where) if "layers" in section else (),
        choice=_choice(
            path, where, section, {gemm: one["schema"] for gemm, one in of_gemms.items()}
        ),
        where=where,
        recipe=path.stem,
    )


def _choice(
    path: Path, where: str, section: Mapping[str, Any], of_gemms: Mapping[str, str]
) -> LayerChoice:
    """Return the choice of an override: its schema for both GEMMs, but for those that have one of their own."""
    texts = {
        key: text
        for key, text in {"schema": section.get("schema"), **of_gemms}.items()
        if text is not None
    }
    for key, text in texts.items():
        if text == SOURCE or (text == LEFT and (key != "schema" or of_gemms)):
            raise RequestError(
                "An override cannot be the source's own schema, and a GEMM cannot be left alone.",
                where=f"{where}: {key}",
                expected="a schema by name",
                found=text,
            )
    named = section.get("input_schema")
    inputs = None if named is None else resolve_inputs(_schema_path(path, named))
    if texts.get("schema") == LEFT:
        return LayerChoice(inputs=inputs, is_left=True)
    found: dict[str, WeightSchema] = {}
    if "schema" in texts:
        schema = resolve_layer_schema(_schema_path(path, texts["schema"]))
        found = {gemm: schema.of(gemm) for gemm in GEMMS}
    found |= {gemm: resolve_schema(_schema_path(path, text)) for gemm, text in of_gemms.items()}
    return LayerChoice(found.get("w13"), found.get("w2"), inputs)


def _runs(text: str, where: str) -> tuple[tuple[int, int], ...]:
    """Parse `0, 3-5, -1` into first and last numbers."""
    runs = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise RequestError(
                "The layers of an override are none.",
                where=f"{where}: layers",
                expected="such as 0, 3-5, -1",
                found=text,
            )
        runs.append((int(match[1]), int(match[2] or match[1])))
    return tuple(runs)
