"""The recipe of an allocation: an ordinary TOML recipe for `convert --config`, with the figures as comments."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from hqconv.errors import printable_line
from hqconv.planning.allocation import Allocation, Budget
from hqconv.planning.candidates import Candidates
from hqconv.schemas.options import SIZE, conversion_options
from hqconv.schemas.weight_schema import SOURCE


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


def recipe_text(
    allocation: Allocation, budget: Budget, candidates: Candidates, given: Mapping[str, Any], out: Path
) -> str:
    """Return the recipe, the same text for the same request and measurements.

    given: the options of the allocation that are not the default. out: the recipe's path.
    """
    base = base_of(allocation, candidates)
    lines = [f"# {printable_line(text)}" for text in _header(allocation, budget, candidates, out)]
    lines += [f"{key} = {_toml(value)}" for key, value in _keys(given, candidates, base, out).items()]
    for layer, option in zip(allocation.layers, allocation.chosen, strict=True):
        bits = float(Fraction(8 * option.size_bytes, layer.num_weights))
        figures = f"{option.candidate}, error {option.relative_error:.4g}, {bits:.4f} bits per weight"
        lines += ["", f"# {printable_line(layer.name)}: {figures}"]
        if option.candidate != base:
            lines += ["[[override]]", f"blocks = {_toml(_escaped(layer.name))}"]
            lines.append(f"schema = {_toml(_schema_value(option.candidate, out))}")
    return "\n".join(lines) + "\n"


def _header(allocation: Allocation, budget: Budget, candidates: Candidates, out: Path) -> Iterator[str]:
    source, point = candidates.each[0].plan.source, allocation.point
    name = (source.repo_id or source.name) + (f" at {source.revision}" if source.revision else "")
    yield f"{name}: a schema for each MoE layer, chosen by measured errors. Use it with convert --config."
    of = "the files of experts of all ranks" if budget.objective == SIZE else "the experts that one token reads"
    yield f"Budget: {allocation.limit_bytes} bytes of {of}."
    chosen = f"{point.size_bytes} bytes, {point.bits:.4f} bits per weight, error {point.relative_error:.4g}"
    yield f"Chosen: {chosen}, {point.token_bytes} bytes for a token."
    if allocation.is_optimal:
        yield "No choice within the budget has a smaller error."
    else:
        yield f"No choice within the budget has an error below {allocation.bound:.4g}."
    weighted = ", weighted by the importance file" if candidates.options.encoding.importance else ""
    yield f"Errors: root of the mean squared relative error of all layers{weighted}."
    yield f"All figures are in {document_path(out).name}, for hqconv report --allocation."


def document_path(out: Path) -> Path:
    """Return the path of the document beside a recipe."""
    return out.with_name(f"{out.name.removesuffix('.toml')}.allocation.json")


def journal_path(out: Path) -> Path:
    """Return the path of the journal beside an unfinished recipe."""
    return out.with_name(f"{out.name}.partial.jsonl")


def _keys(given: Mapping[str, Any], candidates: Candidates, base: str, out: Path) -> dict[str, Any]:
    """Return the recipe's options: the resolved target and dtype, and options other than the default."""
    options, target = candidates.options, candidates.each[0].plan.spec.target
    keys: dict[str, Any] = {"schema": _schema_value(base, out), "target": target.name}
    for name, option in conversion_options().items():
        value = given.get(name, option.default)
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
