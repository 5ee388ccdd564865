"""Ascend's quant_model_description.json: summed up in few words that say the same of every module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hqconv.errors import InputError, RequestError
from hqconv.formats.ascend import ascend_quantization_config, patterns
from hqconv.formats.quant_config import declared_formats
from hqconv.sources.opening import open_source
from tests.make import conversions
from tests.make.formats import write
from tests.make.qwen import set_config

INT8, FLOAT = "W8A8_DYNAMIC", "FLOAT"
Schemes = dict[str, str]


def of_model(num_layers: int, num_experts: int, **more: str) -> Schemes:
    """Dense layer 0, quantized experts, shared experts and attention; `others` by name with dots as underscores."""
    schemes = {"model.embed_tokens.weight": FLOAT, "lm_head.weight": FLOAT}
    for layer in range(num_layers):
        schemes[f"model.layers.{layer}.self_attn.o_proj.weight"] = INT8
        schemes[f"model.layers.{layer}.mlp.gate.weight"] = FLOAT
        for word in ("gate_proj", "up_proj", "down_proj"):
            schemes[f"model.layers.{layer}.mlp.shared_experts.{word}.weight"] = INT8
            for expert in range(num_experts):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{word}"
                schemes |= {
                    f"{name}.weight": INT8,
                    f"{name}.weight_scale": INT8,
                    f"{name}.bias": FLOAT,
                }
    return {**schemes, "model_quant_type": INT8, "version": "1.0.0", **more}


def words_of(description: dict[str, Any]) -> dict[str, Any]:
    config = ascend_quantization_config({}, description)
    assert config is not None
    return json.loads(json.dumps(config))  # a manifest repeats them


def test_a_whole_model_is_a_few_patterns() -> None:
    config = words_of(of_model(40, 64))
    assert config["quant_method"] == "ascend"
    assert config["modules"] == {
        f"model.layers.*.{module}": INT8
        for module in (
            "self_attn.o_proj",
            *(f"mlp.shared_experts.{word}" for word in ("gate_proj", "up_proj", "down_proj")),
            *(f"mlp.experts.*.{word}" for word in ("gate_proj", "up_proj", "down_proj")),
        )
    }


def test_a_layer_and_an_expert_that_differ_are_named() -> None:
    description = of_model(4, 3)
    for expert in range(3):
        description[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"] = FLOAT
    description["model.layers.2.mlp.experts.1.down_proj.weight"] = FLOAT
    found = declared_formats(words_of(description), {})
    plain = {
        name
        for name, scheme in description.items()
        if name.endswith(".weight") and found.of(name.removesuffix(".weight")).is_float
    }
    assert plain == {
        name for name, scheme in description.items() if scheme == FLOAT and name.endswith(".weight")
    }
    assert len(words_of(description)["modules"]) < 20


MODULES = st.lists(
    st.sampled_from(["model", "layers", "experts", "0", "1", "02", "x1", "gate"]),
    min_size=1,
    max_size=6,
).map(".".join)


@given(st.dictionaries(MODULES, st.sampled_from([INT8, FLOAT]), min_size=1))
def test_every_module_has_the_scheme_that_the_description_gives_it(schemes: Schemes) -> None:
    found = declared_formats(
        words_of({f"{name}.weight": scheme for name, scheme in schemes.items()}), {}
    )
    for name, scheme in schemes.items():
        assert found.of(name).is_float == (scheme == FLOAT), name


def test_numbers_are_whole_components() -> None:
    name = "m.layers.12.x1.experts.3.fc2"
    assert patterns(name) == (name, "m.layers.12.x1.experts.*.fc2", "m.layers.*.x1.experts.*.fc2")
    assert patterns("lm_head") == ("lm_head",) * 3


def test_a_scheme_of_experts_that_cannot_be_read_is_refused_by_its_name() -> None:
    description = of_model(2, 2)
    description |= {
        name: "W4A8_DYNAMIC" for name in description if ".experts." in name and "weight" in name
    }
    found = declared_formats(words_of(description), {})
    assert found.of("model.layers.0.self_attn.o_proj").encoding == "int8"
    with pytest.raises(RequestError) as caught:
        found.of("model.layers.0.mlp.experts.0.up_proj")
    assert caught.value.where == "quantization_config.modules.model.layers.*.mlp.experts.*.up_proj"
    assert "W4A8_DYNAMIC" in caught.value.found


@pytest.mark.parametrize(
    ("config", "description"),
    [
        ({}, {}),
        ({"quantize": None}, {}),
        ({"quantize": "w8a8"}, {}),
        ({"quantize": 8}, {"version": "1"}),
    ],
)
def test_where_nothing_known_is_said_nothing_stands_for_a_config(
    config: dict[str, Any], description: dict[str, Any]
) -> None:
    assert ascend_quantization_config(config, description) is None


# --- in a folder -------------------------------------------------------------------------------------------


def test_the_file_decides_and_the_tensors_are_held_to_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "ascend-w8a8-file", hidden=128, inner=128).folder
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    set_config(folder, quantize="w4a8")  # whatever this says
    with open_source(folder) as source:
        assert source.quantization is not None
        assert source.quantization["modules"]["model.layers.*.mlp.experts.*.up_proj"] == INT8
    conversions.open_plan(folder, "int4")[0].close()
    description = "quant_model_description.json"
    set_config(
        folder,
        description,
        **{f"model.layers.1.mlp.experts.{e}.up_proj.weight": FLOAT for e in range(3)},
    )
    with pytest.raises(InputError, match="declares no quantization") as caught:
        conversions.open_plan(folder, "int4")
    assert caught.value.where.startswith("model.layers.1.mlp.experts.0.up_proj.")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "source", "ascend-w8a8-file", hidden=128, inner=128).folder
    (folder / "quant_model_description.json").write_text("{")
    with pytest.raises(InputError, match=r"quant_model_description\.json"):
        open_source(folder)
