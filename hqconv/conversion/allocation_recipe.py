"""The recipe of an allocation: an ordinary TOML recipe for `convert --config`, with the figures as comments."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hqconv.errors import printable_line
from hqconv.planning.allocation import Allocation, LayerOption, LayerOptions, Point
from hqconv.planning.candidates import Candidates
from hqconv.schemas.options import SIZE, conversion_options
from hqconv.schemas.weight_schema import SOURCE

_MAX_POINTS = 9  # of the curve, in comments


@dataclass(frozen=True)
class AllocationRequest:
    """The options of an allocation as they were given, for the recipe. given: of `schemas.options`, without defaults.

    names: of candidates, None for the default ones.
    """

    src: str
    revision: str | None
    size: str | None
    bits: float | None
    objective: str
    max_layer_error: float | None
    names: Sequence[str] | None
    given: Mapping[str, Any]

    def command(self, out: Path) -> str:
        """Return the command that makes the recipe `out`."""
        own = {
            "revision": self.revision,
            "size": self.size,
            "bits": None if self.bits is None else f"{self.bits:g}",
            "objective": None if self.objective == SIZE else self.objective,
            "max_layer_error": None if self.max_layer_error is None else f"{self.max_layer_error:g}",
            "candidates": None if self.names is None else ",".join(self.names),
        }
        words = ["hqconv", "allocate", self.src]
        for name, value in (own | dict(self.given)).items():
            if value is not None and value is not False:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [_text(value)])]
        return shlex.join([*words, "-o", out.name])


def _text(value: Any) -> str:
    """Return an option's value as text: of a schema as an object its name."""
    return str(getattr(value, "name", value) if not isinstance(value, Path) else value)


def base_of(allocation: Allocation, candidates: Candidates) -> str:
    """Return the candidate that the recipe has for layers without an override.

    It is the source's own schema where a layer keeps it, because no override can name that; else the most common one.
    """
    counts = Counter(option.candidate for option in allocation.chosen)
    order = [one.name for one in candidates.each]
    return SOURCE if SOURCE in counts else max(counts, key=lambda name: (counts[name], -order.index(name)))


def recipe_text(request: AllocationRequest, allocation: Allocation, candidates: Candidates, out: Path) -> str:
    """Return the recipe, the same text for the same request and measurements. out: its path."""
    base = base_of(allocation, candidates)
    lines = [f"# {printable_line(text)}".rstrip() for text in _header(request, allocation, candidates, out)]
    lines += [f"{key} = {_toml(value)}" for key, value in _keys(request, candidates, base, out).items()]
    for layer, option in zip(allocation.layers, allocation.chosen, strict=True):
        lines += ["", f"# {printable_line(layer.name)}: {_figures(layer, option)}"]
        if option.candidate != base:
            lines += ["[[override]]", f"blocks = {_toml(_escaped(layer.name))}"]
            lines.append(f"schema = {_toml(_schema_value(option.candidate, out))}")
    return "\n".join(lines) + "\n"


def _figures(layer: LayerOptions, option: LayerOption) -> str:
    bits = float(Fraction(8 * option.size_bytes, layer.num_weights))
    return f"{option.candidate}, error {option.relative_error:.4g}, {bits:.4f} bits per weight"


def _totals(point: Point, is_size: bool) -> str:
    text = f"{point.size_bytes} bytes, {point.bits:.4f} bits per weight, error {point.relative_error:.4g}"
    return text if is_size else f"{text}, {point.token_bytes} bytes for a token"


def _header(request: AllocationRequest, allocation: Allocation, candidates: Candidates, out: Path) -> Iterator[str]:
    is_size, source = request.objective == SIZE, candidates.each[0].plan.source
    name = (source.repo_id or source.name) + (f" at {source.revision}" if source.revision else "")
    yield f"{name}: a schema for each MoE layer, chosen by measured errors. Use it with convert --config."
    yield ""
    yield request.command(out)
    yield ""
    of = "the files of experts of all ranks" if is_size else "the experts that one token reads"
    yield f"Budget: {allocation.limit_bytes} bytes of {of}."
    yield f"Chosen: {_totals(allocation.point, is_size)}."
    if allocation.is_optimal:
        yield "No choice within the budget has a smaller error."
    else:
        yield f"No choice within the budget has an error below {allocation.bound:.4g}."
    weighted = ", weighted by the importance file" if candidates.options.encoding.importance else ""
    yield f"Errors: root of the mean squared relative error of all layers{weighted}."
    if allocation.uniform:
        yield ""
        yield "One schema for all layers:"
        for candidate, point in allocation.uniform.items():
            yield f"  {candidate}: {_totals(point, is_size)}"
    yield ""
    yield f"Error against size, some points; {document_path(out).name} has all of them for hqconv report --allocation:"
    last = len(allocation.curve) - 1
    numbers = dict.fromkeys(round(i * last / (_MAX_POINTS - 1)) for i in range(_MAX_POINTS))
    yield from (f"  {_totals(allocation.curve[number], is_size)}" for number in numbers)


def document_path(out: Path) -> Path:
    """Return the path of the document beside a recipe."""
    return out.with_name(f"{out.name.removesuffix('.toml')}.allocation.json")


def journal_path(out: Path) -> Path:
    """Return the path of the journal beside an unfinished recipe."""
    return out.with_name(f"{out.name}.partial.jsonl")


def _keys(request: AllocationRequest, candidates: Candidates, base: str, out: Path) -> dict[str, Any]:
    """Return the recipe's options: the resolved target and dtype, and options other than the default."""
    options, target = candidates.options, candidates.each[0].plan.spec.target
    keys: dict[str, Any] = {"schema": _schema_value(base, out), "target": target.name}
    for name, option in conversion_options().items():
        value = request.given.get(name, option.default)
        if not option.in_recipes or name in keys or value is None or value == option.default:
            continue
        if option.is_path or (option.is_schema and _text(value).endswith(".toml")):
            keys[name] = _beside(_text(value), out)
        else:
            keys[name] = _text(value) if option.plain_type is str else value
    return {**keys, "dtype": options.dtype}


def _schema_value(candidate: str, out: Path) -> str:
    return _beside(candidate, out) if candidate.endswith(".toml") else candidate


def _beside(path: str, out: Path) -> str:
    """Return a file's path as the recipe has it: relative to the recipe's folder; a packaged file by its name."""
    return os.path.relpath(path, out.parent) if os.path.lexists(path) else path


def _escaped(name: str) -> str:
    """Return a pattern that matches one name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _toml(value: Any) -> str:
    """Return a value of a TOML file: a text, a whole number or a truth value."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
