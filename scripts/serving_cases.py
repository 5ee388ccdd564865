"""The cases of `check_serving.py models`: one tiny model each, its artifact, and the engine that it is compared with.

A case is a function that writes the model and its conversions, and yields comparisons: two engines whose answers must
be identical, or, where arithmetic differs, whose first log-probabilities must be near. Where the judge is near, every
token takes all experts: a token that goes to another expert would change much, and says nothing about weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.schemas.input_schema import resolve_inputs
from scripts import one_gpu
from scripts.engines import Engine, plugin_variables
from scripts.serving_models import decode_into
from scripts.shared import make_source

NEAR, NEAR_QUANTIZED = 0.15, 0.5
"""The largest difference of first log-probabilities: 16-bit activations, quantized activations."""
E4M3, MAX = torch.float8_e4m3fn, 448.0
EXPERTS, LAYERS = 8, 3
SIZES = {"hidden": 1024, "intermediate": 384, "layers": LAYERS, "experts": EXPERTS}
PLAIN = ("mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))


class Comparison(NamedTuple):
    """Two engines, and how their answers must agree.

    limit: None for identical answers; else the largest difference of first log-probabilities.
    """

    name: str
    mine: Engine
    other: Engine
    limit: float | None = None


@dataclass(frozen=True)
class Place:
    """Where models are made: the folder, the device of conversions, and arguments of vllm.LLM for all engines."""

    work: Path
    device: str
    words: dict[str, Any]

    def made(self, name: str, write: Callable[[Path], object]) -> Path:
        """A folder that `write` fills, unless it is there."""
        folder = self.work / name
        if not folder.exists():
            shutil.rmtree(part := self.work / f"{name}.part", ignore_errors=True)
            write(part)
            part.rename(folder)
        return folder

    def plain(self, dtype: str = "bfloat16", top_k: int = EXPERTS, **sizes: int) -> Path:
        """A Qwen3-MoE checkpoint in 16 bits."""
        words = {**SIZES, **sizes, "top_k": top_k, "dtype": dtype}
        name = "-".join(map(str, ("qwen3", dtype, *words.values())))
        return self.made(name, lambda folder: make_source(folder, **words))

    def artifact(self, source: Path, label: str, **options: Any) -> Path:
        """One conversion of a source."""
        words = {"target": "sm90", "device": self.device, **options}
        return self.made(f"{source.name}-{label}", lambda folder: hqconv.convert(source, folder, **words))

    def engine(
        self, name: str, model: Path, tp: int = 1, is_ep: bool = False, env: dict[str, str] | None = None, **words: Any
    ) -> Engine:
        """An engine of a model, by what the report calls it, with `tp` ranks on one GPU; is_ep: they share experts."""
        merged = {**self.words, **words}
        if tp > 1:
            merged = one_gpu.words_of(merged)
            env = {**(env or {}), **plugin_variables(self.work, "one_gpu")}
        arguments = ["--tp", str(tp), *(["--ep"] if is_ep else []), "--words", json.dumps(merged)]
        return Engine(name, model, arguments, dict(env or {}))

    def decoded(self, source: Path, artifact: Path) -> Path:
        """The source with the artifact's experts in 16 bits."""
        return self.made(f"{artifact.name}-decoded", lambda folder: decode_into(folder, source, artifact))

    def beside_checkpoint(
        self, name: str, source: Path, schema: str, inputs: str = "a16", /, **words: Any
    ) -> tuple[Engine, Engine]:
        """The kernel layout, and the checkpoint layout in a stock vLLM that is told of the same activations."""
        kernel = self.artifact(source, f"{schema}-{inputs}-kernel", schema=schema, input_schema=inputs)
        packed = self.artifact(source, f"{schema}-checkpoint", schema=schema, layout="checkpoint")
        fields = resolve_inputs(inputs).humming_fields()
        told = {key: value for key, value in fields.items() if value} | {"allow_fallback": False}
        env = {} if inputs == "a16" else {"VLLM_HUMMING_INPUT_QUANT_CONFIG": json.dumps(told)}
        mine = self.engine(f"{name}, kernel", kernel, **words)
        return mine, self.engine(f"{name}, checkpoint", packed, env=env, **words)


Case = Callable[[Place], Iterator[Comparison]]


def float16(place: Place) -> Iterator[Comparison]:
    """float16: beside the checkpoint layout, and, where stock vLLM has none, beside decoded weights."""
    source = place.plain("float16")
    for name in ("int4", "fp8"):
        yield Comparison(f"float16 {name}", *place.beside_checkpoint(f"float16 {name}", source, name))
    kernel = place.artifact(source, "mxfp4-kernel", schema="mxfp4")
    mine = place.engine("float16 mxfp4, kernel", kernel)
    other = place.engine("float16 mxfp4, decoded", place.decoded(source, kernel))
    yield Comparison("float16 mxfp4", mine, other, NEAR)


