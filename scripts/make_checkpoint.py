"""Write a Mixture-of-Experts checkpoint of any size with made-up but realistic weights.

    python scripts/make_checkpoint.py OUT [--model-type qwen3_moe] [--hidden 1024] [--sparse] …

The names, config.json and shards are those of the real model, and transformers loads the result. Each tensor
is drawn from its own generator, seeded by its name, in chunks of rows straight into its place:
neither shard size nor thread count changes a value, and memory stays small. With `--sparse` the shards are
headers in front of holes, so that a layout of terabytes, for dry runs, takes no disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

CHUNK_ELEMENTS = 1 << 22
NUM_THREADS = min(8, os.cpu_count() or 1)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
INDEX_NAME = "model.safetensors.index.json"
WORDS = ("<unk>", "<s>", "</s>")
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {
        "type": "WordLevel",
        "vocab": {word: i for i, word in enumerate(WORDS)},
        "unk_token": WORDS[0],
    },
}


class Tensor(NamedTuple):
    """One tensor to write: a matrix [out, in], a norm [size] or a router bias [experts]."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_bias(self) -> bool:
        """Published as float32; the rest is bfloat16."""
        return self.name.endswith("bias")


@dataclass(frozen=True)
class Sizes:
    """The sizes given on the command line, and the attention sizes that follow from them."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    top_k: int
    vocab: int
    head_dim: int = 64

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)

    @property
    def kv_heads(self) -> int:
        return math.gcd(self.heads, 4)

    @property
    def grouped(self) -> dict[str, int]:
        """The config keys of grouped-query attention."""
        return {"head_dim": self.head_dim, "num_key_value_heads": self.kv_heads}

    @property
    def dense_intermediate(self) -> int:
        return 4 * self.intermediate

    @property
    def ranks(self) -> tuple[int, int]:
        """Of the query's and of the key and value's latent space."""
        return max(16, self.hidden // 4), max(16, self.hidden // 8)

    @property
    def num_dense_layers(self) -> int:
        """DeepSeek's first layers, without experts: one, where there is more than one."""
        return min(1, self.layers - 1)


def weights(prefix: str, **shapes: tuple[int, ...]) -> Iterator[Tensor]:
    """The weights of one module, by the names of its parts."""
    for part, shape in shapes.items():
        yield Tensor(f"{prefix}.{part}.weight", shape)


def grouped_attention(prefix: str, s: Sizes, **norms: tuple[int, ...]) -> Iterator[Tensor]:
    """Grouped-query attention, with the head norms that the family has."""
    q, kv = (s.heads * s.head_dim, s.hidden), (s.kv_heads * s.head_dim, s.hidden)
    return weights(prefix, q_proj=q, k_proj=kv, v_proj=kv, o_proj=q[::-1], **norms)


def latent_attention(prefix: str, s: Sizes) -> Iterator[Tensor]:
    """DeepSeek's multi-head latent attention, its heads as wide as published ones: nope and value 128, rope 64."""
    q_rank, kv_rank = s.ranks
    wide = 2 * s.head_dim
    return weights(
        prefix,
        q_a_proj=(q_rank, s.hidden),
        q_a_layernorm=(q_rank,),
        q_b_proj=(s.heads * (wide + s.head_dim), q_rank),
        kv_a_proj_with_mqa=(kv_rank + s.head_dim, s.hidden),
        kv_a_layernorm=(kv_rank,),
        kv_b_proj=(s.heads * 2 * wide, kv_rank),
        o_proj=(s.hidden, s.heads * wide),
    )


def mlp(prefix: str, s: Sizes, intermediate: int) -> Iterator[Tensor]:
    """One expert, or one dense MLP: gate and up [I, H], down [H, I]."""
    wide, tall = (s.hidden, intermediate), (intermediate, s.hidden)
    return weights(prefix, gate_proj=tall, up_proj=tall, down_proj=wide)


def moe(prefix: str, s: Sizes) -> Iterator[Tensor]:
    """The router and its experts."""
    yield from weights(prefix, gate=(s.experts, s.hidden))
    for expert in range(s.experts):
        yield from mlp(f"{prefix}.experts.{expert}", s, s.intermediate)


def qwen3_moe_layer(prefix: str, s: Sizes, layer: int) -> Iterator[Tensor]:
    """Every layer has experts; heads have norms."""
    yield from grouped_attention(
        f"{prefix}.self_attn", s, q_norm=(s.head_dim,), k_norm=(s.head_dim,)
    )
    yield from moe(f"{prefix}.mlp", s)


