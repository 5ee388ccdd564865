"""Names in an artifact on disk: folders, files, the manifest's keys; config.json's language model and our entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from hqconv.schemas.input_schema import A16, STATIC_SCALES, InputSchema, LayerSpec

FORMAT_VERSION = 1
MIXED_VERSION = 2  # of an artifact with layers, or GEMMs of a layer, that differ, or layers that are copied unchanged
MANIFEST = "hqconv.json"
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERTS_FOLDER = "experts"
G_IDX = "g_idx"  # a layer's `intermediate_order`
JOURNAL = ".hqconv-progress.jsonl"  # only while a conversion is unfinished
_PART_JOURNAL = re.compile(r"\.hqconv-progress\.part([1-9][0-9]*)-of-([1-9][0-9]*)\.jsonl")
PARTIAL = ".partial"  # suffix of a file that is being written
CARD = "README.md"  # the model card: written by a conversion, and people may edit it
SUMS = "SHA256SUMS"  # of all files but itself, the manifest included: so no manifest lists it
# the last evaluation; it names the digest of the manifest that it is of
EVALUATION = "evaluation.json"
# predictions that a server is compared with; it names the same digest
REFERENCE = "reference.safetensors"
# Companion files that may lie in an artifact's folder: of a Hub repo, and files that people add when they publish.
COMPANIONS = (".gitattributes", ".git", ".cache", CARD, SUMS, EVALUATION, REFERENCE)
# The only weights file for transformers, as config.json names it; no artifact has a file of this name.
TRANSFORMERS_WEIGHTS = "transformers_weights"
NOT_FOR_TRANSFORMERS = "serve-with-vllm-and-hqconv.safetensors"
_OF_SOURCE = "source_transformers_weights"
# Multimodal configs keep the language model's values under one of these, maybe under two.
_LANGUAGE_MODELS = ("thinker_config", "text_config", "language_config", "llm_config")
TEXT_CONFIG_KEYS = (*_LANGUAGE_MODELS, "ffn_config")  # the latter of dbrx's experts
Config = Mapping[str, object]  # a parsed config.json
Layout = Literal["kernel", "checkpoint"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
KERNEL, CHECKPOINT = LAYOUTS
GEMMS = ("w13", "w2")
GEMM_OF = {"w1": "w13", "w3": "w13", "w2": "w2"}  # of a projection
PROJECTIONS = {"w1": "gate (w1)", "w3": "up (w3)", "w2": "down (w2)"}  # as people read them
# In a source's quantization config: the config of the linear layers that hqconv has quantized.
DENSE_CONFIG = "dense_quantization_config"
INPUT_SCALE = "input_scale"
_MAX_NAME = 200  # with the rest of a file name under the 255 bytes of most file systems


def text_config(config: Config) -> Config:
    """Return the language model's values: a nested text config, where there is one, over the outer config."""
    while True:
        key = next((key for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), Mapping)), None)
        if key is None:
            return config
        nested = config[key]
        assert isinstance(nested, Mapping)
        config = {**{k: v for k, v in config.items() if k != key}, **nested}


def rank_name(tp_rank: int, ep_rank: int) -> str:
    """Return one rank's name: of its folder, and in the metadata of its files."""
    return f"tp{tp_rank}-ep{ep_rank}"


def rank_folder(tp_rank: int, ep_rank: int) -> str:
    """Return the folder of one rank's expert files, relative to the artifact."""
    return f"{EXPERTS_FOLDER}/{rank_name(tp_rank, ep_rank)}"


def part_journal(number: int, count: int) -> str:
    """Return the journal of one part of a conversion (`--part number/count`)."""
    return f".hqconv-progress.part{number}-of-{count}.jsonl"


def journal_part(name: str) -> str:
    """Return the part, such as 2/4, whose journal has this file name; "" for any other file."""
    match = _PART_JOURNAL.fullmatch(name)
    return f"{match[1]}/{match[2]}" if match else ""


def rank_file(layer: str, tp_rank: int, ep_rank: int) -> str:
    """Return one rank's file of one MoE layer."""
    return f"{rank_folder(tp_rank, ep_rank)}/{layer}.safetensors"


def input_scale(layer: str, gemm: str, inputs: InputSchema) -> str:
    """Return the tensor of a rank file for a GEMM's static activation scale: float32 [1], for all experts."""
    return f"{layer}.{gemm}_{inputs.static_scale}"


def is_input_scale(name: str) -> bool:
    """Return whether a rank file's tensor is a static activation scale, the only tensor without an expert dimension."""
    return name.endswith(tuple(f"_{scale}" for scale in STATIC_SCALES.values()))


def is_layer_name(name: str) -> bool:
    """Return whether a layer's name can be part of a file name: parts joined by dots, no path."""
    return (
        len(name) <= _MAX_NAME
        and re.fullmatch(r"\w[\w-]*(?:\.\w[\w-]*)*", name, re.ASCII) is not None
    )


