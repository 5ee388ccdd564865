"""Quantized checkpoints that transformers decodes: fp8 in blocks, and mxfp4, with what they decode to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.make.families import save_family
from tests.make.tokenizer import write_tokenizer

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_fp8_blocks(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Weights in blocks of 128 as fp8 checkpoints have them, and what they decode to; attention too."""
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj.weight" not in name:
            continue
        rows, columns = (size // 128 for size in weight.shape)
        blocks = weight.float().view(rows, 128, columns, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored |= {name: codes.view(weight.shape), f"{name}_scale_inv": scale}
        plain[name] = (codes.float() * scale[:, None, :, None]).view(weight.shape)
    return stored, plain


def in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Fused experts in mxfp4 as gpt_oss has them, of random codes, and what they decode to."""
    stored, plain = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            continue
        experts, columns, rows = weight.shape  # [E, in, out]
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), generator=generator)
        scales = torch.randint(120, 125, (experts, rows, columns // 32), generator=generator)
        values = E2M1[codes & 7] * (1 - 2 * (codes >> 3)) * torch.exp2(scales - 127.0)[..., None]
        del stored[name]
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        plain[name] = values.flatten(2).transpose(1, 2).contiguous().bfloat16()
    return stored, plain


QUANTIZED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "fp8": (
        "qwen3_moe",
        in_fp8_blocks,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    ),
    "mxfp4": (
        "gpt_oss",
        in_mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "embed_tokens"]},
    ),
}


def write_quantized(src: Path, method: str, plain: Path) -> Path:
    """A quantized checkpoint at `src`, and the one of the decoded weights at `plain`; returns `src`."""
    family, encode, config = QUANTIZED[method]
    sizes: dict[str, Any] = {
        "hidden": 128,
        "head_dim": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    sizes |= {"inner": 128, "intermediate_size": 128} if method == "fp8" else {"inner": 64}
    model: Any = save_family(plain, family, **sizes)
    model.save_pretrained(plain, max_shard_size="1GB")
    for path in plain.glob("model-*"):
        path.unlink()
    (plain / "model.safetensors.index.json").unlink(missing_ok=True)
    stored, decoded = encode(load_file(plain / "model.safetensors"))
    src.mkdir()
    write_tokenizer(src)
    words = json.loads((plain / "config.json").read_bytes())
    (src / "config.json").write_text(json.dumps(words | {"quantization_config": config}))
    save_file(stored, src / "model.safetensors", {"format": "pt"})
    save_file(decoded, plain / "model.safetensors", {"format": "pt"})
    return src
