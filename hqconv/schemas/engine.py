"""Facts about the serving engine: its name, options and commands, and what it does not serve. Imports no engine.

Planning, conversion, reports and refusals ask `ENGINE`. Reasons are second halves of sentences, to follow
"<release> will not serve this artifact:".
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hqconv.errors import RequestError
from hqconv.schemas.artifact_names import GEMMS, KERNEL, Config, text_config
from hqconv.schemas.grid import LINEAR, Grid
from hqconv.schemas.weight_schema import LayerSchema, SchemaPair, WeightSchema

_CANNOT_SHARE = "tensor parallel ranks cannot share the model's"


@dataclass(frozen=True)
class AttentionHeads:
    """Numbers of heads of a model's attention; None where the config has no such number.

    num_kv_heads: None for latent attention (MLA), too, whose keys and values every rank has whole.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None


NO_HEADS = AttentionHeads()
# Spellings of config.json; vLLM reads the same.
_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_MLA = ("kv_lora_rank", "compress_ratios")


def attention_heads(config: Config) -> AttentionHeads:
    """Return the heads of the language model in a config; values that are no positive number count as missing."""
    text = text_config(config)
    attention = text.get("attn_config")  # dbrx
    kv_heads = _first_count(text, _KV_HEADS)
    if kv_heads is None and isinstance(attention, Mapping):
        kv_heads = _first_count(attention, ("kv_n_heads",))
    is_latent = any(text.get(key) is not None for key in _MLA)
    return AttentionHeads(_first_count(text, _HEADS), None if is_latent else kv_heads)


def _first_count(config: Config, keys: tuple[str, ...]) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


