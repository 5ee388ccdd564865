"""Arrangement of a layer's experts in the parameters of transformers' module, found by the values themselves.

transformers stores experts stacked or one by one, gate and up in one parameter or in two, one after the other or
interleaved, transposed or not. The parameters were loaded from the source; so the arrangement of `w1`, `w3`, `w2` and
biases is the one that gives a parameter for the source's expert whose part of it has the largest norm.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hqconv.errors import RequestError

_TOLERANCE = 2**-6  # relative, of decoded weights that are rounded to 16 bits in between; another matrix is off by 1
_PAIRS = (("w1", "w3"), ("w3", "w1"), ("b1", "b3"), ("b3", "b1"))

Expert = Mapping[str, torch.Tensor]  # `w1` (if gated), `w3` [I, H], `w2` [H, I]; `b1`, `b3`, `b2` if there are biases


@dataclass(frozen=True)
class Arrangement:
    """One expert's part of a parameter: a projection, or two that are stacked or interleaved; transposed at the end."""

    names: tuple[str, ...]
    is_interleaved: bool = False
    is_transposed: bool = False

    def __str__(self) -> str:
        """Format for messages: `w1, w3 interleaved, transposed`."""
        kind = " interleaved" if self.is_interleaved else ""
        return f"{', '.join(self.names)}{kind}{', transposed' if self.is_transposed else ''}"

    def of(self, expert: Expert) -> torch.Tensor:
        """Return the part of an expert, in the expert's dtype."""
        parts = [expert[name] for name in self.names]
        whole = torch.stack(parts, 1).flatten(0, 1) if self.is_interleaved else torch.cat(parts)
        return whole.T if self.is_transposed else whole


class PlacedExperts:
    """The experts of a module of transformers, which can be exchanged for others.

    Parameters hold all experts, in front or along the rows, or belong to the expert whose number is in the path.
    """

    def __init__(self, name: str, module: nn.Module, num_experts: int, read: Callable[[int], Expert]) -> None:
        """Find the arrangement of each parameter. Raises RequestError where none fits, or where two fit.

        name: of the layer, for messages. read: returns an expert of the source, as hqconv decodes it, on the
        parameters' device.
        """
        self._parameters = dict(module.named_parameters())
        self._num_experts = num_experts
        self._arrangements: dict[str, Arrangement] = {}
        largest: dict[str, tuple[float, int]] = {}
        for expert in range(num_experts):
            for path, part in self._parts(expert):
                key, norm = _without_expert(path, expert), float(torch.linalg.vector_norm(part, dtype=torch.float32))
                largest[key] = max(largest.get(key, (-1.0, 0)), (norm, expert))
        chosen = {expert for _, expert in largest.values()}
        for expert in sorted(chosen):
            values = read(expert)
            for path, part in self._parts(expert):
                key = _without_expert(path, expert)
                if largest[key][1] == expert:
                    where = f"{name}: {path}, {list(part.shape)} of expert {expert}"
                    self._arrangements[key] = _arrangement(part, values, where)
        found = {one for arrangement in self._arrangements.values() for one in arrangement.names}
        if found != {*values}:
            what = "The parameters of transformers' model do not hold all parts of the experts."
            raise RequestError(what, where=name, expected=", ".join(values), found=", ".join(sorted(found)))

    def put(self, expert: int, values: Expert) -> None:
        """Overwrite one expert in the parameters."""
        for path, parameter in self._parts(expert):
            parameter.copy_(self._arrangements[_without_expert(path, expert)].of(values))

    def _parts(self, expert: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield path and values of each parameter's part of an expert, as views."""
        for path, parameter in self._parameters.items():
            numbers = [word for word in path.split(".") if word.isdigit()]
            if numbers:
                if int(numbers[0]) == expert:
                    yield path, parameter.data
            elif parameter.dim() == 3 or parameter.size(0) == self._num_experts:  # zero experts may follow
                yield path, parameter.data[expert]
            else:
                yield path, parameter.data.view(self._num_experts, -1, *parameter.shape[1:])[expert]


def _without_expert(path: str, expert: int) -> str:
    return ".".join("{expert}" if word == str(expert) else word for word in path.split("."))


def _arrangement(part: torch.Tensor, values: Expert, where: str) -> Arrangement:
    """Return the arrangement that gives an expert's part of a parameter. Raises RequestError for none, or for two.

    Biases are the same values in source and artifact: of several that fit, the nearest one is as good as any.
    """
    names = [(name,) for name in values] + [pair for pair in _PAIRS if {*pair} <= {*values}]
    fits: list[tuple[float, Arrangement]] = []
    expected = part.float()
    norm = float(expected.norm()) or 1.0
    for arrangement in (
        Arrangement(one, is_interleaved, is_transposed)
        for one in names
        if all(values[name].dim() == part.dim() for name in one)
        for is_interleaved in ((False, True) if len(one) == 2 else (False,))
        for is_transposed in (False, True)
    ):
        if arrangement.is_transposed and part.dim() != 2:
            continue
        candidate = arrangement.of(values)
        if candidate.shape != part.shape:
            continue
        error = float((candidate.to(expected) - expected).norm()) / norm
        if error < _TOLERANCE:
            fits.append((error, arrangement))
    if not fits:
        raise RequestError(
            "A parameter of transformers' model does not hold the experts that the source has.",
            where=where,
            expected=f"an arrangement of {', '.join(values)}",
            remedy="This model cannot be evaluated: transformers changes its experts when it loads them.",
        )
    if len(fits) > 1 and part.dim() > 1:
        raise RequestError(
            "It cannot be told how transformers' model arranges the experts: several arrangements give its parameter.",
            where=where,
            expected="one",
            found="; ".join(str(arrangement) for _, arrangement in fits),
            remedy="This model cannot be evaluated: projections of its largest expert are zero, or equal.",
        )
    return min(fits, key=lambda fit: fit[0])[1]
