"""Arrangement of a layer's experts in the parameters of transformers' module, found by the values themselves.

transformers stores experts stacked or one by one, gate and up in one parameter or in two, one after the other or
interleaved, transposed or not. The parameters were loaded from the source; so the arrangement of `w1`, `w3`, `w2` and
biases is the one that gives these parameters for the source's experts.

Legend: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def of(self, expert: Expert) -> torch.Tensor:
        """Return the part of an expert, in the expert's dtype."""
        parts = [expert[name] for name in self.names]
        whole = torch.stack(parts, 1).flatten(0, 1) if self.is_interleaved else torch.cat(parts)
        return whole.T if self.is_transposed else whole


class PlacedExperts:
    """The experts of a module of transformers, which can be exchanged for others.

    Parameters hold all experts, in front or along the rows, or belong to the expert whose number is in the path.
    """

    def __init__(self, name: str, module: nn.Module, num_experts: int, expert: int, values: Expert) -> None:
        """Find the arrangement from one expert of the source. Raises RequestError where a parameter is not understood.

        name: of the layer, for messages. values: expert number `expert`, as hqconv decodes it from the source.
        """
        self._parameters = dict(module.named_parameters())
        self._num_experts = num_experts
        self._arrangements: dict[str, Arrangement] = {}
        found: set[str] = set()
        for path, parameter in self._parts(expert):
            arrangement = _arrangement(parameter, values)
            if arrangement is None:
                raise RequestError(
                    "A parameter of transformers' model does not hold the experts that the source has.",
                    where=f"{name}: {path}, {list(parameter.shape)} of expert {expert}",
                    expected=f"an arrangement of {', '.join(values)}",
                    remedy="This model cannot be evaluated: transformers changes its experts when it loads them.",
                )
            self._arrangements[_without_expert(path, expert)] = arrangement
            found |= {*arrangement.names}
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


def _arrangement(part: torch.Tensor, values: Expert) -> Arrangement | None:
    """Return the arrangement that is nearest to an expert's part of a parameter; None if none is near."""
    names = [(name,) for name in values] + [pair for pair in _PAIRS if {*pair} <= {*values}]
    best, least = None, _TOLERANCE
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
        if error < least:
            best, least = arrangement, error
    return best