def shard_name(index: int, total: int) -> str:
    """Return the name of the index-th (from 1) of `total` ordinary model shards."""
    if total == 1:
        return SINGLE
    return f"model-{index:05d}-of-{total:05d}.safetensors"


def kernel_spec_to_dict(kernel_spec: LayerSpec) -> dict[str, Any]:
    """Return weights, activations and GPU as in config.json and a manifest's layers, without the dtype.

    `activation_schema` is present where activations are quantized, `cuda` where the layout depends on it.
    """
    document = {
        "weight_schema": kernel_spec.schema.to_dict(),
        "input_schema": kernel_spec.inputs.name,
        "target": kernel_spec.target.name,
    }
    if kernel_spec.inputs != A16:
        document["activation_schema"] = kernel_spec.inputs.humming_fields()
    if kernel_spec.target.cuda_name is not None:
        document["cuda"] = kernel_spec.target.cuda_name
    return document


def hqconv_quantization_config(
    kernel_spec: LayerSpec, source: Mapping[str, Any] | None, *, is_mixed: bool
) -> dict[str, Any]:
    """Return `quantization_config` of the kernel layout, which only a loader that knows the artifact reads.

    `source`: the source's own, still valid for the copied tensors (attention, shared experts …). is_mixed:
    `kernel_spec` does not hold for every layer, or is of GEMMs that differ.
    """
    dense = {} if source is None else {"source_quantization_config": _dense_config(source)}
    return {
        "quant_method": "hqconv",
        "format_version": MIXED_VERSION if is_mixed else FORMAT_VERSION,
        "manifest": MANIFEST,
        **kernel_spec_to_dict(kernel_spec),
        **dense,
    }


def split_dense(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a source's quantization config, and the one at DENSE_CONFIG in it, if there is one."""
    source = dict(config)
    dense = source.pop(DENSE_CONFIG, None)
    return source, dense


def _dense_config(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source's quantization config for the layers beside the experts; Humming's as engines read it.

    GSQ's converter writes a key for every expert's matrix, which the engine would try on each layer, formats under "-",
    no flat keys, and in forks patterns without "re:" (see formats/humming.py).
    """
    config = dict(source)
    if config.get("quant_method") != "humming":
        return config
    dynamic = config.get("dynamic")
    groups = config.get("config_groups")
    if isinstance(dynamic, Mapping):
        config["dynamic"] = {
            "+" + key[1:] if key.startswith("-") and _has_format(fmt) else key: fmt
            for key, fmt in dynamic.items()
            if r"\.experts\." not in key
        }
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or not _has_format(weights) or _has_format(config):
            continue
        for field, keys in _FLAT.items():
            values = [weights[key] for key in keys if key in weights]
            if values:
                config[field] = values[0]
    if isinstance(ignore := config.get("ignore"), list):
        config["ignore"] = [
            f"re:{name}" if ".*" in str(name) and not str(name).startswith("re:") else name
            for name in ignore
        ]
    return config


# Keys of Humming by long names, and by those of GSQ: the engine reads the short ones as a format of activations too.
_FLAT = {
    "b_dtype": ("b_dtype", "dtype"),
    "weight_scale_group_size": ("weight_scale_group_size", "group_size"),
    "has_zero_point": ("has_zero_point",),
    "is_fp_zero_point": ("is_fp_zero_point",),
}


def _has_format(fields: Any) -> bool:
    """Return True for an object with a code type under any of Humming's names."""
    names = {"b_dtype", "weight_dtype", "dtype"}
    return isinstance(fields, Mapping) and not names.isdisjoint(fields)


def refuse_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the kernel layout: from_pretrained raises OSError, which names NOT_FOR_TRANSFORMERS.

    Otherwise it would warn of an unknown quant_method and leave the experts random. A value of the source's own is
    kept beside it.
    """
    models = _models(config)
    for document in models:
        if TRANSFORMERS_WEIGHTS in document:
            document[_OF_SOURCE] = document[TRANSFORMERS_WEIGHTS]
        document[TRANSFORMERS_WEIGHTS] = NOT_FOR_TRANSFORMERS
    return models[0]


def admit_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `refuse_transformers`; return any other config unchanged."""
    models = _models(config)
    for document in models:
        if document.get(TRANSFORMERS_WEIGHTS) != NOT_FOR_TRANSFORMERS:
            continue
        if _OF_SOURCE in document:
            document[TRANSFORMERS_WEIGHTS] = document.pop(_OF_SOURCE)
        else:
            del document[TRANSFORMERS_WEIGHTS]
    return models[0]


def _models(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a copy of a config, and the configs of language models inside that copy.

    transformers loads these by themselves too. Vision and audio towers have no experts, and load as before.
    """
    models = [dict(config)]
    for document in models:  # grows on the way
        for key in _LANGUAGE_MODELS:
            if isinstance(document.get(key), Mapping):
                document[key] = dict(document[key])
                models.append(document[key])
    return models
