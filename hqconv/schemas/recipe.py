"""Recipes: the options of a conversion in a TOML file, with other schemas for some blocks. Data and rules, no tensors.

schema = "mxfp4"
input_schema = "fp8"
target = "sm90"
tp = 8

[[override]]
layers = "0, -1"        # numbers as in the checkpoint, runs such as 3-5; negative ones count from the last MoE layer
schema = "fp8"

[[override]]
blocks = "mtp.*"        # a pattern of block names, as of files: * ? [ab]
schema = "none"         # left as they are
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.config_files import SCHEMAS, read_toml, shipped
from hqconv.schemas.input_schema import InputSchema, resolve_inputs
from hqconv.schemas.weight_schema import SOURCE, WeightSchema, resolve_schema

LEFT = "none"  # experts that are copied as they are
_SECTION = "override"
_KEYS = ("blocks", "layers", "schema", "input_schema")
# What a recipe may say: all that decides about the artifact, and nothing about the machine that makes it.
_OPTIONS: dict[str, type] = {
    **dict.fromkeys(
        ("schema", "input_schema", "target", "cuda", "dtype", "expert_placement", "layout", "quantizer"), str
    ),
    "importance": str,
    **dict.fromkeys(("tp", "ep", "redundant_experts"), int),
    "round_scales": bool,
}


@dataclass(frozen=True)
class LayerChoice:
    """What a block is made of instead: None for what all others are. is_left: nothing, it is copied as it is."""

    schema: WeightSchema | None = None
    inputs: InputSchema | None = None
    is_left: bool = False


@dataclass(frozen=True)
class Override:
    """A choice for some blocks. blocks: a pattern of names. layers: runs of layer numbers. One of the two is there."""

    blocks: str | None
    layers: tuple[tuple[int, int], ...]
    choice: LayerChoice
    where: str

    def chosen(self, layer_of: Mapping[str, int]) -> list[str]:
        """The blocks that it is for, of those whose layers are `layer_of`. Raises RequestError where there is none."""
        last = max(layer_of.values(), default=0)
        found = [name for name in layer_of if self.blocks is not None and fnmatchcase(name, self.blocks)]
        if self.blocks is not None and not found:
            raise self._of_none(self.blocks, f"a pattern of names such as {next(iter(layer_of), 'a block')}")
        for first, end in self.layers:
            run = range(_counted(first, last), _counted(end, last) + 1)
            of_run = [name for name, layer in layer_of.items() if layer in run]
            if not of_run:
                raise self._of_none(f"layers {_shown(first, end)}", _known(layer_of.values()))
            found += of_run
        return list(dict.fromkeys(found))

    def _of_none(self, found: str, expected: str) -> RequestError:
        what = "An override is for no block."
        return RequestError(what, where=self.where, expected=expected, found=found)


def _shown(first: int, end: int) -> str:
    return str(first) if first == end else f"{first}-{end}"


def _known(layers: Iterable[int]) -> str:
    """The numbers of MoE layers: `layers of 3-60, 62`."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return f"layers of {', '.join(_shown(*run) for run in runs)}"


def _counted(number: int, last: int) -> int:
    return number if number >= 0 else last + 1 + number


def assign(overrides: Sequence[Override], layer_of: Mapping[str, int]) -> dict[str, LayerChoice]:
    """The choice for each block that an override is for; later ones win, field by field.

    layer_of: every block's layer. Raises RequestError for an override that is for none.
    """
    found: dict[str, LayerChoice] = {}
    for override in overrides:
        new = override.choice
        for name in override.chosen(layer_of):
            old = found.get(name, LayerChoice())
            is_left = new.is_left or (old.is_left and new.schema is None)
            found[name] = LayerChoice(new.schema or old.schema, new.inputs or old.inputs, is_left)
    return found


@dataclass(frozen=True)
class Recipe:
    """options: of `hqconv convert`, by the names of its parameters. overrides: later ones win."""

    options: Mapping[str, Any]
    overrides: tuple[Override, ...]


def load_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises RequestError for a file that cannot be read, and for keys that are no options.

    Schemas that are files, and an importance file, are looked for beside the recipe.
    """
    words = read_toml(path, "recipe")
    sections = words.pop(_SECTION, [])
    for key, value in words.items():
        if type(value) is not _OPTIONS.get(key):
            what = "The recipe has a key that is unknown or of the wrong type."
            kind = getattr(_OPTIONS.get(key), "__name__", f"one of {', '.join(_OPTIONS)}")
            raise RequestError(what, where=f"{path}: {key}", expected=kind, found=repr(value))
    if not isinstance(sections, list) or not all(isinstance(one, dict) for one in sections):
        what, expected = "The recipe's overrides are no list.", "[[override]] before each"
        raise RequestError(what, where=f"{path}: {_SECTION}", expected=expected)
    for key in ("schema", "input_schema"):
        if key in words:
            words[key] = _beside(path, words[key])
    if "importance" in words:
        words["importance"] = str(path.parent / words["importance"])  # an absolute one stays as it is
    overrides = tuple(_override(path, number, one) for number, one in enumerate(sections, start=1))
    return Recipe(words, overrides)


def _beside(path: Path, text: Any) -> Any:
    """A schema's file, relative to the recipe, or one of `shipped` where there is none beside it."""
    if isinstance(text, str) and text.endswith(".toml") and not Path(text).is_absolute():
        beside = path.parent / text
        is_shipped = not os.path.lexists(beside) and text in shipped(SCHEMAS)
        return str(SCHEMAS / text if is_shipped else beside)
    return text


def _override(path: Path, number: int, words: Mapping[str, Any]) -> Override:
    where = f"{path}: {_SECTION} {number}"
    for key, value in words.items():
        if key not in _KEYS or not isinstance(value, str):
            what, expected = "An override has a key that is unknown or no text.", ", ".join(_KEYS)
            raise RequestError(what, where=f"{where}: {key}", expected=expected, found=repr(value))
    if ("blocks" in words) == ("layers" in words):
        what = "An override is for blocks or for layers."
        raise RequestError(what, where=where, expected="one of blocks and layers")
    if not {"schema", "input_schema"} & set(words):
        raise RequestError("An override changes nothing.", where=where, expected="schema or input_schema")
    schema, inputs = (_beside(path, words.get(key)) for key in ("schema", "input_schema"))
    if schema == SOURCE:
        what, expected = "An override cannot be the source's own schema.", "a schema by name"
        raise RequestError(what, where=f"{where}: schema", expected=expected, found=SOURCE)
    return Override(
        blocks=words.get("blocks"),
        layers=_runs(words["layers"], where) if "layers" in words else (),
        choice=LayerChoice(
            None if schema in (None, LEFT) else resolve_schema(schema),
            None if inputs is None else resolve_inputs(inputs),
            schema == LEFT,
        ),
        where=where,
    )


def _runs(text: str, where: str) -> tuple[tuple[int, int], ...]:
    """`0, 3-5, -1` as first and last numbers."""
    runs = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            what, expected = "The layers of an override are none.", "such as 0, 3-5, -1"
            raise RequestError(what, where=f"{where}: layers", expected=expected, found=text)
        runs.append((int(match[1]), int(match[2] or match[1])))
    return tuple(runs)