def deepseek_v3_layer(prefix: str, s: Sizes, layer: int) -> Iterator[Tensor]:
    """Dense first, then experts with a selection bias and a shared one."""
    yield from latent_attention(f"{prefix}.self_attn", s)
    if layer < s.num_dense_layers:
        yield from mlp(f"{prefix}.mlp", s, s.dense_intermediate)
        return
    yield from moe(f"{prefix}.mlp", s)
    yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", (s.experts,))
    yield from mlp(f"{prefix}.mlp.shared_experts", s, s.intermediate)


class Model(NamedTuple):
    """How one model type names its tensors, and the config keys that not all of them have."""

    architecture: str
    layer: Callable[[str, Sizes, int], Iterator[Tensor]]
    config: Callable[[Sizes], dict[str, Any]]


MODELS = {
    "qwen3_moe": Model(
        "Qwen3MoeForCausalLM",
        qwen3_moe_layer,
        lambda s: {
            **s.grouped,
            "intermediate_size": s.dense_intermediate,
            "moe_intermediate_size": s.intermediate,
            "num_experts": s.experts,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": Model(
        "DeepseekV3ForCausalLM",
        deepseek_v3_layer,
        lambda s: {
            "num_key_value_heads": s.heads,
            "intermediate_size": s.dense_intermediate,
            "moe_intermediate_size": s.intermediate,
            "n_routed_experts": s.experts,
            "n_shared_experts": 1,
            "first_k_dense_replace": s.num_dense_layers,
            **dict.fromkeys(("n_group", "topk_group"), 1),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            **dict(zip(("q_lora_rank", "kv_lora_rank"), s.ranks, strict=True)),
            "qk_rope_head_dim": s.head_dim,
            **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 2 * s.head_dim),
            "num_nextn_predict_layers": 0,
        },
    ),
}


def all_tensors(model_type: str, s: Sizes) -> Iterator[Tensor]:
    """Every tensor of the checkpoint, in the order of the model."""
    norm = (s.hidden,)
    yield from weights("model", embed_tokens=(s.vocab, s.hidden))
    for layer in range(s.layers):
        yield from weights(
            f"model.layers.{layer}", input_layernorm=norm, post_attention_layernorm=norm
        )
        yield from MODELS[model_type].layer(f"model.layers.{layer}", s, layer)
    yield Tensor("model.norm.weight", norm)
    yield Tensor("lm_head.weight", (s.vocab, s.hidden))


def config_json(model_type: str, s: Sizes) -> dict[str, Any]:
    """config.json as transformers' AutoConfig reads it."""
    return {
        "architectures": [MODELS[model_type].architecture],
        "model_type": model_type,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **MODELS[model_type].config(s),
    }


