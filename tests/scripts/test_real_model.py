"""scripts/real_model.py: experts that are slices of a dense MLP, their artifacts, and the texts; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hqconv
from scripts import real_model
from tests.make.tokenizer import write_tokenizer


def tiny_llama() -> Any:
    """A dense model whose weights are bfloat16 numbers."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


@torch.inference_mode()
def test_the_experts_are_the_dense_model_and_artifacts_take_their_place(tmp_path: Path) -> None:
    dense = tiny_llama()
    tokens = torch.randint(0, 97, (2, 33))
    expected = dense(tokens).logits
    model = real_model.with_experts(dense.config, dict(dense.state_dict()))
    model.save_pretrained(tmp_path / "model")
    model = model.float().eval()
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=0)
    errors = []
    for schema in ("int8-g32", "int3-g32"):
        hqconv.convert(
            tmp_path / "model", tmp_path / schema, schema=schema, target="sm90", device="cpu"
        )
        real_model.put_experts(model, tmp_path / schema)
        errors.append(float((model(tokens).logits - expected).abs().mean()))
    assert 0 < errors[0] < errors[1]


def test_no_line_of_the_held_out_text_is_in_the_tokens_of_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "NUM_TOKENS", 300)
    write_tokenizer(tmp_path)
    real_model.write_texts(tmp_path / "texts", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text, held = ((tmp_path / f"texts/{name}.txt").read_text() for name in ("calib", "held-out"))
    used = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:300])
    seen = {line.strip() for line in used.split("\n")} - {""}
    assert len(text) > 1000
    assert len(held) > 1000
    assert not seen & {line.strip() for line in held.split("\n")}
