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
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.input_schema import resolve_inputs
from hqconv.schemas.options import BUILTIN, LayerChoice, Override, conversion_options
from hqconv.schemas.untrusted_files import RECIPES, SCHEMAS, or_shipped, read_toml, shipped
from hqconv.schemas.weight_schema import SOURCE, resolve_schema

LEFT = "none"  # experts that are copied unchanged
_SECTION = "override"
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
    sections = document.pop(_SECTION, [])
    known = {name: option for name, option in conversion_options().items() if option.in_recipes}
    for key, value in document.items():
        if key not in known or type(value) is not known[key].plain_type:
            what = "The recipe has a key that is unknown or of the wrong type."
            expected = known[key].plain_type.__name__ if key in known else f"one of {', '.join(known)}"
            raise RequestError(what, where=f"{path}: {key}", expected=expected, found=repr(value))
        if known[key].is_schema:
            document[key] = _schema_path(path, value)
        elif known[key].is_path and value != BUILTIN:
            document[key] = path.parent / str(value)  # an absolute path does not change
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        raise RequestError(
            "The recipe's overrides are no list.", where=f"{path}: {_SECTION}", expected="[[override]] before each"
        )
    overrides = tuple(_override(path, number, section) for number, section in enumerate(sections, start=1))
    return Recipe(document, overrides)


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


def _schema_path(recipe: Path, text: Any) -> Any:
    """Return a schema's file in the recipe's folder, or the packaged file of that name if the folder has none."""
    if isinstance(text, str) and text.endswith(".toml") and not Path(text).is_absolute():
        in_folder = recipe.parent / text
        is_shipped = not os.path.lexists(in_folder) and text in shipped(SCHEMAS)
        return str(SCHEMAS / text if is_shipped else in_folder)
    return text


def _override(path: Path, number: int, section: Mapping[str, Any]) -> Override:
    where = f"{path}: {_SECTION} {number}"
    for key, value in section.items():
        if key not in _KEYS or not isinstance(value, str):
            raise RequestError(
                "An override has a key that is unknown or no text.",
                where=f"{where}: {key}",
                expected=", ".join(_KEYS),
                found=repr(value),
            )
    if ("blocks" in section) == ("layers" in section):
        what = "An override chooses its layers by one key."
        raise RequestError(what, where=where, expected="one of blocks and layers")
    if not {"schema", "input_schema"} & set(section):
        raise RequestError("An override changes nothing.", where=where, expected="schema or input_schema")
    schema, inputs = (_schema_path(path, section.get(key)) for key in ("schema", "input_schema"))
    if schema == SOURCE:
        raise RequestError(
            "An override cannot be the source's own schema.",
            where=f"{where}: schema",
            expected="a schema by name",
            found=SOURCE,
        )
    return Override(
        blocks=section.get("blocks"),
        layers=_runs(section["layers"], where) if "layers" in section else (),
        choice=LayerChoice(
            None if schema in (None, LEFT) else resolve_schema(schema),
            None if inputs is None else resolve_inputs(inputs),
            schema == LEFT,
        ),
        where=where,
        recipe=path.stem,
    )


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