def deepseek(place: Place) -> Iterator[Comparison]:
    """DeepSeek-V3: latent attention with the published head sizes, groups of experts, a dense layer first."""

    def write(folder: Path) -> None:
        make_source(folder, model_type="deepseek_v3", hidden=4096, intermediate=256, layers=3, experts=16, top_k=4)
        reword(folder, n_group=4, topk_group=2, routed_scaling_factor=2.5)

    words: dict[str, Any] = {"attention_backend": "TRITON_MLA"}
    source = place.made("deepseek", write)
    yield Comparison("deepseek mxfp4", *place.beside_checkpoint("deepseek mxfp4", source, "mxfp4", **words))


def inputs(place: Place) -> Iterator[Comparison]:
    """Dynamically quantized activations, beside the checkpoint layout with the same, and beside decoded weights."""
    source = place.plain()
    for schema, kind in (("fp8-block", "fp8-g128"), ("mxfp4", "fp8"), ("int8", "int8")):
        name = f"{schema} × {kind}"
        mine, other = place.beside_checkpoint(name, source, schema, kind)
        yield Comparison(f"{name} against checkpoint", mine, other)
        weights = place.decoded(source, mine.model)
        yield Comparison(f"{name} against decoded", mine, place.engine(f"{name}, decoded", weights), NEAR_QUANTIZED)


def static(place: Place) -> Iterator[Comparison]:
    """An fp8 checkpoint with static scales of activations, beside the same in vLLM's own kernels."""
    source = place.made("static", lambda folder: write_static(folder, place.plain()))
    kernel = place.artifact(source, "static-kernel", schema="source", input_schema="fp8-static")
    mine, stock = place.engine("static, kernel", kernel), place.engine("static, stock", source, moe_backend="triton")
    yield Comparison("static against stock", mine, stock, NEAR_QUANTIZED)


def mixed(place: Place) -> Iterator[Comparison]:
    """A recipe with another schema in every layer, beside decoded weights."""
    source, recipe = place.plain(), place.work / "mixed.toml"
    layers = {0: "fp8", 1: "int4-g64-zp", 2: "nvfp4"}
    parts = ['schema = "mxfp4"', *(f'[[override]]\nlayers = "{n}"\nschema = "{s}"' for n, s in layers.items())]
    recipe.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    kernel = place.artifact(source, "mixed-kernel", config=recipe)
    mine = place.engine("mixed, kernel", kernel)
    yield Comparison("mixed layers", mine, place.engine("mixed, decoded", place.decoded(source, kernel)), NEAR)


def multimodal(place: Place) -> Iterator[Comparison]:
    """Qwen3-VL, whose language model is a part with a prefix; text only, without files of a processor."""
    source = place.made("qwen3-vl", write_qwen3_vl)
    words: dict[str, Any] = {"language_model_only": True, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    yield Comparison("multimodal mxfp4", *place.beside_checkpoint("multimodal mxfp4", source, "mxfp4", **words))


def draft(place: Place) -> Iterator[Comparison]:
    """GLM-4 with its MTP draft: beside the checkpoint layout, and the same tokens as without the draft."""
    source = place.made("glm4-mtp", write_glm4_mtp)
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "disable_log_stats": False}
    mine, other = place.beside_checkpoint("draft mxfp4", source, "mxfp4", **drafting)
    yield Comparison("draft against checkpoint", mine, other)
    yield Comparison("draft against none", mine, place.engine("no draft, kernel", mine.model), NEAR)


def ranks(place: Place) -> Iterator[Comparison]:
    """Tensor and expert parallelism over two ranks, beside the checkpoint layout."""
    source, schema = place.plain(top_k=4), "mxfp4"
    packed = place.artifact(source, f"{schema}-checkpoint", schema=schema, layout="checkpoint")
    for name, is_ep in (("tp 2", False), ("ep 2", True)):
        kernel = place.artifact(source, f"{schema}-{name[0]}p2", schema=schema, **{name[:2]: 2})
        mine = place.engine(f"{name}, kernel", kernel, tp=2, is_ep=is_ep)
        yield Comparison(f"{name} {schema}", mine, place.engine(f"{name}, checkpoint", packed, tp=2, is_ep=is_ep))


