"""Relative errors of an output against its reference: over all of it, in its worst channel, in its worst batch."""

from __future__ import annotations

import math
from typing import Any

import torch

MIN_ROWS_PER_CHANNEL = 16


class Tally:
    """Squared differences and squares per column over several batches of rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.differences: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0
        self.worst_batch = 0.0

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count rows [t, C] of one batch."""
        self.num_rows += expected.size(0)
        self.differences = self.differences + (found - expected).square().sum(0)
        self.squares = self.squares + expected.square().sum(0)
        error = relative_error(found, expected)
        self.worst_batch = error if not error <= self.worst_batch else self.worst_batch

    def error(self) -> float:
        """Relative error over all rows and columns."""
        if not self.num_rows:
            return 0.0
        assert isinstance(self.differences, torch.Tensor)
        assert isinstance(self.squares, torch.Tensor)
        return math.sqrt(float(self.differences.sum()) / max(float(self.squares.sum()), 1e-300))

    def worst_channel(self) -> tuple[float, int]:
        """The largest relative error of one column, and which; (0, -1) where too few rows tell about a column."""
        if self.num_rows < MIN_ROWS_PER_CHANNEL:
            return 0.0, -1
        assert isinstance(self.differences, torch.Tensor)
        assert isinstance(self.squares, torch.Tensor)
        floor = float(self.squares.mean()) * 1e-6 + 1e-300  # columns that are all but zero say nothing
        errors = (self.differences / self.squares.clamp_min(floor)).sqrt().nan_to_num(nan=math.inf)
        column = int(errors.argmax())
        return float(errors[column]), column


def worst(tallies: dict[str, Tally]) -> dict[str, Any]:
    """The worst error over output and ranks, the worst single channel and the worst single batch."""

    def key(error: float) -> float:
        return math.inf if math.isnan(error) else error

    rank = max(tallies, key=lambda name: key(tallies[name].error()))
    channels = {name: tally.worst_channel() for name, tally in tallies.items()}
    channel = max(channels, key=lambda name: key(channels[name][0]))
    return {
        "kernel": tallies[rank].error(),
        "worst_rank": rank,
        "channel": channels[channel][0],
        "worst_channel": f"{channel} channel {channels[channel][1]}",
        "batch": max((t.worst_batch for t in tallies.values()), key=key),
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; NaN where anything is NaN."""
    norm = float(expected.norm())
    difference = float((found - expected).norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)
