"""What a row of the tables of source formats says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.make.configs import Json
from tests.make.layouts import QWEN3_MOE, Layout, Sizes
from tests.make.packing import Encoder


@dataclass(frozen=True)
class FormatSpec:
    """One row: how its checkpoint is written, and what is expected of it.

    recognised: what in the config says so. direct: the schema that `--schema source` gives, "" where it is refused
    with a message that contains `refused`. rounded: the schema that it then gives with `--round-scales`, if any.
    dtype: the config's. layers: the encoders of further layers. dense: how modules beside the experts are stored, if
    otherwise. differs: gate and up have scales of their own. target, tp: the schema to requantize to, and TP ranks
    that can hold it. needs: a package.
    """

    encode: Encoder
    config: Json
    recognised: str
    direct: str = ""
    refused: str = ""
    rounded: str = ""
    dtype: str = "bfloat16"
    layout: Layout = QWEN3_MOE
    layers: tuple[Encoder, ...] = ()
    dense: Encoder | None = None
    differs: bool = False
    sizes: Sizes = field(default_factory=Sizes)
    target: str = "int4"
    tp: int = 2
    needs: str = ""


class Table(dict[str, FormatSpec]):
    """Rows by name."""

    def row(
        self,
        name: str,
        encode: Encoder,
        config: Json,
        recognised: str,
        direct: str = "",
        **more: Any,
    ) -> None:
        """Add one."""
        assert name not in self, name
        self[name] = FormatSpec(encode, config, recognised, direct, **more)
