"""Overrides: other schemas for some MoE layers of a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hqconv.errors import RequestError
from hqconv.schemas.input_schema import InputSchema
from hqconv.schemas.weight_schema import WeightSchema


@dataclass(frozen=True)
class LayerChoice:
    """Schemas of one layer: None for the schema of all others. is_left: the layer is copied unchanged."""

    schema: WeightSchema | None = None
    inputs: InputSchema | None = None
    is_left: bool = False


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
        found = [name for name in layer_of if self.blocks is not None and fnmatchcase(name, self.blocks)]
        if self.blocks is not None and not found:
            raise self._no_match(self.blocks, f"a pattern of names such as {next(iter(layer_of), 'a layer')}")
        for first, end in self.layers:
            run = range(_counted(first, last), _counted(end, last) + 1)
            in_run = [name for name, layer in layer_of.items() if layer in run]
            if not in_run:
                raise self._no_match(f"layers {_shown(first, end)}", _known(layer_of.values()))
            found += in_run
        return list(dict.fromkeys(found))

    def _no_match(self, found: str, expected: str) -> RequestError:
        what = "An override is for no layer."
        return RequestError(what, where=self.where, expected=expected, found=found)


def _shown(first: int, end: int) -> str:
    return str(first) if first == end else f"{first}-{end}"


def _known(layers: Iterable[int]) -> str:
    """Return the numbers of MoE layers as text: `layers of 3-60, 62`."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return f"layers of {', '.join(_shown(*run) for run in runs)}"


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
            is_left = new.is_left or (old.is_left and new.schema is None)
            found[name] = LayerChoice(new.schema or old.schema, new.inputs or old.inputs, is_left)
    return found