def values(tensor: Tensor) -> Iterator[torch.Tensor]:
    """The tensor as float32, in chunks of whole rows.

    A matrix is Gaussian with standard deviation 1 / sqrt(in), its rows differ in scale by a log-normal
    factor, and one input channel in 500 is 10 to 30 times heavier, as in trained models.
    """
    key = hashlib.sha256(f"0:{tensor.name}".encode()).digest()
    random = np.random.Generator(np.random.SFC64(int.from_bytes(key)))
    if len(tensor.shape) == 1:
        noise = random.standard_normal(tensor.shape, np.float32)
        yield torch.from_numpy(0.01 * noise if tensor.is_bias else 1 + 0.1 * noise)
        return
    num_rows, num_columns = tensor.shape
    column_scale = np.full(num_columns, num_columns**-0.5, np.float32)
    heavy = random.choice(num_columns, max(1, num_columns // 500), replace=False)
    column_scale[heavy] *= random.uniform(10, 30, heavy.size)
    row_scale = np.exp(0.3 * random.standard_normal((num_rows, 1), np.float32))
    step = max(1, CHUNK_ELEMENTS // num_columns)
    for row in range(0, num_rows, step):
        scale = row_scale[row : row + step] * column_scale
        yield torch.from_numpy(random.standard_normal(scale.shape, np.float32) * scale)


def stored(tensor: Tensor) -> tuple[str, torch.dtype, int]:
    """How a tensor is stored: safetensors code, dtype and bytes."""
    code, kind = ("F32", torch.float32) if tensor.is_bias else ("BF16", torch.bfloat16)
    return code, kind, math.prod(tensor.shape) * kind.itemsize


def split(tensors: Iterator[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Fill shards in order; a tensor larger than a shard gets one of its own."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        num_bytes = stored(tensor)[2]
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += num_bytes
    return shards


class Draw:
    """Tensors' bytes, drawn; every so many layers the same again, which are kept in memory."""

    def __init__(self, distinct_layers: int | None) -> None:
        self._distinct = distinct_layers
        self._kept: dict[str, list[torch.Tensor]] = {}

    def chunks(self, tensor: Tensor) -> Iterable[torch.Tensor]:
        """As it is stored, in chunks of whole rows."""
        kind = stored(tensor)[1]
        if self._distinct is None:
            return (chunk.to(kind) for chunk in values(tensor))
        name = re.sub(
            r"(?<=layers\.)\d+",
            lambda match: str(int(match[0]) % (self._distinct or 1)),
            tensor.name,
        )
        if name not in self._kept:
            self._kept[name] = [chunk.to(kind) for chunk in values(tensor._replace(name=name))]
        return self._kept[name]


def write_tensor(file: int, offset: int, draw: Draw, begin: int, tensor: Tensor) -> None:
    """Write one tensor at its place, chunk by chunk."""
    position = offset + begin
    for chunk in draw.chunks(tensor):
        view = chunk.flatten().view(torch.uint8).numpy().data
        while view:
            count = os.pwrite(file, view, position)
            view, position = view[count:], position + count


def write_shard(path: Path, tensors: Sequence[Tensor], draw: Draw | None) -> int:
    """Write one safetensors file, without `draw` a hole for the tensors; returns the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: list[int] = []
    end = 0
    tensors = sorted(tensors, key=lambda t: not t.is_bias)  # float32 first, so that each is aligned
    for tensor in tensors:
        code, _, num_bytes = stored(tensor)
        begins.append(end)
        end += num_bytes
        header[tensor.name] = {
            "dtype": code,
            "shape": tensor.shape,
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(NUM_THREADS) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        if draw is not None:
            write = partial(write_tensor, file.fileno(), 8 + len(text), draw)
            list(pool.map(write, begins, tensors))
    return end


def write_checkpoint(
    out: Path, model_type: str, s: Sizes, shard_bytes: int, draw: Draw | None
) -> int:
    """Write the folder, which gets its name when it is complete; returns the bytes of all tensors."""
    folder = out.with_name(out.name + ".partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shards = split(all_tensors(model_type, s), shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    pairs = list(zip(names, shards, strict=True))
    total_bytes = sum(write_shard(folder / name, shard, draw) for name, shard in pairs)
    files: dict[str, object] = {
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": WORDS[0],
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False},
        "config.json": config_json(model_type, s),
    }
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in pairs for tensor in shard}
        files[INDEX_NAME] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    folder.replace(out)
    return total_bytes


def size_bytes(text: str) -> int:
    """Bytes from `100MB`."""
    return int(text[:-2]) * UNITS[text[-2:]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=style
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    parser.add_argument(
        "--model-type", choices=MODELS, default="qwen3_moe", help="whose names and config"
    )
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument(
        "--intermediate", type=int, default=768, help="intermediate size of one expert"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--experts", type=int, default=16, help="experts in each layer")
    parser.add_argument("--top-k", type=int, default=4, help="experts per token")
    parser.add_argument("--head-dim", type=int, default=64, help="of hidden size / 64 heads")
    parser.add_argument("--vocab", type=int, default=2048, help="vocabulary size")
    parser.add_argument("--shard-size", type=size_bytes, default="100MB", help="largest shard")
    parser.add_argument(
        "--distinct-layers", type=int, help="after so many, layers repeat: sooner made"
    )
    parser.add_argument(
        "--sparse", action="store_true", help="headers and holes instead of weights"
    )
    a = parser.parse_args(arguments)
    if a.top_k > a.experts:
        parser.error(f"--top-k {a.top_k} is more than --experts {a.experts}")
    if a.vocab < len(WORDS):
        parser.error(f"--vocab {a.vocab} is less than the tokenizer's {len(WORDS)} words")
    if a.out.exists():
        parser.error(f"{a.out} exists: remove it, or name another folder")
    return a


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with 2 for a request that cannot be met."""
    a = parse(arguments)
    sizes = Sizes(a.hidden, a.intermediate, a.layers, a.experts, a.top_k, a.vocab, a.head_dim)
    draw = None if a.sparse else Draw(a.distinct_layers)
    total = write_checkpoint(a.out, a.model_type, sizes, a.shard_size, draw)
    print(
        f"{a.out}: {a.model_type}, {total / 1e9:.3f} GB of tensors"
        + (" (holes)" if a.sparse else "")
    )


if __name__ == "__main__":
    main()
