"""Facts for serving, told before a conversion: attention heads, layers, index and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.errors import InputError, RequestError
from hqconv.schemas.engine import AttentionHeads, attention_heads
from tests.make.command import call
from tests.make.qwen import set_config, write_qwen3_moe

HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}


def write(folder: Path, config: dict[str, Any] | None = None, **sizes: int) -> Path:
    """A checkpoint with attention of 16 heads and 4 KV heads, whose experts 12 ranks can share."""
    write_qwen3_moe(folder, hidden_size=128, intermediate_size=32 * 12, **sizes)
    set_config(folder, **{**HEADS, **(config or {})})
    return folder


# --- attention heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (HEADS, (16, 4)),
        ({"text_config": HEADS, "vision_config": {"num_attention_heads": 3}}, (16, 4)),
        ({"thinker_config": {"text_config": HEADS}}, (16, 4)),
        ({"num_attention_heads": 16}, (16, None)),
        ({**HEADS, "kv_lora_rank": 512}, (16, None)),
        ({"n_heads": 48, "attn_config": {"kv_n_heads": 8}}, (48, 8)),
        ({"num_attention_heads": 64, "num_attention_groups": 8}, (64, 8)),
        ({"num_attention_heads": [16, 8], "num_key_value_heads": 0}, (None, None)),
        ({"num_attention_heads": True, "num_key_value_heads": "4"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_heads_of_a_config(config: dict[str, Any], heads: tuple[int | None, int | None]) -> None:
    assert attention_heads(config) == AttentionHeads(*heads)


def test_sizes_that_work_share_the_heads(tmp_path: Path) -> None:
    """3 and 12 cut no scale group of 384 columns, and 6 neither."""
    model = write(tmp_path / "model", num_layers=1)
    found = hqconv.inspect(model)
    assert found["attention"] == {"num_heads": 16, "num_kv_heads": 4}
    assert found["tp_sizes"]["mxfp4"] == [1, 2, 4]
    set_config(model, **dict.fromkeys(HEADS))
    found = hqconv.inspect(model)
    assert found["attention"] == {}
    assert found["tp_sizes"]["mxfp4"] == [1, 2, 3, 4, 6, 12]
    set_config(model, text_config={**HEADS, "num_attention_heads": 12})
    sizes = hqconv.inspect(model)["tp_sizes"]["mxfp4"]
    assert sizes == [1, 2, 4, 12]  # 12 ranks repeat each KV head 3 times
    with pytest.raises(RequestError, match=r"TP sizes that work: 1, 2, 4, 12\."):
        hqconv.plan(model, schema="mxfp4", target="sm90", tp=5)
    assert "12 heads, 4 KV heads" in call("inspect", model).stdout


NOT_SHARED = "3 tensor parallel ranks cannot share the model's 16 attention heads evenly"


@pytest.mark.parametrize(
    ("options", "reason"), [(("--tp", 3), NOT_SHARED), (("--ep", 3), NOT_SHARED), (("--tp", 2), "")]
)
def test_a_command_that_vllm_refuses_is_not_printed(
    options: tuple[Any, ...], reason: str, tmp_path: Path
) -> None:
    """The artifact is made all the same, and `inspect` says that there is no such start."""
    model, out = write(tmp_path / "model", num_layers=1), tmp_path / "out"
    done = call("convert", model, "-o", out, "--schema", "mxfp4", "--target", "h100", *options)
    assert done.exit_code == 0
    assert (reason in done.stderr, "cannot share" in done.stderr) == (True, bool(reason))
    for text in (done.stdout, call("inspect", out).stdout):
        assert ("vllm serve" in text) == (not reason)
    assert (hqconv.inspect(out)["serve_command"] is None) == bool(reason)
    assert hqconv.verify(out, model).passed


# --- layers, tokenizer, index ------------------------------------------------------------------------------


MANY = "counts 5 layers (num_hidden_layers), and the checkpoint has no tensor of layer 3, 4:"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, ""),
        ({"num_hidden_layers": 5}, MANY),
        (
            {"num_hidden_layers": 1},
            "counts 1 layers (num_hidden_layers), and the checkpoint has 3:",
        ),
        ({"num_hidden_layers": 1, "num_nextn_predict_layers": 2}, ""),
        (
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 0},
            "",
        ),  # a draft may be there unsaid
        ({"num_hidden_layers": None}, ""),
    ],
)
def test_layers_of_config_and_checkpoint(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", config, num_layers=3)
    dry = json.loads(
        call(
            "convert", model, "--schema", "mxfp4", "--target", "sm90", "--dry-run", "--json"
        ).stdout
    )
    for warnings in (hqconv.inspect(model)["warnings"], dry["warnings"]):
        assert [said in text for text in warnings] == [True] * bool(said)
    shown = call("inspect", model)
    assert (said in shown.stdout, "warning:" in shown.stdout) == (True, bool(said))
    if not config:
        tensors = {
            n: t for n, t in load_file(model / "model.safetensors").items() if ".layers.1." not in n
        }
        save_file(tensors, model / "model.safetensors")
        assert "has no tensor of layer 1:" in hqconv.inspect(model)["warnings"][0]


def test_a_model_type_without_a_row_is_said(tmp_path: Path) -> None:
    """Its names fit; whether its activation and its config keys do, only its code tells."""
    model = write(tmp_path / "model", {"model_type": "brand_new"}, num_layers=1)
    dry = json.loads(
        call(
            "convert", model, "--schema", "mxfp4", "--target", "sm90", "--dry-run", "--json"
        ).stdout
    )
    for warnings in (hqconv.inspect(model)["warnings"], dry["warnings"]):
        (said,) = warnings
        assert said.startswith("hqconv does not know the model_type brand_new: ")
        assert "names of qwen_moe" in said
        assert "activation (silu)" in said


def test_a_missing_tokenizer_is_a_warning(tmp_path: Path) -> None:
    model = write(tmp_path / "model", num_layers=1)
    (model / "tokenizer.json").unlink()
    done = call(
        "convert", model, "-o", tmp_path / "out", "--schema", "mxfp4", "--target", "sm90", "--json"
    )
    assert done.exit_code == 0
    for warnings in (hqconv.inspect(model)["warnings"], json.loads(done.stdout)["warnings"]):
        assert ["has no tokenizer" in text for text in warnings] == [True]
    assert done.stderr.count("has no tokenizer") == 1
    assert "warnings" not in json.loads((tmp_path / "out" / "hqconv.json").read_text())
    for name in ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model"):
        (model / name).write_text("{}")
        assert hqconv.inspect(model)["warnings"] == []
        (model / name).unlink()


@pytest.mark.parametrize(
    "names",
    [
        ("weights",),
        ("model-00001-of-00002",),
        ("model-00001-of-00002", "model-00003-of-00002"),
        ("model-00001-of-00002", "other-00002-of-00002"),
        ("model-00001-of-00002", "model-00002-of-00002", "extra"),
    ],
)
def test_a_missing_index_is_said(names: tuple[str, ...], tmp_path: Path) -> None:
    model = write(tmp_path / "model", num_layers=1)
    tensors = load_file(model / "model.safetensors")
    for number, name in enumerate(names):
        save_file(dict(list(tensors.items())[number :: len(names)]), model / f"{name}.safetensors")
    (model / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"The checkpoint has no index of its shards\.") as error:
        hqconv.inspect(model)
    assert error.value.expected.startswith("model.safetensors.index.json, or all of the shards")
    assert f"{sorted(names)[0]}.safetensors" in error.value.found
    for name in names:
        (model / f"{name}.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="save_pretrained"):
        hqconv.inspect(model)
