"""Files of `--keep-experts`: for each MoE layer the experts to keep, in the order that they get in the artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.config_files import read_toml
from hqconv.schemas.untrusted_files import parse_json, read_regular

OPTION = "--keep-experts"
_MAX_BYTES = 64 << 20  # far more than a number for each of a million experts


@dataclass(frozen=True)
class KeptExperts:
    """Kept experts of one layer: their numbers in the source, in the artifact's order. count: of the source."""

    experts: tuple[int, ...]
    count: int

    def after(self, earlier: KeptExperts) -> KeptExperts:
        """Return both selections as one, `earlier` being the first."""
        return KeptExperts(tuple(earlier.experts[expert] for expert in self.experts), earlier.count)


@dataclass(frozen=True)
class Selection:
    """A file's content: layer (its name, or its number as text) → numbers of the experts to keep. where: the file."""

    layers: Mapping[str, tuple[int, ...]]
    where: str

    def by_name(self, index_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the experts of each layer by its name. index_of: name → number of every MoE layer.

        Raises RequestError for a layer that the model does not have, that is named twice, or that has no list.
        """
        found: dict[str, tuple[int, ...]] = {}
        for key, experts in self.layers.items():
            names = [key] if key in index_of else [name for name, index in index_of.items() if str(index) == key]
            if len(names) != 1:
                what = "The model has no such MoE layer." if not names else "Several MoE layers have this number."
                expected = f"names or numbers of layers, such as {', '.join([*index_of][:2])}"
                raise RequestError(what, where=f"{self.where}: {key}", expected=expected, remedy="Correct the file.")
            if names[0] in found:
                raise RequestError("A layer is named twice.", where=f"{self.where}: {key}", remedy="Correct the file.")
            found[names[0]] = experts
        missing = [name for name in index_of if name not in found]
        if missing:
            raise RequestError(
                "A layer has no list of experts to keep.",
                where=f"{self.where}: {missing[0]}",
                expected=f"a list for each of {len(index_of)} MoE layers: config.json has one number of experts",
                found=f"lists for {len(found)}",
                remedy="Add the layer; layers for multi-token prediction have experts too.",
            )
        return found


def read_selection(path: Path) -> Selection:
    """Read a file of `--keep-experts`: JSON, or TOML by its ending, `{"0": [3, 1], "model.layers.1.mlp.experts": …}`.

    Raises RequestError for a file that cannot be read, or that holds anything else.
    """
    if path.suffix == ".toml":
        document: Any = read_toml(path, "list of experts")
    else:
        try:
            document = parse_json(read_regular(path, _MAX_BYTES), _unique)
        except (OSError, ValueError) as error:
            found = getattr(error, "strerror", None) or error
            what = "The list of experts cannot be read."
            raise RequestError(what, where=str(path), expected="a JSON or a TOML file", found=found) from error
    if not isinstance(document, dict) or not document:
        raise _no_list(str(path), type(document).__name__ if document else "nothing")
    layers = {}
    for key, experts in document.items():
        where = f"{path}: {key}"
        if not isinstance(experts, list) or not experts or any(type(expert) is not int for expert in experts):
            raise _no_list(where, repr(experts)[:80])
        if len(set(experts)) < len(experts):
            twice = next(expert for expert in experts if experts.count(expert) > 1)
            raise RequestError("An expert is listed twice.", where=where, found=twice, remedy="Correct the file.")
        layers[key] = tuple(experts)
    return Selection(layers, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a layer is named twice")
    return document


def _no_list(where: str, found: str) -> RequestError:
    return RequestError(
        "This is no list of experts to keep.",
        where=where,
        expected='for each MoE layer a list of whole numbers, such as {"0": [0, 2, 5], "1": [1, 2, 7]}',
        found=found,
        remedy="Correct the file.",
    )
