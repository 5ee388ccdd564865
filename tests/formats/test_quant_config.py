"""Quantization configs as publishers write them: formats, exceptions per module, and refusals by key.

tests/data/quant_configs.json has the configs: of published models (`configs`), with the format that they give EXPERT
(`formats`; `quark`: fields of the weight's scheme), with modules that are left out and others (`left_out`), and those
that are refused, with the key (`unsupported`: RequestError; `senseless`: InputError). test_config_keys reads `online`,
`fused`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
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
DATA: dict[str, Json] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "quant_configs.json").read_text()
)
CONFIGS: dict[str, Json] = DATA["configs"]
DEEPSEEK_V3, DEEPSEEK_V4 = CONFIGS["deepseek_v3"], CONFIGS["deepseek_v4"]
GPTQ, HUMMING = CONFIGS["gptq"], CONFIGS["humming"]


def declared(config: Json | None, **text: Any) -> DeclaredFormats:
    """What a config declares; it must come through JSON unchanged and be left as it was."""
    before = copy.deepcopy(config)
    found = declared_formats(config, text)
    assert config == before
    json.dumps([found.of(EXPERT).to_dict()])
    return found


def compressed(weights: Json, storage: str = "pack-quantized", **more: Any) -> Json:
    """A compressed-tensors config with one group."""
    return {
        **CONFIGS["kimi_k2"],
        "format": storage,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        **more,
    }


def weights(bits: int, kind: str, strategy: str, **more: Any) -> Json:
    """A compressed-tensors scheme for weights."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


def quark(weight: Any, **more: Any) -> Json:
    """A Quark config with one scheme for all layers."""
    return {**CONFIGS["quark"], "global_quant_config": {"weight": weight}, **more}


def modelopt(algorithm: str | None, **more: Any) -> Json:
    """modelopt's flat form."""
    return {**CONFIGS["modelopt"], "quant_algo": algorithm, **more}


def gptq(
    name: str, bits: int, columns: int, offset: int = 1, order: bool = False, **more: Any
) -> SourceFormat:
    options = (("zero_offset", offset), ("desc_act", order))
    return SourceFormat(name, "gptq", f"uint{bits}", group_k=columns, options=options, **more)


FLOAT_TENSOR = weights(8, "float", "tensor")
QUARK_MXFP4 = CONFIGS["quark"]["global_quant_config"]["weight"]


@pytest.mark.parametrize("name", DATA["formats"])
def test_a_config_gives_its_experts_this_format(name: str) -> None:
    """Forms that tests.make.formats has no checkpoint of."""
    config, expected = DATA["formats"][name]
    found = declared(config).of(EXPERT).to_dict()
    plain = {**PLAIN.to_dict(), **expected, "name": found["name"]}
    assert found == plain


def test_no_config_declares_plain_floats() -> None:
    found = declared(None)
    assert (found.method, found.of(EXPERT)) == ("none", PLAIN)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({**CONFIGS["auto_round"], "quant_method": "intel/auto-round"}, "auto-round"),
        ({"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({**GPTQ, "quant_method": "GPTQ"}, "gptq"),
    ],
)
def test_a_method_has_one_name(config: Json, method: str) -> None:
    assert declared(config).method == method


# --- Exceptions per module


@pytest.mark.parametrize("name", DATA["left_out"])
def test_modules_that_a_config_leaves_out_are_plain(name: str) -> None:
    config, plain, coded = DATA["left_out"][name]
    found = declared(config)
    assert [module for module in (*plain, *coded) if found.of(module).is_float] == plain


@pytest.mark.parametrize("holder", ["model", "quantization_config"])
def test_deepseek_v4_routed_experts_are_fp4_among_fp8(holder: str) -> None:
    config, text = DEEPSEEK_V4, {"expert_dtype": "fp4"}
    if holder == "quantization_config":
        config, text = {**DEEPSEEK_V4, **text}, {"expert_dtype": "fp8"}
    found = declared(config, **text)
    for routed in ("layers.0.ffn.experts.0.w1", "mtp.0.ffn.experts.255.w2", "layers.0.ffn.experts"):
        assert (found.of(routed).encoding, found.of(routed).group_k) == ("mxfp4", 32)
    for dense in ("layers.0.ffn.shared_experts.w1", "layers.0.attn.wq_a"):
        assert (found.of(dense).encoding, found.of(dense).scale_dtype) == ("fp8", "float8e8m0")


def test_deepseek_v4_fp8_experts_follow_the_blocks() -> None:
    found = declared(DEEPSEEK_V4, expert_dtype="fp8").of("layers.0.ffn.experts.0.w1")
    assert (found.encoding, found.group_n, found.group_k) == ("fp8", 128, 128)


def test_dense_layers_around_routed_experts_in_mxfp4_are_fp8() -> None:
    found = declared({**CONFIGS["mimo_v2"], "ignored_layers": [ATTENTION]})
    for dense in (SHARED, "model.layers.0.mlp.gate_proj"):
        assert (found.of(dense).encoding, found.of(dense).group_k) == ("fp8", 128)
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
    "config_of",
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
    config_of: Callable[[str], Json], parent: str
) -> None:
    """Tools compare a module's own name; a server's module of all experts is a parent of each."""
    found = declared(config_of(parent))
    assert not found.of(EXPERT).is_float
    assert found.of(EXPERT, is_stored_plain=True) is PLAIN
    assert not found.of(EXPERT.replace(".3.", ".33."), is_stored_plain=True).is_float