@dataclass(frozen=True)
class Engine:
    """A serving engine: facts of one release, from its source and from runs of its classes (docs/serving.md).

    release: name and version. library_name: of model cards on the Hub. install_command: installs hqconv from a clone of
    its repository, with the extra that installs the engine. placement_option, dtype_option: `{}` stands for the value.
    placement_remark, layer_remedy: parts of refusals. without_kernel_layer: families whose class has no layer that runs
    the kernels as the model needs them, and why. without_checkpoint_loader: families whose loader does not read the
    checkpoint layout, and why.
    """

    name: str
    release: str
    library_name: str
    install_command: str
    command: str
    tp_option: str
    ep_option: str
    copies_option: str
    placement_option: str
    placement_remark: str
    dtype_option: str
    layer_remedy: str
    quant_method: str
    without_kernel_layer: Mapping[str, str]
    without_checkpoint_loader: Mapping[str, str]

    def serve_options(self, grid: Grid) -> str | None:
        """Return command line options for a grid of ranks, or None if there is no such parallelism.

        With expert parallelism the engine's MoE layers have one TP rank.
        """
        if (grid.tp > 1 and grid.ep > 1) or (
            grid.redundant and (grid.ep == 1 or grid.placement != LINEAR)
        ):
            return None
        if grid.ep == 1:
            return self.tp_option.format(grid.tp) if grid.tp > 1 else ""
        options = [self.tp_option.format(grid.ep), self.ep_option]
        if grid.placement != LINEAR:
            options.append(self.placement_option.format(grid.placement))
        if grid.redundant:
            options.append(self.copies_option.format(grid.redundant))
        return " ".join(options)

    def attention_tp(self, grid: Grid) -> int | None:
        """Return the tensor parallel size of attention and dense layers, or None where there is no `serve_options`.

        Every expert parallel rank is a tensor parallel rank of attention.
        """
        return None if self.serve_options(grid) is None else grid.tp * grid.ep

    def heads_obstacle(self, grid: Grid, heads: AttentionHeads) -> str | None:
        """Return the reason why the ranks cannot share the attention heads, or None if they can.

        KV heads are dealt to the ranks, or repeated where there are more ranks than KV heads: vLLM's
        `ModelConfig.verify_with_parallel_config`, and the assertions of its attention layers.
        """
        tp = self.attention_tp(grid)
        if tp is None:
            return None
        if heads.num_heads is not None and heads.num_heads % tp:
            return f"{tp} {_CANNOT_SHARE} {heads.num_heads} attention heads evenly"
        kv_heads = heads.num_kv_heads
        if kv_heads is not None and kv_heads % tp and tp % kv_heads:
            return f"{tp} {_CANNOT_SHARE} {kv_heads} KV heads evenly"
        return None

    def inner_obstacle(self, intermediate_size: int, grid: Grid) -> str | None:
        """Return the reason why MoE layers of this expert size do not start with the ranks, or None.

        An assertion of vLLM's `FusedMoEConfig`; the rows of each rank are the artifact's.
        """
        if intermediate_size % grid.tp:
            return f"{grid.tp} does not divide the experts' intermediate size {intermediate_size}: use another --tp"
        return None

    def serve_command(
        self, out: str, layout: str, grid: Grid, heads: AttentionHeads = NO_HEADS
    ) -> str | None:
        """Return the command that serves an artifact, or None without one; the checkpoint layout fits any ranks."""
        if layout == KERNEL and self.heads_obstacle(grid, heads):
            return None
        options = self.serve_options(grid) if layout == KERNEL else ""
        return None if options is None else f"{self.command} {shlex.quote(out)} {options}".rstrip()

    def kernel_layout_obstacles(
        self,
        family: str,
        grid: Grid,
        heads: AttentionHeads = NO_HEADS,
        num_experts: Iterable[int] = (),
    ) -> list[str]:
        """Return reasons why the engine does not serve a kernel artifact of this model family, grid and heads.

        num_experts: of each layer, without copies; left out, what depends on it is no reason. Copies: vLLM's
        `ParallelConfig`, `FusedMoE` and `determine_expert_placement_strategy`.
        """
        reasons = []
        if grid.redundant and grid.ep == 1:
            reasons.append("it has redundant experts with expert parallelism only: use --ep")
        if grid.redundant and grid.placement != LINEAR:
            reasons.append(
                "it deals redundant experts linearly only: use --expert-placement linear"
            )
        counts = dict.fromkeys(num_experts) if grid.redundant else ()
        reasons += [
            f"{count} experts and {grid.redundant} copies are no multiple of {grid.ep} ranks: use another "
            "--redundant-experts"
            for count in counts
            if (count + grid.redundant) % grid.ep
        ]
        if grid.tp > 1 and grid.ep > 1:
            reasons.append(
                "with expert parallelism its MoE layers are not cut for tensor parallel ranks: use --tp 1"
            )
        heads_reason = self.heads_obstacle(grid, heads)
        if heads_reason is not None:
            reasons.append(
                f"{heads_reason}: use another --tp or --ep, or serve with --data-parallel-size for a part of them"
            )
        if family in self.without_kernel_layer:
            reasons.append(self.without_kernel_layer[family])
        return reasons

    def checkpoint_layout_obstacle(self, schema: LayerSchema, param_dtype: str) -> str | None:
        """Return the reason why the engine cannot serve the checkpoint layout of this schema, of any family."""
        if isinstance(schema, SchemaPair):
            return "its MoE layers have one schema for both GEMMs (TypeError)"
        if schema.has_zero_point:
            return "its weight loader has no scale_type for zero points (ValueError)"
        if schema.is_coupled:
            return "its weight loader cannot place tensor-level scales of w13 (IndexError)"
        if schema.bs_dtype in ("float8e5m2", "float8e5m3"):
            return f"it has no {schema.bs_dtype} scales (KeyError)"
        if (
            schema.bs_dtype == "float8e8m0"
            and param_dtype == "float16"
            and not schema.has_row_scale
        ):
            return "it does not widen e8m0 scales for float16: exponents outside [-14, 15] saturate"
        if schema.b_dtype == "uint1":
            return "it has no 1-bit integer type (KeyError)"
        if not schema.is_integer and not _selects_kernel(schema):
            return f"it selects no MoE kernel for {schema.describe()} (AssertionError)"
        return None

    def checkpoint_family_obstacle(
        self, family: str, layer: str, schema: WeightSchema
    ) -> str | None:
        """Return the reason why the engine cannot serve an MoE layer of this family from the checkpoint layout."""
        if family == "deepseek_v4" and schema.bs_dtype == "float8e8m0":
            return "its DeepSeek-V4 loader converts e8m0 scales as if they were integers: they come out wrong"
        if family == "deepseek" and re.search(r"\.blocks\.\d+\.", layer):
            return "it knows the layers as `model.layers`, not by the `model.blocks` of transformers 5 (KeyError)"
        return self.without_checkpoint_loader.get(family)

    def layer_pattern(self, layer: str) -> str | None:
        """Return an ignore list's pattern for the engine's name of an MoE layer, or None if that name is unknown.

        Whatever prefix the layer has: vLLM puts the modules of an MTP layer one deeper; MTP layers with numbers of
        their own it renumbers.
        """
        found = re.search(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(\w+)$", layer)
        if found is None or "mtp" in layer.split("."):
            return None
        return rf"re:(?:.*\.)?layers\.{found[1]}\.(?:.*\.)?{found[2]}$"

    def checkpoint_config(
        self, schema: LayerSchema, layer_names: Iterable[str], left: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return `quantization_config` of the checkpoint layout; experts of the layers `left` stay unquantized.

        Long field names only: vLLM reads the same flat dict as an input schema, whose aliases `dtype`, `group_size`
        and `scale_dtype` would turn on activation quantization. Fields missing in the schema stay out: vLLM knows some
        schemas only so (`_selects_kernel`). `ignore` keeps everything but the experts unquantized: after `re:` vLLM
        matches its names with `re.match`, where the experts of a layer are one module; Humming's own layers and
        compressed-tensors' converter ask for the module of each expert's projection.
        """
        documents = {gemm: _stated(schema.of(gemm)) for gemm in GEMMS}
        document = documents if isinstance(schema, SchemaPair) else documents["w13"]
        experts = sorted({re.escape(name.rsplit(".", 1)[-1]) for name in layer_names})
        plain = [pattern for name in left if (pattern := self.layer_pattern(name)) is not None]
        ignored = rf"re:(?!.*\.({'|'.join(experts)})(?:\.\d+\.\w+)?$)"
        return {"quant_method": self.quant_method, **document, "ignore": [ignored, *plain]}

    def linear_obstacle(self, schema: WeightSchema, param_dtype: str, layout: str) -> str | None:
        """Return the reason why the engine's linear layers cannot hold weights of this schema, or None."""
        if schema.rotation:
            return "the activations of attention would be rotated at every layer"
        if schema.is_coupled and layout != KERNEL:
            return (
                "its weight loader cannot place the tensor-level scale of fused layers (IndexError)"
            )
        if schema.bs_dtype == "float8e8m0" and param_dtype == "float16":
            return "it does not widen e8m0 scales for float16: exponents outside [-14, 15] saturate"
        return None

    def dense_config(
        self,
        modules: Mapping[str, Sequence[str]],
        schemas: Mapping[str, WeightSchema],
        experts: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return `quantization_config` of linear layers, for names of the source and of the engine.

        modules: layer of the engine, in the source's module → the source's modules in it. schemas: of these layers; the
        others stay unquantized. experts: the config of experts in the checkpoint layout, which the linear layers are
        added to.
        """
        common = Counter(schemas.values()).most_common(1)[0][0]
        parents = sorted({_parent(name) for name in schemas})
        names = sorted({end for name in schemas for end in (_end(name), *modules[name])})
        is_linear = rf"(?:.*\.)?(?:{'|'.join(parents)})\.(?:{'|'.join(names)})$"
        document = {"quant_method": self.quant_method, **_stated(common)}
        document["ignore"] = [rf"re:(?!{is_linear})", _OTHER_MODALITIES]
        if experts is not None:
            first, *others = experts["ignore"]
            ignored = first.replace("re:(?!", rf"re:(?!{is_linear}|")
            document = {**experts, "ignore": [ignored, _OTHER_MODALITIES, *others]}
        own: dict[str, WeightSchema] = {}
        left = []
        for name, members in modules.items():
            number = re.search(r"(?:^|\.)(\d+)\.", name)
            path = rf"layers\.{number[1]}\.(?:.*\.)?" if number else ""
            ends = "|".join(dict.fromkeys((_end(name), *members)))
            pattern = rf"(?:.*\.)?{path}{_parent(name)}\.(?:{ends})$"
            if name not in schemas:
                left.append(pattern)
            elif own.setdefault(pattern, schemas[name]) != schemas[name]:
                raise RequestError(
                    f"{self.name} has one name for two linear layers with different schemas.",
                    where="dense_layers",
                    found=name,
                    remedy="Give the layers of a draft the schema of the decoder layer with their number.",
                )
        dynamic: dict[str, Any] = {f"-:{name}": {} for name in left if name not in own}
        dynamic |= {
            f"+:{pattern}": _overriding(document, schema)
            for pattern, schema in own.items()
            if schema != common
        }
        if experts is not None:
            dynamic[f"+:{is_linear}"] = _overriding(document, common)
        return {**document, "dynamic": dynamic} if dynamic else document


def _parent(name: str) -> str:
    """Return the pattern of the engine's name of the module that a linear layer lies in."""
    return name.split(".")[-2].replace("self_attn", "(?:self_)?attn")


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _stated(schema: WeightSchema) -> dict[str, Any]:
    """Return the fields of a schema that are not at their defaults."""
    fields = schema.humming_fields().items()
    return {key: value for key, value in fields if value not in _DEFAULTS.values()}


def _overriding(document: Mapping[str, Any], schema: WeightSchema) -> dict[str, Any]:
    """Return the fields of a schema that replace those of a config, with defaults where only the config has one."""
    stated = _stated(schema)
    return {key: _DEFAULTS[key] for key in document if key in _DEFAULTS} | stated


# of a weight schema's fields
_DEFAULTS = {
    "bs_dtype": None,
    "weight_scale_group_size": 0,
    "weight_scale_group_size_n": 0,
    "weight_scale_2_type": "none",
    "has_zero_point": False,
    "is_fp_zero_point": False,
    "hadamard_block_size": 0,
}
_OTHER_MODALITIES = "re:.*(?:visual|vision|audio|_tower)"


def _selects_kernel(schema: WeightSchema) -> bool:
    """Return whether a float type is on the list of vLLM's experts classes (`_supports_quant_scheme`)."""
    kind = schema.weight_scale_type
    if schema.b_dtype in ("float4e2m1", "float4e0m3"):
        return kind in ("group", "channel")
    if schema.b_dtype not in ("float8e4m3", "float8e3m4"):  # vLLM does not tell them apart
        return False
    return {
        # Channel scales only where their dtype is left out: one that is named makes another key.
        "channel": schema.bs_dtype is None,
        "group": schema.bs_dtype == "float8e8m0" and schema.weight_scale_group_size == 32,
        "block": (schema.weight_scale_group_size_n, schema.weight_scale_group_size) == (128, 128),
    }[kind]


_SILENT = "they stay as they were allocated, and no error says so"

ENGINE = Engine(
    name="vLLM",
    release="vLLM 0.33",
    library_name="vllm",
    install_command="pip install './hqconv[vllm]'",
    command="vllm serve",
    tp_option="--tensor-parallel-size {}",
    ep_option="--enable-expert-parallel",
    copies_option="--enable-eplb --eplb-config.num_redundant_experts {}",
    placement_option="--expert-placement-strategy {}",
    placement_remark="vLLM falls back to linear where it has no round robin",
    dtype_option="--dtype {}",
    layer_remedy="Another option, such as an all-to-all backend that pads the hidden size, or a changed config.json, "
    "makes the layer differ: serve without it.",
    quant_method="humming",
    without_kernel_layer={
        "llama4": "'llama4' weighs the experts' inputs, which its Humming layers do not",
        "moondream3": "'moondream3' calls a kernel of plain weights itself, without a layer that Humming could serve",
    },
    without_checkpoint_loader={
        **dict.fromkeys(
            ("gpt_oss", "openai_privacy_filter"),
            f"its GPT-OSS loader does not read Humming's weights: {_SILENT}",
        ),
        "llama4": "Llama 4's router weights scale the experts' inputs; its Humming method scales the outputs",
        "granitemoe": "its experts are `block_sparse_moe.experts`, here `block_sparse_moe` (ValueError)",
        "granitemoe_swa": f"it knows the projections by other names than w1, w2, w3: {_SILENT}",
        "dbrx": "its experts are `ffn`, here `ffn.experts.mlp` (KeyError)",
        "step3": "its experts are `moe.experts`, here `moe`",
        "moondream3": "its Moondream3 reads stacks of plain weights only",
        "aria": f"it takes each gate and up for both, in halves: rows of w13 are wrong, {_SILENT}",
        "inkling": "its loader reads stacks of all experts only (AttributeError)",
        "inkling2": "its loader reads stacks of all experts only (AttributeError)",
    },
)
