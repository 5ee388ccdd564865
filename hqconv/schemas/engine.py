"""The interface to a serving engine for planning, reports, model cards and refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from hqconv.schemas.grid import Grid
from hqconv.schemas.model_config import NO_HEADS, AttentionHeads
from hqconv.schemas.weight_schema import WeightSchema


class Engine(Protocol):
    """A serving engine, for code that runs outside of its processes. Loads neither torch nor the engine itself.

    Reasons are second halves of sentences, to follow "<release> will not serve this artifact:".
    """

    name: str  # for messages
    release: str  # with the version that the facts below were read from and tested with
    library_name: str  # in the metadata of model cards on the Hub
    install_command: str  # installs hqconv from a clone of its repository, with the extra that installs the engine
    # Options of a server's command line, `{}` for the value, and remarks for refusals.
    placement_option: str
    placement_remark: str
    dtype_option: str
    layer_remedy: str

    def serve_options(self, grid: Grid) -> str | None:
        """Return command line options for a grid of ranks, or None if the engine has no such parallelism."""

    def attention_tp(self, grid: Grid) -> int | None:
        """Return the tensor parallel size of attention and dense layers, or None where there is no `serve_options`."""

    def heads_obstacle(self, grid: Grid, heads: AttentionHeads) -> str | None:
        """Return the reason why the ranks cannot share the attention heads, or None if they can."""

    def inner_obstacle(self, intermediate_size: int, grid: Grid) -> str | None:
        """Return the reason why the engine's MoE layers of this expert size do not start with the ranks, or None."""

    def is_heads_obstacle(self, warning: str) -> bool:
        """Return whether a recorded warning holds a `heads_obstacle`."""

    def serve_command(self, out: str, layout: str, grid: Grid, heads: AttentionHeads = NO_HEADS) -> str | None:
        """Return the command that serves an artifact, or None without one; the checkpoint layout fits any ranks."""

    def kernel_layout_obstacles(
        self, family: str, grid: Grid, heads: AttentionHeads = NO_HEADS, num_experts: Iterable[int] = ()
    ) -> list[str]:
        """Return reasons why the engine does not serve a kernel artifact of this model family, grid and heads.

        num_experts: of each layer, without copies; left out, what depends on it is no reason.
        """

    def checkpoint_layout_obstacle(self, schema: WeightSchema, param_dtype: str) -> str | None:
        """Return the reason why the engine cannot serve the checkpoint layout of this schema, of any family."""

    def checkpoint_family_obstacle(self, family: str, layer: str, schema: WeightSchema) -> str | None:
        """Return the reason why the engine cannot serve an MoE layer of this family from the checkpoint layout."""

    def layer_pattern(self, layer: str) -> str | None:
        """Return an ignore list's pattern for the engine's name of an MoE layer, or None if that name is unknown."""

    def checkpoint_config(
        self, schema: WeightSchema, layer_names_of: Iterable[str], left: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return `quantization_config` of the checkpoint layout; experts of the layers `left` stay unquantized."""
