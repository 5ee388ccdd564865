"""Train a small Mixture-of-Experts model on the Python standard library, as input of scripts/quality_table.py.

    python scripts/train_small_moe.py FOLDER [--seed 0] [--steps 1500] [--threads 2]

Writes a checkpoint that transformers and hqconv read (qwen3_moe, bfloat16, 4 layers of 8 experts, 8 million
parameters) with a tokenizer, and two texts beside the weights: `calibration.txt`, a part of the text of the training,
and `held-out.txt`, files that the training does not see. The text is that of the modules of CPython's standard library,
without its tests: every machine has it. 1500 steps take about 15 minutes on two processors. Numbers differ from machine
to machine and with the release of CPython, so tables name the seed and the likelihood of the model itself.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "pydoc_data", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "zoneinfo"),
)
HELD_OUT_EVERY = 10
VOCABULARY = 2048
CONTEXT, BATCH = 128, 8
CALIBRATION_BYTES = HELD_OUT_BYTES = 400_000
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def texts() -> tuple[str, str]:
    """Return the text of the training and the held-out text: sources of the standard library in the order of paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*root.glob("*.py"), *(file for name in PACKAGES for file in (root / name).rglob("*.py"))])
    parts: tuple[list[str], list[str]] = ([], [])
    for number, file in enumerate(files):
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(file.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(parts[0]), "\n".join(parts[1])


def make_tokenizer(text: str) -> Any:
    """Train a byte-level BPE tokenizer of 2048 tokens on a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([text], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>")


def make_model(seed: int) -> Any:
    """Return a model with random weights, float32."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(config)


def mean_loss(model: Any, ids: torch.Tensor, num_batches: int = 20) -> float:
    """Return the mean negative log-likelihood of the first tokens of a text, without the router's loss."""
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for batch in ids[: num_batches * BATCH * CONTEXT].view(num_batches, BATCH, CONTEXT):
            logits = model(input_ids=batch, use_cache=False, output_router_logits=False).logits[:, :-1]
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()))
    model.train()
    return total / num_batches


def train(model: Any, ids: torch.Tensor, held_out: torch.Tensor, seed: int, steps: int) -> None:
    """Train with Adam on random windows of the text; the learning rate falls as a cosine."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    warm_up, peak = max(1, steps // 20), 2e-3
    generator, begin = torch.Generator().manual_seed(seed), time.monotonic()
    model.train()
    for step in range(steps):
        after = max(0.0, step - warm_up) / max(1, steps - warm_up)
        rate = peak * min(1.0, (step + 1) / warm_up) * (0.1 + 0.45 * (1 + math.cos(math.pi * after)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(ids) - CONTEXT, (BATCH,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            spent = time.monotonic() - begin
            print(f"step {step + 1}: loss {float(loss):.3f}, held-out {mean_loss(model, held_out):.3f}, {spent:.0f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    text, held_out = texts()
    tokenizer = make_tokenizer(text)
    ids, others = (torch.tensor(tokenizer(part)["input_ids"]) for part in (text, held_out))
    model = make_model(asked.seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(ids)} tokens, {len(others)} held out, {num_parameters} parameters", flush=True)
    train(model, ids, others, asked.seed, asked.steps)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(asked.folder)
    tokenizer.save_pretrained(asked.folder)
    (asked.folder / "calibration.txt").write_text(text[:CALIBRATION_BYTES], encoding="utf-8")
    (asked.folder / "held-out.txt").write_text(held_out[:HELD_OUT_BYTES], encoding="utf-8")
    print(f"{asked.folder}: held-out loss {mean_loss(model.float(), others):.4f}")


if __name__ == "__main__":
    main()