@pytest.mark.parametrize("module", [EXPERT, SHARED])
def test_an_awq_entry_within_a_word_is_decided_by_the_tensors(module: str) -> None:
    """AutoAWQ leaves gate_proj out for "gate", other tools and vLLM's fused experts do not."""
    found = declared(CONFIGS["awq"])
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
    found = declared({**CONFIGS["auto_round"], "extra_config": extra})
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
    config = compressed({}, "mixed-precision", config_groups=groups)
    found = declared(config)
    assert found.of(EXPERT).encoding == "int8"
    assert found.of(EXPERT.replace("gate", "up")).encoding == "nvfp4"
    assert found.of(ATTENTION).encoding == "fp8"
    del groups["group_0"]
    assert declared(config).of(ATTENTION) is PLAIN, "no target names it"


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
    for changes in (
        {"ignore": ["re:.*experts\\.9\\."]},
        {"dynamic": {"-:.*\\.experts\\.9\\.": {}}},
    ):
        found = declared({**HUMMING, **changes})
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


# --- Quark: judged by Humming's reading of the same scheme


@pytest.mark.parametrize("name", DATA["quark"])
def test_quark_reads_as_humming_does(name: str) -> None:
    weight, expected = DATA["quark"][name]
    form = declared(quark(weight)).of(EXPERT)
    assert form.encoding == "quark"
    found = (form.name, form.b_dtype, form.scale_dtype, form.group_n, form.group_k)
    assert expected == [*found, form.has_zero_point, form.scale_2]
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
    channel = DATA["quark"]["fp8 channel"][0]
    tensor = DATA["quark"]["fp8 tensor"][0]
    int4 = DATA["quark"]["int4"][0]
    layers = {"*experts*": {"weight": channel}, EXPERT: {"weight": int4}, SHARED: {"weight": None}}
    config = quark(QUARK_MXFP4, layer_quant_config=layers, export={"pack_method": "order"})
    found = declared(config)
    assert found.of(EXPERT).option("pack_method") == "order"
    assert found.of(EXPERT).b_dtype == "uint4", "an exact name goes first"
    assert found.of(EXPERT.replace("gate", "up")).name == "quark fp8_e4m3"
    assert found.of(ATTENTION).name == "quark mxfp4"
    config["layer_type_quant_config"] = {"Conv2d": {"weight": int4}, "Linear": {"weight": tensor}}
    assert declared(config).of(ATTENTION).group_n == 0
    del layers["*experts*"]
    assert declared(config).of(SHARED) is PLAIN


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
        CONFIGS["kimi_k2"]["ignore"],
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


def refusal(config: Json, kind: type[HqconvError], key: str) -> str:
    with pytest.raises(kind) as caught:
        declared_formats(config, {})
    assert caught.value.where == f"quantization_config.{key}"
    assert caught.value.expected
    assert caught.value.found
    return str(caught.value)


KINDS = {"unsupported": RequestError, "senseless": InputError}


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table in KINDS for name in DATA[table]]
)
def test_refusals_name_the_key(table: str, name: str) -> None:
    config, key = DATA[table][name]
    refusal(config, KINDS[table], key)


def test_an_unsupported_method_is_named_with_those_that_are_supported() -> None:
    for method in ("hqq", "eetq", "aqlm", "spqr", "vptq", "higgs", "quanto", "torchao"):
        message = refusal({"quant_method": method}, RequestError, "quant_method")
        assert f"'{method}'" in message
        assert "awq, bitnet, bitsandbytes, compressed-tensors" in message
    assert "manifest" in refusal({"quant_method": "hqconv"}, RequestError, "quant_method")


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        declared_formats(["fp8"], {})  # type: ignore[arg-type]
    assert caught.value.where == "quantization_config"


JUNK = json.loads(
    '[null, true, 0, -1, 1180591620717411303424, 2.5, "", "re:(", [], [[]], [null], ["re:*"], {}, {"": null}, '
    '{"a": {}}]'
)


def mutations(config: Any) -> Iterator[Any]:
    """The config with one value, at any depth, replaced by junk or left out."""
    for key in list(config if isinstance(config, dict) else range(len(config))):
        for junk in JUNK:
            mutated = copy.copy(config)
            mutated[key] = junk
            yield mutated
        if isinstance(config[key], dict | list):
            for inner in mutations(config[key]):
                mutated = copy.copy(config)
                mutated[key] = inner
                yield mutated
        if isinstance(config, dict):
            yield {name: value for name, value in config.items() if name != key}


MUTATED = {**CONFIGS, **DATA["mutated"]}


@pytest.mark.parametrize("name", MUTATED)
def test_no_value_ends_in_anything_but_a_format_or_our_error(name: str) -> None:
    for config in mutations(MUTATED[name]):
        with contextlib.suppress(HqconvError):
            fmt = declared_formats(config, {}).of(EXPERT)
            hash(fmt)
            assert min(fmt.group_n, fmt.group_k) >= ANY
