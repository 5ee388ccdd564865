"""Quantization configs as publishers write them: formats, exceptions per module, and refusals by key."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.formats.config_reader import ConfigReader
from hqconv.formats.quant_config import DeclaredFormats, declared_formats
from hqconv.formats.source_format import ANY, PLAIN, SourceFormat

EXPERT = "model.layers.3.mlp.experts.7.gate_proj"
STACK = "model.layers.3.mlp.experts.gate_up_proj"
SHARED = "model.layers.3.mlp.shared_experts.gate_proj"
ATTENTION = "model.layers.3.self_attn.q_proj"
ROUTER = "model.layers.3.mlp.gate"
Json = dict[str, Any]


def declared(words: Json | None, **text: Any) -> DeclaredFormats:
    """What a config declares; it must come through JSON unchanged and be left as it was."""
    before = copy.deepcopy(words)
    found = declared_formats(words, text)
    assert words == before
    json.dumps([found.of(EXPERT).to_dict()])
    return found


def compressed(weights: Json, storage: str = "pack-quantized", **more: Any) -> Json:
    """A compressed-tensors config with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def weights(bits: int, kind: str, strategy: str, **more: Any) -> Json:
    """A compressed-tensors scheme for weights."""
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "group_size": None,
        **more,
    }


DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V4 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
KIMI_K2_THINKING = compressed(
    weights(4, "int", "group", group_size=32),
    ignore=[
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    kv_cache_scheme=None,
)
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "model_file_base_name": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": ["gate"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
AUTO_ROUND = {
    "autoround_version": "0.5.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {},
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
QUARK_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "scale_format": "e8m0",
    "symmetric": None,
    "is_dynamic": False,
    "round_method": "half_even",
}


def quark(weight: Any, **more: Any) -> Json:
    """A Quark config with one scheme for all layers."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {
            "kv_cache_group": [],
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
        **more,
    }


def modelopt(algorithm: str | None, **more: Any) -> Json:
    """modelopt's flat form."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


MODELOPT_GROUPS = {
    "group_0": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["Linear"],
    }
}
BITNET = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "_load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "llm_int8_skip_modules": ["lm_head", "mlp.gate"],
}


def block_fp8(name: str, **more: Any) -> SourceFormat:
    return SourceFormat(name, "fp8", "float8e4m3", "", 128, 128, **more)


def packed(bits: int, columns: int, **more: Any) -> SourceFormat:
    name = f"compressed-tensors pack-quantized int{bits}"
    return SourceFormat(name, "packed_int", f"uint{bits}", group_k=columns, **more)


def gptq(
    name: str, bits: int, columns: int, offset: int = 1, order: bool = False, **more: Any
) -> SourceFormat:
    options = (("zero_offset", offset), ("desc_act", order))
    return SourceFormat(name, "gptq", f"uint{bits}", group_k=columns, options=options, **more)