def groups(place: Place) -> Iterator[Comparison]:
    """Ranks that hold whole scale groups, beside a checkpoint that has the zeros already; two ranks on one GPU."""
    from tests.make.filled import write_filled

    for schema, inner, whole in (("int4-g64", 96, 128), ("int4-g128", 192, 256)):
        source = place.plain(intermediate=inner, hidden=512)
        filled = place.made(f"{source.name}-filled", partial(write_filled, source, inner=whole))
        ours = place.artifact(source, f"{schema}-groups", schema=schema, tp=2, tp_split="groups")
        even = place.artifact(filled, f"{schema}-even", schema=schema, tp=2)
        name = f"{schema}, I = {inner}"
        mine, other = place.engine(f"{name}, groups", ours, tp=2), place.engine(f"{name}, filled", even, tp=2)
        yield Comparison(f"{name}, tp 2 by groups", mine, other)


CASES: dict[str, Case] = {
    case.__name__: case for case in (float16, deepseek, inputs, static, mixed, multimodal, draft, ranks, groups)
}


# --- sources


def reword(folder: Path, **words: Any) -> None:
    """Change values of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **words}), encoding="utf-8")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's shards."""
    return {name: one for shard in sorted(folder.glob("*.safetensors")) for name, one in load_file(shard).items()}


def rewrite(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors into one shard, and the source's other files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: one.contiguous() for name, one in tensors.items()}
    for path in source.glob("*.json"):
        if path.name != "model.safetensors.index.json" and path.parent != folder:
            shutil.copyfile(path, folder / path.name)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


def write_static(folder: Path, source: Path) -> None:
    """Experts in fp8 with a scale per tensor, one for gate and up, and static scales of activations."""
    tensors = tensors_of(source)
    for name in [name for name in tensors if ".experts." in name and "up_proj" not in name]:
        twins = [name] if "down_proj" in name else [name, name.replace("gate_proj", "up_proj")]
        scale = torch.stack([tensors[twin].float().abs().max() for twin in twins]).max() / MAX
        for twin in twins:
            module = twin.removesuffix(".weight")
            tensors[twin] = (tensors[twin].float() / scale).clamp(-MAX, MAX).to(E4M3)
            tensors[f"{module}.weight_scale"] = scale.clone()
            tensors[f"{module}.input_scale"] = torch.tensor((24.0 if "down_proj" in twin else 8.0) / MAX)
    rewrite(folder, source, tensors)
    kept = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in PLAIN]
    words = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", *kept]}
    reword(folder, quantization_config=words)


def save_random(folder: Path, model_type: str, auto_class: str, **words: Any) -> None:
    """A model of transformers with random weights, of a size that keeps numbers as they are."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **words)
    model = getattr(transformers, auto_class).from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.05).add_(name.endswith("norm.weight"))
            else:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, max_shard_size="4GB")


def text_words(**words: Any) -> dict[str, Any]:
    """Values of a small language model's config."""
    common: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 1024,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 1024,
    }
    common |= {"moe_intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    return {**common, "num_experts_per_tok": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False, **words}


def write_qwen3_vl(folder: Path) -> None:
    """A tiny Qwen3-VL with experts, as transformers saves it."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = text_words(num_experts=16, rope_parameters=rope, mlp_only_layers=[], norm_topk_prob=True)
    vision: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 1024,
    }
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    save_random(folder, "qwen3_vl_moe", "AutoModelForImageTextToText", text_config=text, vision_config=vision)


def write_glm4_mtp(folder: Path) -> None:
    """A tiny GLM-4 with experts and a draft layer, which guesses right often enough to be used."""
    words: dict[str, Any] = {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    words |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "use_qk_norm": True}
    save_random(folder, "glm4_moe", "AutoModelForCausalLM", **text_words(**words))
    tensors, last, new = tensors_of(folder), f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    rolled = {name.replace(last, new): one.roll(1, 0) for name, one in tensors.items() if name.startswith(last)}
    ones, hidden = torch.ones(1024, dtype=torch.bfloat16), 1024
    looks = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).bfloat16()  # at the last token alone
    rolled |= {f"{new}enorm.weight": ones, f"{new}hnorm.weight": ones.clone(), f"{new}eh_proj.weight": looks}
    rolled |= {f"{new}shared_head.norm.weight": ones.clone(), f"{new}shared_head.head.weight": head.clone()}
    rolled[f"{new}embed_tokens.weight"] = embedding.clone()
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    rewrite(folder, folder, tensors | rolled)
    reword(folder, num_nextn_predict_layers=1)


# --- running


def comparisons(place: Place, names: list[str]) -> Iterator[Comparison | tuple[str, str]]:
    """Each named case's comparisons, as they are made; name and reason of a case that cannot be made."""
    for name in names:
        try:
            yield from CASES[name](place)
        except Exception as error:  # noqa: BLE001 - a line of the report; the others go on
            place_of = traceback.extract_tb(error.__traceback__)[-1]
            yield name, f"{type(error).__name__}: {error} ({place_of.filename}:{place_of.lineno})"


def place_of(a: argparse.Namespace) -> Place:
    """The place of a command line."""
    return Place(a.work, a.device, json.loads(a.words))
