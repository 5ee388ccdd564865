"""Quantize the experts of scripts/real_model.py's model by other packages, and compare them with the source.

    python scripts/peers.py quantize PACKAGE FORMAT MODEL OUT --text calib.txt
    python scripts/peers.py evaluate MODEL OUT … --text held-out.txt

PACKAGE FORMAT: llm-compressor int4-g32, mxfp4 or nvfp4, with `:mse` or `:imatrix_mse` for scales searched by squared
error, plain or weighted by activations; gptqmodel int4-g32; auto-round int4-g32, mxfp4 or nvfp4, with `--iterations 0`
for its search alone. Experts alone are quantized, and all packages read the same tokens, in sequences of 512, on one
thread. `quantize` runs in an environment with the package, which wants a transformers of its own, and needs no hqconv:

    pip install torch==2.13.0 llmcompressor==0.14.0.1
    pip install torch==2.13.0 auto-round==0.16.1
    pip install torch==2.13.0 gptqmodel && pip install --no-deps gptqmodel==7.7.0    (it asks for torch 2.14.1)

`evaluate` runs in hqconv's environment: hqconv's readers decode the checkpoints that the packages wrote, and
transformers runs the experts in float32. The figures are those of `hqconv evaluate`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

NUM_TOKENS, NUM_HELD_OUT, CONTEXT = 14_336, 8192, 512


def sequences(model: Path, text: Path, count: int) -> torch.Tensor:
    """Return the first tokens of a text: [count / CONTEXT, CONTEXT]."""
    from transformers import AutoTokenizer

    words = text.read_text(encoding="utf-8")[: 16 * count]
    ids = AutoTokenizer.from_pretrained(model)(words, add_special_tokens=False)["input_ids"][:count]
    return torch.tensor(ids).view(-1, CONTEXT)


def llm_compressor(name: str, folder: Path, out: Path, ids: torch.Tensor, iterations: int) -> None:
    """GPTQ in the package's default order (static); scales by amax, or by the observer that the name ends in."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    name, _, observer = name.partition(":")
    preset = {"int4-g32": "W4A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}[name]
    scheme: QuantizationScheme = preset_name_to_scheme(preset, [r"re:.*experts\.\d+\..*proj$"])
    if preset == "W4A16":
        scheme.weights.group_size = 32
    if observer:
        scheme.weights.observer = observer
    rows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    loader: Any = torch.utils.data.DataLoader(rows)
    recipe = GPTQModifier(config_groups={"experts": scheme}, ignore=["lm_head"])
    oneshot(model=model, dataset=loader, recipe=recipe, pipeline="sequential")
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def gptqmodel(name: str, folder: Path, out: Path, ids: torch.Tensor, iterations: int) -> None:
    """GPTQ with the package's defaults; attention is left out by rules."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two, whatever there is
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=4, group_size=32, sym=True, device="cpu", dynamic={r"-:.*self_attn.*": {}}
    )
    model = GPTQModel.load(str(folder), config)
    model.quantize(
        [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids],
        batch_size=1,
    )
    model.save(str(out))


def auto_round(name: str, folder: Path, out: Path, ids: torch.Tensor, iterations: int) -> None:
    """SignRound, or with no iterations the package's search for scales; attention is left out by rules."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scheme: dict[str, Any] = {
        "int4-g32": {"scheme": "W4A16", "group_size": 32},
        "mxfp4": {"scheme": "MXFP4", "act_bits": 16},
        "nvfp4": {"scheme": "NVFP4", "act_bits": 16},
    }[name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loader = [{"input_ids": row[None]} for row in ids]
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        **scheme,
        iters=iterations,
        nsamples=len(ids),
        seqlen=CONTEXT,
        dataset=loader,
        device_map="cpu",
        batch_size=4,
        layer_config={r".*self_attn.*": {"bits": 16, "act_bits": 16}},
    )
    rounder.quantize_and_save(str(out), format="auto_round")


PACKAGES = {"llm-compressor": llm_compressor, "gptqmodel": gptqmodel, "auto-round": auto_round}


def quantize(args: argparse.Namespace) -> None:
    """Quantize the model with a package; print versions and times."""
    from importlib.metadata import version

    ids, begin = sequences(args.model, args.text, args.tokens), (time.time(), time.process_time())
    PACKAGES[args.package](args.format, args.model, args.out, ids, args.iterations)
    package = args.package.replace("llm-c", "llmc")
    words = f"{args.package} {version(package)}, transformers {version('transformers')}, torch {version('torch')}"
    print(
        f"{words}: {args.format}, {time.time() - begin[0]:.0f} s, {time.process_time() - begin[1]:.0f} s of CPU"
    )


def load(folder: Path, out: Path | None = None, device: str = "cpu") -> Any:
    """Load a model in float32, with the decoded experts of a checkpoint or artifact in place of its own."""
    from transformers import AutoModelForCausalLM

    from hqconv.sources.opening import open_source

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    if out is not None:
        with open_source(str(out)) as source:
            for layer, module in zip(source.map_experts().layers, model.model.layers, strict=True):
                for expert in range(layer.num_experts):
                    roles = source.read_expert(layer, expert, layer.roles, torch.device("cpu"))
                    w1, w3, w2 = (roles[role].values().float() for role in ("w1", "w3", "w2"))
                    module.mlp.experts.gate_up_proj.data[expert] = torch.cat([w1, w3])
                    module.mlp.experts.down_proj.data[expert] = w2
    return model.to(device)


def evaluate(args: argparse.Namespace) -> None:
    """Print divergence and perplexity of each checkpoint."""
    from hqconv.evaluation.evaluate import Divergence

    ids = sequences(args.model, args.text, args.tokens)

    base = load(args.model)
    others = {out: load(args.model, out) for out in args.outs}
    figures = {out: Divergence() for out in args.outs}
    with torch.inference_mode():
        for row in ids:
            logits = base(row[None]).logits
            for out, model in others.items():
                figures[out].add(logits, model(row[None]).logits, row[None])
    for out, one in figures.items():
        words = one.figures()
        kl, perplexity = words["kl"], words["perplexity"]
        print(
            f"{out}: KL {kl['mean']:.4f} ± {kl['standard_error']:.4f}, perplexity {perplexity['source']:.2f} → "
            f"{perplexity['artifact']:.2f}, same token {words['top1_agreement']:.3f}, of {words['num_predictions']}"
        )


def main() -> None:
    """Quantize, or evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("quantize")
    one.add_argument("package", choices=PACKAGES)
    one.add_argument("format")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--iterations", type=int, default=0)
    two = commands.add_parser("evaluate")
    two.add_argument("model", type=Path)
    two.add_argument("outs", type=Path, nargs="+")
    for each, call, count in ((one, quantize, NUM_TOKENS), (two, evaluate, NUM_HELD_OUT)):
        each.add_argument("--text", type=Path, required=True)
        each.set_defaults(call=call, tokens=count)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