UE8M0 = (("scale_fmt", "ue8m0"),)
OFFSET = (("has_offset", True),)
MXFP4 = ("float4e2m1", "float8e8m0", 1, 32)
MIMO = {
    **DEEPSEEK_V3,
    "store_dtype": "mxfp4",
    "mxfp4_block_size": 32,
    "routed_experts_quant_method": "mxfp4",
    "ignored_layers": ["model.layers.0.self_attn.o_proj"],
}
MINIMAX_MXFP8 = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
    "ignored_layers": ["lm_head", "model.layers.3.mlp.gate"],
}
FLOAT_TENSOR = weights(8, "float", "tensor")
NVFP4 = ("float4e2m1", "float8e4m3", 1, 16, False, "tensor")
# What tests.make.formats has no checkpoint of.
FORMATS: dict[str, tuple[Json, SourceFormat]] = {
    "fp8 per tensor or channel": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        SourceFormat("fp8", "fp8", "", "", ANY, ANY),
    ),
    "fp8 in torch's words (MiniMax-M2)": (
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
        SourceFormat("fp8", "fp8", "float8e4m3", "", 128, 128),
    ),
    "kimi_k2": (KIMI_K2_THINKING, packed(4, 32)),
    "packed, order undone": (
        compressed(weights(3, "int", "group", group_size=64, actorder="static")),
        packed(3, 64),
    ),
    "packed, no strategy": (
        compressed({"num_bits": 4, "type": "int", "group_size": -1}),
        packed(4, 0),
    ),
    "int-quantized, 4 of 8 bits": (
        compressed(weights(4, "int", "group", group_size=32), "int-quantized"),
        SourceFormat("compressed-tensors int-quantized int4", "int8", "uint8", group_k=32),
    ),
    "float-quantized channel, frozen": (
        compressed(weights(8, "float", "channel"), "float-quantized", quantization_status="frozen"),
        SourceFormat("compressed-tensors float-quantized fp8", "fp8", "float8e4m3", "", 1, 0),
    ),
    "dense": (compressed(FLOAT_TENSOR, "dense"), PLAIN),
    "decompressed": (compressed(FLOAT_TENSOR, quantization_status="decompressed"), PLAIN),
    "gptq, ordered in one group": (
        {**GPTQ, "desc_act": True, "group_size": -1},
        gptq("gptq int4", 4, 0, order=True),
    ),
    "mxfp4 experts in fp8, by the dtype alone": (
        {**DEEPSEEK_V3, "store_dtype": "mxfp4"},
        SourceFormat("mxfp4", "mxfp4", *MXFP4),
    ),
    "mxfp4 experts in fp8, by the method alone (Ling-3.0)": (
        {**DEEPSEEK_V3, "routed_experts_quant_method": "mxfp4"},
        SourceFormat("mxfp4", "mxfp4", *MXFP4),
    ),
    "ascend, by a description": (
        {
            "quant_method": "ascend",
            "modules": {"model.layers.*.mlp.experts.*.gate_proj": "W8A8_DYNAMIC"},
        },
        SourceFormat("ascend w8a8_dynamic", "int8", "uint8", "", 1, 0, options=OFFSET),
    ),
    "awq, old names, symmetric": (
        {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": 64,
            "zero_point": False,
            "version": "GEMM",
        },
        SourceFormat("awq int4", "awq", "uint4", group_k=64),
    ),
    "awq, symmetric by gptqmodel's name": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "checkpoint_format": "gemm",
        },
        SourceFormat("awq int4", "awq", "uint4", group_k=32),
    ),
    "auto-round, zeros as they are": (
        {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel", "sym": False},
        gptq("auto-round (gptq packing) int4", 4, 128, offset=0, has_zero_point=True),
    ),
    "auto-round, own packing": (
        {
            **AUTO_ROUND,
            "quant_method": "intel/auto-round",
            "packing_format": "auto_round",
            "bits": 2,
        },
        gptq("auto-round (gptq packing) int2", 2, 128, offset=0),
    ),
    "modelopt nvfp4, groups": (
        modelopt("nvfp4", config_groups=MODELOPT_GROUPS),
        SourceFormat("modelopt nvfp4", "nvfp4", *NVFP4),
    ),
    "modelopt fp8 channel": (
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        SourceFormat("modelopt fp8", "fp8", "float8e4m3", "", 1, 0),
    ),
    "modelopt, cache only": (modelopt(None, kv_cache_quant_algo="FP8"), PLAIN),
    "bitnet, auto": (
        {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "offline"},
        SourceFormat(
            "bitnet", "bitnet", "float2e0m1", "", 0, 0, options=(("scale_inverted", False),)
        ),
    ),
    "quark, unquantized weights": (quark(None), PLAIN),
    "quark, fake": (quark(QUARK_MXFP4, export={"weight_format": "fake_quantized"}), PLAIN),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_config_gives_its_experts_this_format(name: str) -> None:
    words, expected = FORMATS[name]
    found = declared(words)
    assert found.of(EXPERT) == expected
    assert found.of(EXPERT).is_float == (expected is PLAIN)


def test_no_config_declares_plain_floats() -> None:
    found = declared(None)
    assert (found.method, found.of(EXPERT)) == ("none", PLAIN)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ({**AUTO_ROUND, "quant_method": "intel/auto-round"}, "auto-round"),
        ({"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({**GPTQ, "quant_method": "GPTQ"}, "gptq"),
    ],
)
def test_a_method_has_one_name(words: Json, method: str) -> None:
    assert declared(words).method == method


# --- Exceptions per module


def plain_and_not(words: Json, plain: tuple[str, ...], coded: tuple[str, ...], **text: Any) -> None:
    found = declared(words, **text)
    assert {name: found.of(name).is_float for name in plain + coded} == {
        **dict.fromkeys(plain, True),
        **dict.fromkeys(coded, False),
    }


LEFT_OUT: dict[str, tuple[Json, tuple[str, ...], tuple[str, ...]]] = {
    "gpt_oss": (GPT_OSS, (ATTENTION, "lm_head", "model.layers.3.mlp.router"), (STACK,)),
    "fp8, other key": (
        {**DEEPSEEK_V3, "modules_to_not_convert": [], "ignored_layers": ["gate", "lm_head"]},
        ("model.layers.3.block_sparse_moe.gate",),
        ("model.layers.3.block_sparse_moe.experts.0.w1", EXPERT),
    ),
    "awq, a component": (
        AWQ,
        (ROUTER, f"{ROUTER}.linear"),
        (EXPERT, EXPERT.replace("gate", "down"), SHARED, ATTENTION, f"{ROUTER}s"),
    ),
    "awq, components": (
        {**AWQ, "modules_to_not_convert": ["mlp.gate.", "layers.3.self_attn", ""]},
        (ROUTER, ATTENTION),
        (EXPERT, ATTENTION.replace(".3.", ".33."), "model.layers.3.mlp"),
    ),
    "mxfp8 of MiniMax": (
        {**MINIMAX_MXFP8, "ignored_layers": ["lm_head", "vision_tower", ROUTER, "*.mtp.*"]},
        (
            ROUTER,
            "language_model.lm_head",
            "model.vision_tower.layers.3.fc1",
            "model.mtp.layers.0.w1",
        ),
        (EXPERT, ATTENTION, f"{ROUTER}_up", "lm_heads"),
    ),
    "bitsandbytes": (NF4, (ROUTER, "lm_head"), (EXPERT,)),
    "modelopt globs": (
        modelopt(
            "NVFP4", ignore=["model.layers.3.self_attn*", "model.layers.1.mlp.experts", "mtp*"]
        ),
        (ATTENTION, "model.layers.1.mlp.experts", "mtp.layers.0.mlp.experts.0.up_proj"),
        (
            EXPERT,
            "model.layers.1.mlp.experts.0.up_proj",
            "model.layers.13.mlp.experts.0.up_proj",
            SHARED,
        ),
    ),
    "quark, names and patterns": (
        quark(QUARK_MXFP4, exclude=["*self_attn*", ROUTER, "re:.*shared_experts"]),
        (ATTENTION, ROUTER, SHARED),
        (EXPERT, f"{ROUTER}.below", f"{ROUTER}_proj"),
    ),
    "auto-round blocks": (AUTO_ROUND, ("lm_head", "mtp.layers.0.mlp.experts.0.up_proj"), (EXPERT,)),
    "gptq, listed parts only": (
        {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts"]]},
        (SHARED, ROUTER),
        (EXPERT, ATTENTION),
    ),
    "compressed-tensors, a class": (
        compressed(FLOAT_TENSOR, "float-quantized", ignore=["Linear"]),
        (EXPERT, ATTENTION),
        (),
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_modules_that_a_config_leaves_out_are_plain(name: str) -> None:
    plain_and_not(*LEFT_OUT[name])


@pytest.mark.parametrize("holder", ["model", "quantization_config"])
def test_deepseek_v4_routed_experts_are_fp4_among_fp8(holder: str) -> None:
    words, text = DEEPSEEK_V4, {"expert_dtype": "fp4"}
    if holder == "quantization_config":
        words, text = {**DEEPSEEK_V4, **text}, {"expert_dtype": "fp8"}
    found = declared(words, **text)
    for routed in ("layers.0.ffn.experts.0.w1", "mtp.0.ffn.experts.255.w2", "layers.0.ffn.experts"):
        assert (found.of(routed).encoding, found.of(routed).group_k) == ("mxfp4", 32)
    for dense in ("layers.0.ffn.shared_experts.w1", "layers.0.attn.wq_a"):
        assert (found.of(dense).encoding, found.of(dense).scale_dtype) == ("fp8", "float8e8m0")


def test_deepseek_v4_fp8_experts_follow_the_blocks() -> None:
    found = declared(DEEPSEEK_V4, expert_dtype="fp8").of("layers.0.ffn.experts.0.w1")
    assert (found.encoding, found.group_n, found.group_k) == ("fp8", 128, 128)


def test_deepseek_v4_experts_requantized_to_nvfp4() -> None:
    found = declared({**DEEPSEEK_V4, "moe_quant_algo": "NVFP4"}, expert_dtype="fp4")
    assert found.of("layers.0.ffn.experts.0.w1").encoding == "nvfp4"
    assert found.of("layers.0.ffn.shared_experts.w1").encoding == "fp8"


def test_dense_layers_around_routed_experts_in_mxfp4_are_fp8() -> None:
    found = declared({**MIMO, "ignored_layers": [ATTENTION]})
    for dense in (SHARED, "model.layers.0.mlp.gate_proj"):
        assert found.of(dense) == block_fp8("fp8")
    assert found.of(ATTENTION) is PLAIN


@pytest.mark.parametrize(
    ("more", "encoding"),
    [
        ({"store_dtype": "fp8"}, "fp8"),  # MiMo-V2.5
        ({"store_dtype": "mxfp4", "expert_dtype": "fp4"}, "mxfp4"),
        ({"store_dtype": "MXFP4", "routed_experts_quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_keys_for_routed_experts(more: dict[str, Any], encoding: str) -> None:
    assert declared({**DEEPSEEK_V3, **more}).of(EXPERT).encoding == encoding


PARENTS = [
    "model.layers.3.mlp.experts.7",
    "model.layers.3.mlp.experts",
    "model.layers.3.mlp",
    "model.layers.3",
]


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize(
    "words",
    [
        lambda parent: compressed(FLOAT_TENSOR, "float-quantized", ignore=[parent]),
        lambda parent: compressed(FLOAT_TENSOR, "float-quantized", ignore=[f"re:.*{parent}$"]),
        lambda parent: modelopt("NVFP4", ignore=[parent]),
        lambda parent: {
            "quantization": {"quant_algo": "FP8", "exclude_modules": [parent.replace(".3", ".?")]}
        },
        lambda parent: quark(QUARK_MXFP4, exclude=[parent]),
    ],
)
def test_a_parent_that_is_left_out_is_decided_by_the_tensors(
    words: Callable[[str], Json], parent: str
) -> None:
    """Tools compare a module's own name; a server's module of all experts is a parent of each."""
    found = declared(words(parent))
    assert not found.of(EXPERT).is_float
    assert found.of(EXPERT, is_stored_plain=True) is PLAIN
    assert not found.of(EXPERT.replace(".3.", ".33."), is_stored_plain=True).is_float


@pytest.mark.parametrize("module", [EXPERT, SHARED])
def test_an_awq_entry_within_a_word_is_decided_by_the_tensors(module: str) -> None:
    """AutoAWQ leaves gate_proj out for "gate", other tools and vLLM's fused experts do not."""
    found = declared(AWQ)
    assert found.of(module).encoding == "awq"
    assert found.of(module, is_stored_plain=True) is PLAIN
    other = module.replace("gate", "down")  # no entry speaks of it, whatever its tensors are
    assert found.of(other, is_stored_plain=True).encoding == "awq"
    assert declared(DEEPSEEK_V3).of(module, is_stored_plain=True).encoding == "fp8"


@pytest.mark.parametrize(
    "more",
    [
        {"ignore": ["*.attn.*", "mtp.*"]},
        {"exclude_modules": ["mtp.*"]},
        {"quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}},
    ],
)
def test_deepseek_v4_experts_that_modelopt_left_out_are_as_they_were(more: dict[str, Any]) -> None:
    found = declared({**DEEPSEEK_V4, "moe_quant_algo": "NVFP4", **more}, expert_dtype="fp4")
    assert found.of("layers.0.ffn.experts.0.w1").encoding == "nvfp4"
    assert found.of("mtp.0.ffn.experts.0.w1").encoding == "mxfp4"
    assert found.of("mtp.0.ffn.shared_experts.w1").encoding == "fp8"
    as_fp8 = declared({**DEEPSEEK_V4, "moe_quant_algo": "NVFP4", **more}, expert_dtype="fp8")
    assert as_fp8.of("mtp.0.ffn.experts.0.w1").encoding == "fp8"


def test_gptq_dynamic_rules_apply_in_order_from_the_start_of_names() -> None:
    dynamic = {
        "-:.*\\.self_attn\\.": {},
        "+:model\\.layers\\.3\\.": {"bits": 8, "group_size": 32},
        ".*layers\\.[34]\\.": {"desc_act": True, "sym": False},
        "experts": {"bits": 2},
    }
    found = declared({**GPTQ, "dynamic": dynamic})
    assert found.of(ATTENTION) is PLAIN
    assert found.of(EXPERT) == gptq("gptq int8", 8, 32)
    fourth = found.of(EXPERT.replace(".3.", ".4."))
    assert fourth == gptq("gptq int4", 4, 128, order=True, has_zero_point=True, is_permuted=True)
    assert found.of(EXPERT.replace(".3.", ".5.")) == gptq("gptq int4", 4, 128)


def test_auto_round_names_go_before_regexes_and_may_be_endings() -> None:
    extra = {
        r".*layers\.3\..*": {"bits": 8},
        EXPERT: {"bits": 2, "group_size": -1, "sym": False},
        "shared_experts.gate_proj": {"bits": 16, "data_type": "float"},
        "lm_head": {"bits": 4},
    }
    found = declared({**AUTO_ROUND, "extra_config": extra})
    assert found.of(EXPERT) == gptq("auto-round (gptq packing) int2", 2, 0, has_zero_point=True)
    assert found.of(SHARED) is PLAIN
    assert found.of(f"model.{STACK}").b_dtype == "uint8"
    assert found.of(EXPERT.replace(".3.", ".5.")).b_dtype == "uint4"
    assert found.of("lm_head").b_dtype == "uint4", "a name counts outside of the blocks too"


def test_modelopt_mixed_precision_goes_by_module() -> None:
    layers = {
        ATTENTION: {"quant_algo": "FP8"},
        EXPERT: {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.4.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 64},
        SHARED: {"quant_algo": "MXFP8"},
    }
    found = declared(
        modelopt("MIXED_PRECISION", quantized_layers=layers, ignore=["*shared_experts*"])
    )
    assert found.of(ATTENTION).encoding == "fp8"
    assert found.of(EXPERT).encoding == "nvfp4"
    assert found.of("model.layers.4.mlp.experts.gate_up_proj").group_n == 64
    assert found.of(SHARED) is PLAIN
    assert found.of("model.layers.40.mlp.experts.gate_up_proj") is PLAIN


def test_compressed_tensors_groups_have_their_own_formats_and_targets() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": FLOAT_TENSOR, "format": "float-quantized"},
        "group_1": {
            "targets": ["re:.*experts\\.\\d+\\.", "re:.*absent"],
            "weights": weights(4, "float", "tensor_group", group_size=16),
            "format": "nvfp4-pack-quantized",
        },
        "group_2": {
            "targets": [EXPERT],
            "weights": weights(8, "int", "channel"),
            "format": "int-quantized",
        },
        "group_3": {
            "targets": ["Qwen3Attention"],
            "weights": None,
            "output_activations": FLOAT_TENSOR,
        },
    }
    words = compressed({}, "mixed-precision", config_groups=groups)
    found = declared(words)
    assert found.of(EXPERT).encoding == "int8"
    assert found.of(EXPERT.replace("gate", "up")).encoding == "nvfp4"
    assert found.of(ATTENTION).encoding == "fp8"
    del groups["group_0"]
    assert declared(words).of(ATTENTION) is PLAIN, "no target names it"


HUMMING = {
    "quant_method": "humming",
    "b_dtype": "uint4",
    "weight_scale_type": "group",
    "weight_scale_group_size": 128,
    "has_zero_point": True,
    "ignore": ["lm_head", "self_attn", "re:.*\\.5\\.mlp\\.experts$"],
    "dynamic": {
        "+:.*layers\\.4\\.mlp\\.experts": {"b_dtype": "int8", "has_zero_point": False},
        "-:.*layers\\.6\\.mlp": {},
        "-:layers\\.7\\.mlp": {},
        ".*": {"b_dtype": "int2"},
    },
}


def test_humming_reads_its_fields_and_exceptions() -> None:
    """Asked with modules as vLLM has them: the experts of a block are one."""
    found = declared(HUMMING)
    form = found.of("model.layers.3.mlp.experts")
    assert (form.name, form.encoding, form.b_dtype) == ("humming uint4", "humming", "uint4")
    assert (form.scale_dtype, form.group_n, form.group_k, form.has_zero_point) == ("", 1, 128, True)
    assert dict(form.options)["weight_scale_type"] == "group"
    assert found.of(ATTENTION) is PLAIN
    assert found.of("model.layers.5.mlp.experts") is PLAIN
    assert found.of("model.layers.4.mlp.experts").b_dtype == "uint8"
    assert found.of("model.layers.6.mlp.experts") is PLAIN
    assert (
        found.of("model.layers.7.mlp.experts").b_dtype == "uint4"
    )  # from the start of the name only


def test_hummings_rules_decide_for_whole_blocks() -> None:
    """A pattern that names one expert's module leaves the block as it is."""
    for words in ({"ignore": ["re:.*experts\\.9\\."]}, {"dynamic": {"-:.*\\.experts\\.9\\.": {}}}):
        found = declared({**HUMMING, **words})
        assert found.of("model.layers.3.mlp.experts").b_dtype == "uint4"


HUMMING_FORMATS: list[tuple[Json, tuple[Any, ...]]] = [
    ({"dtype": "float8e4m3"}, ("float8e4m3", "", 1, 0, "none")),
    (
        {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128, "bs_dtype": "float32"},
        ("float8e4m3", "float32", 128, 128, "none"),
    ),
    ({"b_dtype": "float8e4m3", "scale_type": "tensor"}, ("float8e4m3", "float32", 0, 0, "none")),
    (
        {
            "b_dtype": "float4e2m1",
            "scale_dtype": "float8e4m3",
            "group_size": 16,
            "scale_2_type": "tensor",
        },
        ("float4e2m1", "float8e4m3", 1, 16, "tensor"),
    ),
    ({"weight_dtype": "int3", "b_dtype": "uint6", "group_size": 64}, ("uint6", "", 1, 64, "none")),
]


@pytest.mark.parametrize(("fields", "expected"), HUMMING_FORMATS)
def test_humming_names_and_implied_scale_types_are_hummings(
    fields: Json, expected: tuple[Any, ...]
) -> None:
    schema_class = pytest.importorskip("humming.schema").HummingWeightSchema
    form = declared({"quant_method": "humming", **fields}).of(EXPERT)
    assert (form.b_dtype, form.scale_dtype, form.group_n, form.group_k, form.scale_2) == expected
    schema = schema_class.from_config({"quant_method": "humming", **fields})
    options = dict(form.options)
    assert str(schema.b_dtype) == form.b_dtype
    assert schema.weight_scale_type.value == options["weight_scale_type"]
    assert schema.weight_scale_2_type.value == options["weight_scale_2_type"]
    assert schema.weight_scale_group_size == options["weight_scale_group_size"]


# --- Quark: judged by Humming's reading of the same words


def fp8_scales(**more: Any) -> Json:
    return {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True, **more}


QUARK_FORMATS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # name, b_dtype, scale dtype, rows, columns, zero point, second scale
    "mxfp4": (QUARK_MXFP4, ("quark mxfp4", "float4e2m1", "float8e8m0", 1, 32, False, "none")),
    "mxfp6": (
        [{**QUARK_MXFP4, "dtype": "fp6_e3m2"}],
        ("quark mxfp6_e3m2", "float6e3m2", "float8e8m0", 1, 32, False, "none"),
    ),
    "embedded mx": (
        {"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32, "ch_axis": -1},
        ("quark mxfp4", "float4e2m1", "float8e8m0", 1, 32, False, "none"),
    ),
    "fp8 tensor": (
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True},
        ("quark fp8_e4m3", "float8e4m3", "", 0, 0, False, "none"),
    ),
    "fp8 channel": (
        {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "group_size": None},
        ("quark fp8_e4m3", "float8e4m3", "", 1, 0, False, "none"),
    ),
    "fp8 block": (
        {"dtype": "fp8_e5m2", "qscheme": "per_block", "block_size": [128, 64]},
        ("quark fp8_e5m2", "float8e5m2", "", 128, 64, False, "none"),
    ),
    "int4": (
        {
            "dtype": "int4",
            "qscheme": "per_group",
            "group_size": 128,
            "ch_axis": 1,
            "symmetric": True,
        },
        ("quark int4", "uint4", "", 1, 128, False, "none"),
    ),
    "uint4": (
        {
            "dtype": "uint4",
            "qscheme": "per_group",
            "group_size": 32,
            "ch_axis": 1,
            "symmetric": False,
        },
        ("quark uint4", "uint4", "", 1, 32, True, "none"),
    ),
    "nvfp4": (
        [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1}, fp8_scales()],
        ("quark fp4", "float4e2m1", "float8e4m3", 1, 16, False, "tensor"),
    ),
    "int4 of fp8": (
        [
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True},
        ],
        ("quark int4", "uint4", "", 1, 0, False, "tensor"),
    ),
}


@pytest.mark.parametrize("name", QUARK_FORMATS)
def test_quark_reads_as_humming_does(name: str) -> None:
    weight, expected = QUARK_FORMATS[name]
    form = declared(quark(weight)).of(EXPERT)
    assert form.encoding == "quark"
    assert expected == (
        form.name,
        form.b_dtype,
        form.scale_dtype,
        form.group_n,
        form.group_k,
        form.has_zero_point,
        form.scale_2,
    )
    theirs = pytest.importorskip("humming.schema.quark")
    schema = theirs.QuarkWeightSchema.from_config(theirs.parse_quark_tensor_config(weight))
    assert form.option("dtype") == schema.dtype
    assert form.option("pack_method") == schema.pack_method
    assert form.option("is_transposed", False) == (
        schema.qscheme == "per_group" and "int" in schema.dtype and schema.dtype != "int3"
    )
    assert (form.group_k if schema.qscheme == "per_group" else 0) == schema.group_size
    assert (schema.scale_stage == 0) == (form.option("scale_name") == "weight_scale_2")
    assert (str(schema.weight_dtype), schema.has_zero_point) == (form.b_dtype, form.has_zero_point)


def test_quark_blocks_with_power_of_two_scales() -> None:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32]}
    form = declared(quark({**weight, "scale_type": "float8_e8m0fnu"})).of(EXPERT)
    assert form.scale_dtype == "float8e8m0"


def test_quark_layers_go_before_classes_before_the_rest() -> None:
    channel = QUARK_FORMATS["fp8 channel"][0]
    tensor = QUARK_FORMATS["fp8 tensor"][0]
    int4 = QUARK_FORMATS["int4"][0]
    layers = {"*experts*": {"weight": channel}, EXPERT: {"weight": int4}, SHARED: {"weight": None}}
    words = quark(QUARK_MXFP4, layer_quant_config=layers, export={"pack_method": "order"})
    found = declared(words)
    assert found.of(EXPERT).option("pack_method") == "order"
    assert found.of(EXPERT).b_dtype == "uint4", "an exact name goes first"
    assert found.of(EXPERT.replace("gate", "up")).name == "quark fp8_e4m3"
    assert found.of(ATTENTION).name == "quark mxfp4"
    words["layer_type_quant_config"] = {"Conv2d": {"weight": int4}, "Linear": {"weight": tensor}}
    assert declared(words).of(ATTENTION).group_n == 0
    del layers["*experts*"]
    assert declared(words).of(SHARED) is PLAIN


# --- Matching, judged by the publishers' own functions

NAMES = (
    EXPERT,
    EXPERT.replace("gate", "down"),
    EXPERT.replace(".3.", ".33."),
    SHARED,
    ROUTER,
    ATTENTION,
    "lm_head",
    f"model.language_model.{EXPERT}",
    "model.layers.1.mlp.gate_proj",
)


@pytest.mark.parametrize(
    "ignore",
    [
        [],
        ["lm_head", SHARED],
        ["gate_proj", "model.layers.3"[:-1], *PARENTS],
        [f"re:.*{parent}$" for parent in PARENTS],
        ["re:.*mlp\\.gate$", "re:model\\.layers\\.3\\."],
        ["re:layers"],
        ["re:.*experts\\.7\\.(gate|up)_proj"],
        KIMI_K2_THINKING["ignore"],
    ],
)
def test_ignored_names_are_those_of_compressed_tensors(ignore: list[str]) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear = pytest.importorskip("torch").nn.Linear(1, 1)
    found = declared(compressed(weights(4, "int", "group", group_size=32), ignore=ignore))
    for name in NAMES:
        assert found.of(name).is_float == match.is_match(name, linear, ignore), name


TARGETS = [
    "re:.*gate_proj",
    "re:.*experts",
    EXPERT,
    "Linear",
    "re:model\\.layers\\.1",
    "Embedding",
    "lm_head",
]


@pytest.mark.parametrize("count", range(1, len(TARGETS) + 1))
def test_the_scheme_is_that_of_compressed_tensors_first_target(count: int) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear = pytest.importorskip("torch").nn.Linear(1, 1)
    targets = TARGETS[-count:]
    groups = {
        str(i): {"targets": [target], "weights": weights(4, "int", "group", group_size=i + 1)}
        for i, target in enumerate(targets)
    }
    found = declared(compressed({}, config_groups=groups, ignore=[]))
    for name in NAMES:
        matched = match.match_targets(name, linear, targets)
        assert found.of(name).group_k == (targets.index(matched[0]) + 1 if matched else 0), name


@pytest.mark.parametrize(
    "patterns",
    [
        ["gate"],
        ["mlp.gate", "lm_head"],
        ["model.layers.3"],
        ["model.layers.*.mlp.experts"],
        ["model.layers.3.mlp.experts|lm_head"],
        ["gate_proj", "model.layers.1."],
    ],
)
def test_skipped_names_are_those_of_transformers(patterns: list[str]) -> None:
    theirs = pytest.importorskip("transformers.quantizers.quantizers_utils")
    found = declared({**DEEPSEEK_V3, "modules_to_not_convert": patterns})
    for name in NAMES:
        assert found.of(name).is_float != theirs.should_convert_module(name, patterns), name


# --- Refusals

INT4 = weights(4, "int", "group", group_size=32)
WEIGHTS = "config_groups.group_0.weights"
QUARK_INT3 = {"dtype": "int3", "qscheme": "per_channel", "ch_axis": 0}
UNSUPPORTED: dict[str, tuple[Json, str]] = {
    **{
        method: ({"quant_method": method}, "quant_method")
        for method in (
            "hqq",
            "eetq",
            "aqlm",
            "spqr",
            "vptq",
            "higgs",
            "quanto",
            "torchao",
            "fp_quant",
        )
    },
    "own kernel layout": ({"quant_method": "hqconv", "format_version": 1}, "quant_method"),
    "bitsandbytes 8 bit": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
    "fp8, stored otherwise": ({**DEEPSEEK_V3, "store_dtype": "int8"}, "store_dtype"),
    "fp8, other routed experts": (
        {**DEEPSEEK_V3, "routed_experts_quant_method": "nvfp4"},
        "routed_experts_quant_method",
    ),
    "ascend w4a8": ({"quant_method": "ascend", "quantize": "w4a8_dynamic"}, "quantize"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version"),
    "awq llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend"),
    "gptq marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
    "gptq old marlin": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
    "auto-round mxint": ({**AUTO_ROUND, "data_type": "mx_int"}, "data_type"),
    "auto-round mxfp in GPTQ's packing": ({**AUTO_ROUND, "data_type": "mx_fp"}, "packing_format"),
    "auto-round per module": (
        {**AUTO_ROUND, "extra_config": {"a.b": {"bits": 8, "data_type": "fp"}}},
        "extra_config.a.b.data_type",
    ),
    "auto-round activations": ({**AUTO_ROUND, "act_bits": 8}, "act_bits"),
    "auto-round packing": ({**AUTO_ROUND, "packing_format": "auto_round:mlx"}, "packing_format"),
    "bitnet online": (
        {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "online"},
        "quantization_mode",
    ),
    "bitnet norm": ({**BITNET, "use_rms_norm": True}, "use_rms_norm"),
    "modelopt awq": (modelopt("W4A16_AWQ"), "quant_algo"),
    "modelopt svd": (modelopt("NVFP4_SVD"), "quant_algo"),
    "modelopt scaled": (modelopt("NVFP4", pre_quant_scale=True), "pre_quant_scale"),
    "marlin-24": (compressed(weights(4, "int", "channel"), "marlin-24"), "format"),
    "sparse": (
        compressed(
            FLOAT_TENSOR, "float-quantized", sparsity_config={"format": "sparse-24-bitmask"}
        ),
        "sparsity_config",
    ),
    "rotated": (
        compressed(FLOAT_TENSOR, "float-quantized", transform_config={"config_groups": {"u": {}}}),
        "transform_config",
    ),
    "humming rotated": ({**HUMMING, "hadamard_block_size": 64}, "hadamard_block_size"),
    "quark dynamic": (
        quark({**QUARK_MXFP4, "is_dynamic": True}),
        "global_quant_config.weight.is_dynamic",
    ),
    "quark axis": (quark({**QUARK_MXFP4, "ch_axis": 0}), "global_quant_config.weight.ch_axis"),
    "quark zero points": (
        quark({**QUARK_INT3, "symmetric": False}),
        "global_quant_config.weight.symmetric",
    ),
    "v4 experts": ({**DEEPSEEK_V4, "moe_quant_algo": "MXFP8"}, "moe_quant_algo"),
    "v4 experts of a layer": (
        {
            **DEEPSEEK_V4,
            "moe_quant_algo": "NVFP4",
            "quantized_layers": {"layers.0": {"quant_algo": "FP8"}},
        },
        "quantized_layers.layers.0.quant_algo",
    ),
    "scale_fmt": ({**DEEPSEEK_V3, "scale_fmt": "ue4m3"}, "scale_fmt"),
    "fmt": ({**DEEPSEEK_V3, "fmt": "e3m4"}, "fmt"),
    "expert_dtype": ({**DEEPSEEK_V3, "expert_dtype": "int4"}, "expert_dtype"),
    "skip pattern": (
        {**DEEPSEEK_V3, "modules_to_not_convert": ["*.gate"]},
        "modules_to_not_convert",
    ),
    "gptq pattern": ({**GPTQ, "dynamic": {"-:(": {}}}, "dynamic"),
    "bitnet class": ({**BITNET, "linear_class": "linear"}, "linear_class"),
    "bitsandbytes table": ({**NF4, "bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type"),
    "unknown format": (compressed(INT4, "brotli"), "format"),
    "mixed without a group's format": (compressed(INT4, "mixed-precision"), "format"),
    "strategy": (compressed({**INT4, "strategy": "token"}), f"{WEIGHTS}.strategy"),
    "quark type": (quark({**QUARK_MXFP4, "dtype": "fp5"}), "global_quant_config.weight.dtype"),
    "quark element": (
        quark({"dtype": "mx", "mx_element_dtype": "fp8"}),
        "global_quant_config.weight.mx_element_dtype",
    ),
    "quark scale format": (
        quark({**QUARK_MXFP4, "scale_format": "e4m1"}),
        "global_quant_config.weight.scale_format",
    ),
    "quark packing": (quark(QUARK_MXFP4, export={"pack_method": "shuffle"}), "export.pack_method"),
    "humming scale type": ({**HUMMING, "weight_scale_type": "row"}, "weight_scale_type"),
}
SENSELESS: dict[str, tuple[Json, str]] = {
    "no method": ({}, "quant_method"),
    "gptq bits": ({**GPTQ, "bits": 16}, "bits"),
    "gptq no bits": ({"quant_method": "gptq", "group_size": 128}, "bits"),
    "gptq no group size": ({"quant_method": "gptq", "bits": 4}, "group_size"),
    "gptq dynamic": ({**GPTQ, "dynamic": {"+:.*": {"bits": 0}}}, "dynamic.+:.*.bits"),
    "gptq parts": ({**GPTQ, "modules_in_block_to_quantize": [[3]]}, "modules_in_block_to_quantize"),
    "ascend says nothing": ({"quant_method": "ascend"}, "quantize"),
    "awq bits": ({**AWQ, "bits": 8}, "bits"),
    "no groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "config_groups",
    ),
    "no targets": (
        compressed({}, config_groups={"group_0": {"weights": INT4}}),
        "config_groups.group_0.targets",
    ),
    "no bits": (compressed({"type": "int", "strategy": "channel"}), f"{WEIGHTS}.num_bits"),
    "no group size": (compressed(weights(4, "int", "group")), f"{WEIGHTS}.group_size"),
    "dynamic weights": (compressed({**INT4, "dynamic": True}), f"{WEIGHTS}.dynamic"),
    "block without sizes": (
        compressed(weights(8, "float", "block"), "float-quantized"),
        f"{WEIGHTS}.block_structure",
    ),
    "modelopt no algorithm": ({"quant_method": "modelopt"}, "quant_algo"),
    "modelopt group size": (modelopt("NVFP4", group_size=-16), "group_size"),
    "modelopt no layers": (modelopt("MIXED_PRECISION"), "quantized_layers"),
    "modelopt layer": (
        modelopt("MIXED_PRECISION", quantized_layers={"a.b": {"group_size": 16}}),
        "quantized_layers.a.b.quant_algo",
    ),
    "humming type": ({**HUMMING, "b_dtype": "uint9"}, "b_dtype"),
    "humming, overridden": (
        {**HUMMING, "dynamic": {"+:a": {"group_size": 64, "b_dtype": "int0"}}},
        "dynamic.+:a.b_dtype",
    ),
    "humming alias": (
        {"quant_method": "humming", "b_dtype": "uint4", "group_size": 17},
        "group_size",
    ),
    "humming block of one size": (
        {"quant_method": "humming", "b_dtype": "uint4", "scale_type": "block", "group_size": 64},
        "weight_scale_group_size_n",
    ),
    "humming no type": ({"quant_method": "humming"}, "b_dtype"),
    "quark no scheme": ({"quant_method": "quark"}, "global_quant_config"),
    "quark group": (
        quark({"dtype": "int4", "qscheme": "per_group", "ch_axis": 1}),
        "global_quant_config.weight.group_size",
    ),
    "quark stages": (quark([QUARK_MXFP4] * 3), "global_quant_config.weight"),
}


# Values of a key that no config may have, by the reader's method and its other arguments.
WRONG: list[tuple[str, list[Any], tuple[Any, ...]]] = [
    ("integer", ["4", 4.0, True, 0, 9, 1 << 70, None, [4]], (1, 8)),
    ("flag", ["yes", 1, None], (None,)),
    ("text", [4, True, ["a"], None], ()),
    ("names", ["lm_head", [4], {"a": 1}, 4], ()),
    ("pair", [[-128, 128], [0, 128], [128.0, 128], [128], [True, 128], [1 << 60, 128], None], ()),
    ("group_size", [0, -2, "128", None], ()),
    ("table", [["a"], 4, "a", None], ()),
]


@pytest.mark.parametrize(("method", "values", "rest"), WRONG, ids=[row[0] for row in WRONG])
def test_values_of_the_wrong_type_or_size(
    method: str, values: list[Any], rest: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises(InputError) as caught:
            getattr(ConfigReader({"key": value}, "config"), method)("key", *rest)
        assert caught.value.where == "config.key", value
        assert caught.value.expected


def refusal(words: Mapping[str, Any], kind: type[HqconvError], key: str) -> str:
    with pytest.raises(kind) as caught:
        declared_formats(words, {})
    assert caught.value.where == f"quantization_config.{key}"
    assert caught.value.expected
    assert caught.value.found
    return str(caught.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_a_request_error_that_names_the_key(name: str) -> None:
    refusal(UNSUPPORTED[name][0], RequestError, UNSUPPORTED[name][1])


@pytest.mark.parametrize("name", SENSELESS)
def test_what_makes_no_sense_is_an_input_error_that_names_the_key(name: str) -> None:
    refusal(SENSELESS[name][0], InputError, SENSELESS[name][1])


def test_an_unsupported_method_is_named_with_those_that_are_supported() -> None:
    message = refusal({"quant_method": "hqq"}, RequestError, "quant_method")
    assert "'hqq'" in message
    for method in (
        "awq",
        "compressed-tensors",
        "fp8",
        "gptq",
        "humming",
        "modelopt",
        "mxfp4",
        "quark",
    ):
        assert method in message
    assert "manifest" in refusal({"quant_method": "hqconv"}, RequestError, "quant_method")


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        declared_formats(["fp8"], {})  # type: ignore[arg-type]
    assert caught.value.where == "quantization_config"


JUNK = (
    None,
    True,
    0,
    -1,
    1 << 70,
    2.5,
    "",
    "re:(",
    [],
    [[]],
    [None],
    ["re:*"],
    {},
    {"": None},
    {"a": {}},
)


def mutations(words: Any) -> Iterator[Any]:
    """The words with one value, at any depth, replaced by junk or left out."""
    for key in list(words if isinstance(words, dict) else range(len(words))):
        for junk in JUNK:
            other = copy.copy(words)
            other[key] = junk
            yield other
        if isinstance(words[key], dict | list):
            for inner in mutations(words[key]):
                other = copy.copy(words)
                other[key] = inner
                yield other
        if isinstance(words, dict):
            yield {name: value for name, value in words.items() if name != key}


MUTATED: dict[str, Json] = {
    "deepseek": {**DEEPSEEK_V4, "moe_quant_algo": "NVFP4", "quantized_layers": {"a": {}}},
    "mimo": MIMO,
    "compressed-tensors": KIMI_K2_THINKING,
    "mxfp4": GPT_OSS,
    "mxfp8": MINIMAX_MXFP8,
    "gptq": {**GPTQ, "dynamic": {"+:.*experts": {"bits": 8}, "-:.*gate": {}}},
    "awq": AWQ,
    "auto-round": {**AUTO_ROUND, "extra_config": {".*gate.*": {"bits": 8}}},
    "auto-round mx": {**AUTO_ROUND, "data_type": "mx_fp", "packing_format": "auto_round:mx_fp"},
    "modelopt": modelopt("nvfp4", config_groups=MODELOPT_GROUPS),
    "quark": quark([QUARK_MXFP4], layer_quant_config={"*up*": {"weight": QUARK_MXFP4}}),
    "bitnet": BITNET,
    "bitsandbytes": NF4,
    "w4afp8": {"quant_method": "w4afp8", "group_size": 128, "ignored_layers": ["lm_head"]},
    "ascend": FORMATS["ascend, by a description"][0],
    "humming": HUMMING,
}


@pytest.mark.parametrize("name", MUTATED)
def test_no_value_ends_in_anything_but_a_format_or_our_error(name: str) -> None:
    for config in mutations(MUTATED[name]):
        with contextlib.suppress(HqconvError):
            fmt = declared_formats(config, {}).of(EXPERT)
            hash(fmt)
            assert min(fmt.group_n, fmt.group_k) >= ANY
