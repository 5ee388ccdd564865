"""Small Mixture-of-Experts checkpoints in every source format, with the configs that publishers write.

`FORMATS` lists them; `write` makes one. The codes are drawn, and what they mean is returned, by code that shares
nothing with hqconv (`packing`, `packing_tools`, `layouts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.make import formats_floats, formats_toolkits, formats_words
from tests.make.layouts import Block, Sizes, write_checkpoint
from tests.make.spec import FormatSpec

__all__ = ["FORMATS", "KINDS", "FormatSpec", "Written", "write"]

FORMATS: dict[str, FormatSpec] = {
    **formats_floats.ROWS,
    **formats_toolkits.ROWS,
    **formats_words.ROWS,
}
# One format of each encoding and each form of stacks: the others differ in their config alone.
KINDS = list(
    {
        (spec.encode.__qualname__, str(spec.layout.words), spec.layout.fused is None): name
        for name, spec in FORMATS.items()
    }.values()
)


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk, and what each layer's experts mean, float32."""

    folder: Path
    spec: FormatSpec
    truth: dict[str, Block]


def write(folder: Path, form: str | FormatSpec, seed: int = 0, **sizes: int) -> Written:
    """Write the checkpoint of a format into a new folder. sizes: hidden, inner, experts instead of the format's."""
    spec = FORMATS[form] if isinstance(form, str) else form
    truth = write_checkpoint(
        folder,
        spec.layout,
        [spec.encode, *spec.layers],
        Sizes(**{**vars(spec.sizes), **sizes}),
        dense=spec.dense,
        differs=spec.differs,
        config={"torch_dtype": spec.dtype, **spec.config},
        seed=seed,
    )
    return Written(folder, spec, truth)
