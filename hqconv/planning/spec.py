"""What a user asked for, with what was left open filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats.source_format import conversion_of
from hqconv.humming_layout.layer_config import needs_cuda
from hqconv.models.expert_map import ExpertMap
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.encoding import MSE, QUANTIZERS, RTN
from hqconv.planning.importance import Importance
from hqconv.planning.source_schema import source_param_dtype, source_schemas
from hqconv.schemas import artifact_names
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import A16, InputSchema
from hqconv.schemas.kernel_spec import KernelSpec
from hqconv.schemas.model_config import text_config
from hqconv.schemas.recipe import LayerChoice
from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema


@dataclass(frozen=True)
class ConversionSpec:
    """What the user asked for, resolved: everything that decides the bytes of the artifact.

    `must_be_direct` decides none: it refuses what cannot keep the source's codes and scales, but in blocks `renamed`,
    whose schema an override names. `of_blocks` are the blocks that are made of something else; `schema` and `inputs`
    are of all others. `round_scales`: scales of another 16-bit
    dtype than the parameters' are rounded, and the codes kept; set only where it changes something. `importance`: what
    weights the search of the mse quantizer.
    """

    schema: WeightSchema
    param_dtype: str
    target: GpuTarget
    grid: Grid = field(default_factory=Grid)
    layout: str = artifact_names.KERNEL
    inputs: InputSchema = A16
    must_be_direct: bool = False
    of_blocks: Mapping[str, KernelSpec] = field(default_factory=dict)
    round_scales: bool = False
    quantizer: str = RTN
    importance: Importance | None = None
    renamed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--dtype", self.param_dtype, PARAM_DTYPES),
            ("--layout", self.layout, (artifact_names.KERNEL, artifact_names.CHECKPOINT)),
            ("--quantizer", self.quantizer, QUANTIZERS),
        ):
            if value not in known:
                what, expected = "The option does not know this value.", ", ".join(known)
                raise RequestError(what, where=option, expected=expected, found=value)
        if self.importance is not None and self.quantizer != MSE:
            what, expected = (
                "An importance file has no effect without a search for scales.",
                "--quantizer mse",
            )
            raise RequestError(
                what, where="--importance", expected=expected, found=f"--quantizer {self.quantizer}"
            )

    @property
    def kind(self) -> KernelSpec:
        """What decides the kernel layout of a block that no override is for."""
        return KernelSpec(self.schema, self.param_dtype, self.target, self.inputs)

    def kernel_spec_of(self, block: str) -> KernelSpec:
        """What decides the kernel layout of one block."""
        return self.of_blocks.get(block, self.kind)

    def keeps(self, block: str) -> bool:
        """Whether one block must keep its own codes and scales."""
        return self.must_be_direct and block not in self.renamed

    @property
    def kinds(self) -> list[KernelSpec]:
        """The distinct kinds, the first of them `kind`."""
        return list(dict.fromkeys((self.kind, *self.of_blocks.values())))


def default_param_dtype(config: Mapping[str, Any], experts: ExpertMap) -> str:
    """The parameter dtype a checkpoint implies: its config's, else its experts'; float32 becomes bfloat16."""
    for words in (config, text_config(config)):
        for key in ("torch_dtype", "dtype"):
            if words.get(key) in PARAM_DTYPES:
                return str(words[key])
            if words.get(key) == "float32":
                return "bfloat16"
    return "float16" if experts.blocks[0].dtype == "F16" else "bfloat16"


def make_spec(
    experts: ExpertMap,
    config: Mapping[str, Any],
    schema: WeightSchema | None,
    param_dtype: str | None,
    grid: Grid,
    choices: Mapping[str, LayerChoice] | None = None,
    *,
    round_scales: bool = False,
    **words: Any,
) -> ConversionSpec:
    """A request with what was left open filled in.

    `schema`: None for the source's own, which is each block's own; `param_dtype`: None for the source's own;
    `choices`: of blocks, what they are made of instead; `round_scales`: as `--round-scales`; `words` are the other
    fields of `ConversionSpec`. Raises RequestError as `source_schemas` does, and where overrides leave no block to it.
    """
    own_dtype = source_param_dtype(experts) if schema is None else None
    dtype = param_dtype if param_dtype is not None else own_dtype or default_param_dtype(config, experts)
    choices = choices or {}
    renamed = frozenset(name for name, choice in choices.items() if choice.schema is not None)
    own: dict[str, WeightSchema] = {}
    if schema is None:
        kept = [block for block in experts.blocks if block.name not in renamed]
        own = source_schemas(kept, dtype, grid.tp, round_scales=round_scales)
    spec = ConversionSpec(
        schema or _most_common(own), dtype, grid=grid, must_be_direct=schema is None, renamed=renamed, **words
    )
    spec = replace(spec, of_blocks=_of_blocks(experts, spec, choices, own))
    target = spec.target
    if target.cuda is not None and not any(needs_cuda(kind) for kind in spec.kinds):
        target = replace(target, cuda=None)  # the same bytes: the same words
    of_blocks = {name: replace(kind, target=target) for name, kind in spec.of_blocks.items()}
    changes_something = round_scales and any(_rounds(block, spec) for block in experts.blocks)
    return replace(spec, target=target, of_blocks=of_blocks, round_scales=changes_something)


def _most_common(own: Mapping[str, WeightSchema]) -> WeightSchema:
    """The schema of most blocks, the first of them where several have as many."""
    if not own:
        what, remedy = "Overrides leave no block to the source's own schema.", "Name a schema."
        raise RequestError(what, where="--schema source", found="overrides of all blocks", remedy=remedy)
    return Counter(own.values()).most_common(1)[0][0]


def _rounds(block: MoeLayer, spec: ConversionSpec) -> bool:
    """Whether `--round-scales` decides about a block."""
    words = (block.format, spec.kernel_spec_of(block.name).schema, spec.param_dtype)
    return conversion_of(*words, round_scales=True) != conversion_of(*words)


def _of_blocks(
    experts: ExpertMap,
    spec: ConversionSpec,
    choices: Mapping[str, LayerChoice],
    own: Mapping[str, WeightSchema],
) -> dict[str, KernelSpec]:
    """The kinds of blocks that are made of something else; of left ones `ExpertMap.without` knows."""
    kind, found = spec.kind, {}
    for block in experts.blocks:
        choice = choices.get(block.name, LayerChoice())
        schema = choice.schema or own.get(block.name, kind.schema)
        found[block.name] = replace(kind, schema=schema, inputs=choice.inputs or kind.inputs)
    return {name: of_block for name, of_block in found.items() if of_block != kind}
