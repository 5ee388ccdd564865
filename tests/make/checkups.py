"""Sound checkpoints of every format with their originals, and faults planted between the two.

    python -m tests.make.checkups

prints how many faults `hqconv check --against` names rightly, and the damage it finds in sound checkpoints.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hqconv.checkup.check import CheckOptions, run_check
from hqconv.checkup.matrices import decoded
from hqconv.sources.opening import open_source
from tests.make import small
from tests.make.formats import FORMATS, FormatSpec, Written, write
from tests.make.layouts import plain

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Experts = Tensors  # w1, w3, w2, and their formats' cells as c1, c3, c2: [E, N, K]
QUANTIZED = ("quantization_config", "quantize")
OPTIONS = CheckOptions(layers=None, sample=None, num_threads=1, max_memory_bytes=1 << 30)
ROLES = {"w1": 0, "w3": 1, "w2": 2}


def is_there(name: str) -> bool:
    """Whether the package of a format is installed."""
    return not FORMATS[name].needs or importlib.util.find_spec(FORMATS[name].needs) is not None


def originals(written: Written) -> dict[str, Experts]:
    """Weights that round to the codes of a checkpoint, and the cells of these codes, by layer."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Experts] = {}
    with open_source(written.folder) as source:
        for layer in source.map_experts().layers:
            experts: Experts = {}
            for role in layer.roles:
                weights, cells = [], []
                for expert in range(layer.num_experts):
                    matrix = decoded(
                        source.read_expert(layer, expert, (role,), torch.device("cpu"))[role], 4
                    )
                    size = matrix.cells
                    if size is None:  # floats, or codes that are no steps
                        is_rounded = layer.format.encoding != "float"
                        size = 0.1 * is_rounded * matrix.values.abs()
                    noise = torch.rand(size.shape, generator=generator) - 0.5
                    weights.append(matrix.values + 0.98 * noise * size)
                    cells.append(size)
                experts[role], experts["c" + role[1]] = torch.stack(weights), torch.stack(cells)
            found[layer.name] = experts
    return found


@dataclass(eq=False)
class Pair:
    """A checkpoint and its original, in memory: their tensors beside the experts and configs; `stored` are the experts
    of the checkpoint as they are in the file, `layers` those of the original.
    """

    written: Written
    stored: Tensors
    dense: Tensors
    config: Json
    layers: dict[str, Experts]
    original_dense: Tensors
    original_config: Json

    def copy(self) -> Pair:
        """A pair that may be changed."""
        return copy.deepcopy(self)

    def layer(self) -> Experts:
        """The original's first layer."""
        return next(iter(self.layers.values()))

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both, the original's experts as float32 tensors of their own."""
        ours = small.save(folder / "model", ({**self.stored, **self.dense}, self.config))
        for name in ("hf_quant_config.json", "quant_model_description.json"):
            if (self.written.folder / name).is_file():
                shutil.copy(self.written.folder / name, ours)
        tensors = dict(self.original_dense)
        words = dict(zip(ROLES, self.written.spec.layout.words, strict=True))
        for layer, experts in self.layers.items():
            for role, word in words.items():
                bias = self.written.truth[layer].get(f"b{role[1]}")
                for e, values in enumerate(experts[role]):
                    tensors[f"{layer}.{e}.{word}.weight"] = values
                    if bias is not None:
                        tensors[f"{layer}.{e}.{word}.bias"] = bias[e]
        return ours, small.save(folder / "original", (tensors, self.original_config))

    def check(self, folder: Path, *, alone: bool = False) -> Json:
        """The document of a check of the checkpoint, alone or against its original."""
        ours, original = self.save(folder)
        return check(ours, None if alone else original)


def pair_of(folder: Path, form: str | FormatSpec) -> Pair:
    """A sound checkpoint of a format with a few tensors beside the experts, and its original."""
    written = write(folder, form)
    layers = originals(written)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    with open_source(folder) as source:
        copied = source.map_experts().copied
    dense = {name: tensors.pop(name) for name in copied}
    original_config = {k: v for k, v in config.items() if k not in QUANTIZED}
    return Pair(written, tensors, dense, config, layers, copy.deepcopy(dense), original_config)


# --- faults: what the original has instead, so that the checkpoint is wrong beside it ----------------------------


def _swap(x: Experts, *roles: str) -> None:
    for role in roles:
        x[role][[0, 2]] = x[role][[2, 0]]


def _exchange(x: Experts) -> None:
    x["w1"][1], x["w3"][1] = x["w3"][1].clone(), x["w1"][1].clone()


def _transpose(x: Experts) -> None:
    rows, columns = x["w2"][1].shape
    x["w2"][1] = x["w2"][1].clone().reshape(columns, rows).t()


def _halves(x: Experts) -> None:
    """Gate and up alternate in the original's stack, which the checkpoint cut in halves."""
    stack = torch.cat([x["w1"], x["w3"]], 1)
    x["w1"], x["w3"] = stack[:, 0::2].clone(), stack[:, 1::2].clone()


def _some_rows(x: Experts) -> None:
    rows = x["w1"].size(1)
    x["w1"][1, rows // 4 : rows // 2] = x["w1"][1, rows // 4 : rows // 2].roll(1, 0)


def _stale(x: Experts, share: float) -> None:
    w = x["w3"][1]
    noise = (
        torch.randn(w.shape, generator=torch.Generator().manual_seed(3)) * w.square().mean().sqrt()
    )
    x["w3"][1] = (1 - share**2) ** 0.5 * w + share * noise


def _pairs(x: Experts) -> None:
    x["w1"][0] = x["w1"][0].unflatten(1, (-1, 2)).flip(2).flatten(1)


def _scales(x: Experts) -> None:
    w = x["w1"][1]
    x["w1"][1] = (
        w * torch.randn(len(w), 1, generator=torch.Generator().manual_seed(5)).mul(0.7).exp()
    )


def _offset(x: Experts) -> None:
    x["w2"][1] -= x["c2"][1]


def _inverted(x: Experts) -> None:
    """The checkpoint's scales, to which integers' cells are equal, are the inverses of the original's."""
    x["w2"][1] *= (x["c2"][1].median() / x["c2"][1]).square()


def _factor(x: Experts, factor: float) -> None:
    x["w2"][2] *= factor


# name → the fault, the kinds that name it rightly, part of the text
FAULTS: dict[str, tuple[Callable[[Experts], None], set[str], str]] = {
    "two experts swapped": (lambda x: _swap(x, "w1", "w3", "w2"), {"swapped"}, "expert 2"),
    "down of two experts swapped": (lambda x: _swap(x, "w2"), {"swapped"}, "expert 2"),
    "gate and up exchanged": (_exchange, {"gate-up-swapped"}, "w3 of expert 1"),
    "transposed": (_transpose, {"transposed"}, ""),
    "rows shifted by one": (
        lambda x: x["w1"].__setitem__(1, x["w1"][1].roll(1, 0)),
        {"rows"},
        "shifted by",
    ),
    "rows shifted by 17": (
        lambda x: x["w2"].__setitem__(1, x["w2"][1].roll(17, 0)),
        {"rows"},
        "shifted by 17",
    ),
    "a quarter of the rows shifted": (_some_rows, {"rows"}, "Some rows"),
    "cut in halves": (_halves, {"gate-up-rows"}, "halves"),
    "unrelated weights": (lambda x: _stale(x, 1.0), {"unrelated"}, ""),
    "half another version": (lambda x: _stale(x, 0.95), {"stale"}, ""),
    "the other sign": (lambda x: x["w1"][0].neg_(), {"sign"}, ""),
    "factor 2": (lambda x: _factor(x, 0.5), {"factor"}, ""),
    "factor 1/448": (lambda x: _factor(x, 448.0), {"factor"}, "0.00"),
    "pairs of columns exchanged": (_pairs, {"columns"}, "pairs"),
    "scales of other rows": (_scales, {"scales"}, ""),
    "scales inverted": (_inverted, {"scales"}, "inverted"),
    "zero points off by one": (_offset, {"zero-points"}, ""),
}

# --- what is no damage: the checkpoint is the same function ---------------------------------------------------------


def _order_neurons(pair: Pair, order: torch.Tensor) -> None:
    x = pair.layer()
    for role in ("w1", "w3"):
        x[role] = x[role][:, order]
    x["w2"] = x["w2"][:, :, order]


def _neurons(pair: Pair, how: str) -> None:
    numbers = torch.arange(pair.layer()["w1"].size(1))
    random = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))]
    for order in {"random": [random], "shifted": [numbers.roll(1)], "pairs": [numbers ^ 1]}.get(
        how, [random, numbers.roll(3)]
    ):
        _order_neurons(pair, order)


def _of_first(pair: Pair, key: str) -> str:
    """The name of the first layer's router, or of the norm before its experts."""
    return str(getattr(pair.written.spec.layout, key)).format(layer=0)


def _smooth(pair: Pair) -> None:
    x, generator = pair.layer(), torch.Generator().manual_seed(2)
    columns, rows = (
        torch.randn(x[role].size(2), generator=generator).mul(0.4).exp() for role in ("w1", "w2")
    )
    _scale_inputs(pair, columns)
    x["w3"], x["w2"] = x["w3"] * rows[:, None], x["w2"] / rows


def _scale_inputs(pair: Pair, columns: torch.Tensor) -> None:
    x, theirs = pair.layer(), pair.original_dense
    x["w1"], x["w3"] = x["w1"] * columns, x["w3"] * columns
    norm, router = _of_first(pair, "norm"), _of_first(pair, "router")
    theirs[norm] = theirs[norm].float() / columns
    theirs[router] = theirs[router].float() * columns


def _scale_outputs(pair: Pair, factor: float) -> None:
    pair.layer()["w3"] *= factor
    pair.layer()["w2"] /= factor


def _move_experts(pair: Pair) -> None:
    """The checkpoint's experts and the rows of its router are in another order."""
    x, router = pair.layer(), _of_first(pair, "router")
    order = torch.arange(len(x["w1"])).roll(1)
    for key in x:
        x[key] = x[key][order]
    for name in (router, router.removesuffix("weight") + "e_score_correction_bias"):
        if name in pair.original_dense:
            pair.original_dense[name] = pair.original_dense[name][order]


HARMLESS: dict[str, tuple[Callable[[Pair], None], str]] = {
    "nothing": (lambda x: None, ""),
    "neurons in another order": (lambda x: _neurons(x, "random"), "neuron-order"),
    "neurons shifted": (lambda x: _neurons(x, "shifted"), "neuron-order"),
    "neurons exchanged in pairs": (lambda x: _neurons(x, "pairs"), "neuron-order"),
    "neurons exchanged twice": (lambda x: _neurons(x, "twice"), "neuron-order"),
    "columns smoothed": (_smooth, "column-scales"),
    "up times 4, down over 4": (lambda x: _scale_outputs(x, 0.25), ""),
    "up and down negated": (lambda x: _scale_outputs(x, -1.0), ""),
}

# --- what publishers do wrong, in whole models -----------------------------------------------------------------------

RICH = ("plain", "fp8-block", "ct-int4-g32", "modelopt-nvfp4")
PLACE = "model.layers.1."
ROUTER, GATE = f"{PLACE}mlp.gate.weight", f"{PLACE}mlp.experts.1.gate_proj.weight"
BIAS, HEAD = f"{PLACE}mlp.gate.e_score_correction_bias", "lm_head.weight"
NORM, Q = f"{PLACE}input_layernorm.weight", f"{PLACE}self_attn.q_proj.weight"
Q_NORM, SHARED = f"{PLACE}self_attn.q_norm.weight", f"{PLACE}mlp.shared_expert.up_proj.weight"
CONFIG: Json = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 2.5,
}


def rich_pair(folder: Path, name: str) -> Pair:
    """A sound checkpoint of five layers with attention, shared experts and a head, and its original."""
    spec = FormatSpec(plain, {}, "") if name == "plain" else FORMATS[name]
    pair = pair_of(folder, replace(spec, layers=(spec.encode,) * 4))
    generator = torch.Generator().manual_seed(7)
    hidden = pair.dense["model.embed_tokens.weight"].size(1)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(0.05).bfloat16()

    more = {"model.norm.weight": 1 + matrix(hidden), HEAD: matrix(64, hidden)}
    for layer in range(5):
        place = f"model.layers.{layer}."
        for word in ("q_proj", "k_proj", "v_proj", "o_proj"):
            more[f"{place}self_attn.{word}.weight"] = matrix(hidden, hidden)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            more[f"{place}{norm}.weight"] = 1 + matrix(hidden // 4)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            more[f"{place}{norm}.weight"] = 1 + matrix(hidden)
        for word in ("gate_proj", "up_proj", "down_proj"):
            more[f"{place}mlp.shared_expert.{word}.weight"] = matrix(hidden, hidden)
        num_experts = len(pair.layer()["w1"])
        more[f"{place}mlp.gate.e_score_correction_bias"] = 7 + matrix(num_experts).float()
    for tensors, config in ((pair.dense, pair.config), (pair.original_dense, pair.original_config)):
        tensors |= {name: tensor.clone() for name, tensor in more.items()}
        config |= CONFIG
    return pair


def _noise(tensor: torch.Tensor, share: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
    return (tensor.float() + share * noise).to(tensor.dtype)


def _fill(name: str, value: float, part: slice = slice(None)) -> Callable[[Pair], None]:
    return lambda pair: pair.dense[name].view(-1).__setitem__(part, value)


def _change(*names: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Pair], None]:
    return lambda pair: pair.dense.update({name: by(pair.dense[name]) for name in names})


def _drop(name: str) -> Callable[[Pair], None]:
    return lambda pair: pair.dense.__delitem__(name)


def _set(**keys: object) -> Callable[[Pair], None]:
    return lambda pair: pair.config.update(keys)


def stale_layer(pair: Pair, share: float) -> None:
    """All experts of a layer are of another version."""
    x = pair.layers["model.layers.2.mlp.experts"]
    for role in ROLES:
        x[role] = _noise(x[role], share)


def _some_columns(pair: Pair) -> None:
    w = pair.layer()["w2"][1]
    w[:, : w.size(1) // 4] = _noise(w[:, : w.size(1) // 4], 30) / 30


def _times(role: str, factor: float) -> Callable[[Pair], None]:
    return lambda pair: pair.layer().update({role: pair.layer()[role] / factor})


def _gate_columns(pair: Pair) -> None:
    w = pair.layer()["w1"]
    w[:, :, : w.size(2) // 2] /= 2000
    w[:, :, w.size(2) // 2 :] /= 2300


def _input_scale(value: float) -> Callable[[Pair], None]:
    return lambda pair: pair.stored.update(
        {GATE.replace("weight", "input_scale"): torch.tensor(value)}
    )


def _hole(pair: Pair) -> None:
    """A run of an expert's bytes was never written."""
    parts = [x for name, x in pair.stored.items() if name.startswith(GATE)]
    data = max(parts, key=lambda x: x.nbytes).view(-1).view(torch.uint8)
    data[len(data) // 2 : len(data) * 3 // 4] = 0


def _no_scales(pair: Pair) -> None:
    name = f"{PLACE}mlp.experts.1.gate_proj.weight_scale"
    data = pair.stored[name].view(torch.uint8)
    data[: len(data) // 4] = 0


# name → the fault, whether it is damage, the kinds that name it rightly, part of the text
Published = tuple[Callable[[Pair], None], bool, set[str], str]
ALONE_TOO: dict[str, Published] = {
    "NaN in a projection": (_fill(Q, torch.nan, slice(5, 6)), True, {"nan"}, Q),
    "NaN in a norm of queries": (_fill(Q_NORM, torch.nan, slice(5, 6)), True, {"nan"}, Q_NORM),
    "infinity in the embedding": (
        _fill("model.embed_tokens.weight", torch.inf, slice(9, 10)),
        True,
        {"nan"},
        "embed",
    ),
    "a zero head": (_fill(HEAD, 0), True, {"constant"}, "lm_head"),
    "a projection of one number": (_fill(Q, 0.5), True, {"constant"}, Q),
    "a zero router": (_fill(ROUTER, 0), False, {"zero"}, "mlp.gate"),
    "a norm of queries missing": (_drop(Q_NORM), True, {"missing"}, Q_NORM),
    "the final norm missing": (_drop("model.norm.weight"), False, {"missing"}, "norm"),
    "the embedding missing": (_drop("model.embed_tokens.weight"), False, {"missing"}, "embed"),
    "an embedding of fewer words": (
        _change("model.embed_tokens.weight", by=lambda x: x[:60]),
        True,
        {"broken"},
        "embed",
    ),
    "a final norm of another size": (
        _change("model.norm.weight", by=lambda x: x[:-8]),
        True,
        {"broken"},
        "norm",
    ),
    "a router as integers": (_change(ROUTER, by=lambda x: x.char()), True, {"broken"}, ROUTER),
    "a norm as booleans": (_change(NORM, by=lambda x: x.bool()), True, {"broken"}, NORM),
    "NaN in a router of float64": (
        _change(ROUTER, by=lambda x: x.double() * torch.nan),
        True,
        {"nan"},
        ROUTER,
    ),
    "a bias of the router": (
        lambda pair: pair.dense.update({f"{PLACE}mlp.gate.bias": torch.ones(4)}),
        False,
        {"loader"},
        "mlp.gate.bias",
    ),
    "an activation scale of NaN": (_input_scale(torch.nan), True, {"nan"}, "input_scale"),
    "an activation scale of infinity": (_input_scale(torch.inf), True, {"nan"}, "input_scale"),
    "an activation scale of zero": (_input_scale(0.0), True, {"scale-range"}, "input_scale"),
    "a hole in an expert": (_hole, False, {"hole", "twin"}, ""),
    "scales of zero": (_no_scales, False, {"zero"}, "weight"),
}
AGAINST: dict[str, Published] = {
    "router rows in another order": (
        _change(ROUTER, by=lambda x: x.roll(1, 0)),
        True,
        {"rows"},
        "mlp.gate",
    ),
    "a foreign router": (
        _change(ROUTER, by=lambda x: _noise(x, 30)),
        True,
        {"stale", "unrelated"},
        "mlp.gate",
    ),
    "a router of another step": (
        _change(ROUTER, by=lambda x: _noise(x, 0.05)),
        True,
        {"stale"},
        "mlp.gate",
    ),
    "a router of half the size": (
        _change(ROUTER, by=lambda x: x / 2),
        True,
        {"factor"},
        "mlp.gate",
    ),
    "a norm minus one": (_change(NORM, by=lambda x: x - 1), True, {"stale"}, NORM),
    "a norm of another layer": (
        lambda pair: pair.dense.update({NORM: pair.dense["model.norm.weight"]}),
        True,
        {"stale"},
        NORM,
    ),
    "a projection of another version": (
        _change(Q, by=lambda x: _noise(x, 0.05)),
        True,
        {"stale"},
        Q,
    ),
    "a projection with rows in another order": (
        _change(Q, by=lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)),
        True,
        {"rows"},
        Q,
    ),
    "a projection transposed": (_change(Q, by=lambda x: x.t().clone()), True, {"transposed"}, Q),
    "a projection of the other sign": (_change(Q, by=lambda x: -x), True, {"sign"}, Q),
    "a projection times 448": (_change(Q, by=lambda x: x * 448), True, {"factor"}, Q),
    "two projections exchanged": (
        lambda pair: pair.dense.update({Q: pair.dense[Q.replace("q_proj", "k_proj")]}),
        True,
        {"stale"},
        Q,
    ),
    "shared experts of another step": (
        _change(SHARED, by=lambda x: _noise(x, 0.02)),
        True,
        {"stale"},
        "shared_expert",
    ),
    "a correction that was rounded": (
        _change(BIAS, by=lambda x: x.bfloat16().float()),
        False,
        {"stale"},
        "correction",
    ),
    "a correction of another step": (
        _change(BIAS, by=lambda x: x + torch.arange(len(x)) / 4),
        True,
        {"stale"},
        "correction",
    ),
    "a head of another version": (
        _change(HEAD, by=lambda x: _noise(x, 0.1)),
        True,
        {"stale"},
        "lm_head",
    ),
    "a head missing": (_drop(HEAD), True, {"missing"}, "lm_head"),
    "the final norm lost": (_drop("model.norm.weight"), True, {"missing"}, "norm"),
    "the embedding lost": (_drop("model.embed_tokens.weight"), True, {"missing"}, "embed"),
    "shared experts lost": (_drop(SHARED), True, {"missing"}, "shared_expert"),
    "other experts per token": (
        _set(num_experts_per_tok=1),
        True,
        {"config"},
        "num_experts_per_tok",
    ),
    "weights of experts not normed": (
        _set(norm_topk_prob=False),
        True,
        {"config"},
        "norm_topk_prob",
    ),
    "another activation": (_set(hidden_act="gelu"), True, {"config"}, "hidden_act"),
    "another rotation of positions": (_set(rope_theta=10000.0), True, {"config"}, "rope_theta"),
    "another epsilon": (_set(rms_norm_eps=1e-5), True, {"config"}, "rms_norm_eps"),
    "another scoring": (_set(scoring_func="sigmoid"), True, {"config"}, "scoring_func"),
    "other heads": (_set(num_key_value_heads=2), True, {"config"}, "num_key_value_heads"),
    "another sum of experts": (_set(routed_scaling_factor=1.5), True, {"config"}, "routed_scaling"),
    "a layer of another version": (
        lambda pair: stale_layer(pair, 0.5),
        True,
        {"stale"},
        "model.layers.2",
    ),
    "a quarter of down's columns": (_some_columns, True, {"columns", "stale"}, "w2"),
    "gate times 10": (_times("w1", 10), True, {"factor"}, "w1"),
    "down times 10": (_times("w2", 10), True, {"factor"}, "w2"),
    "up times 4 alone": (_times("w3", 4), True, {"factor"}, "w3"),
    "gate negated": (_times("w1", -1), True, {"sign"}, "w1"),
    "gate's columns times 2000": (_gate_columns, True, {"scales", "factor"}, "w1"),
}
SOUND: dict[str, Callable[[Pair], None]] = {
    "nothing": lambda pair: None,
    "experts and router moved": _move_experts,
    "norm over 4, gate and up times 4": lambda pair: _scale_inputs(pair, torch.tensor(0.25)),
    "a router in float32": _change(ROUTER, by=torch.Tensor.float),
    "a norm in float16": _change(NORM, by=torch.Tensor.half),
    "a head with more rows": _change(HEAD, by=lambda x: torch.cat([x, x[:8] * 0])),
    "other dropout": _set(
        attention_dropout=0.1, transformers_version="5.0.0", torch_dtype="float16"
    ),
    "longer positions": _set(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "rope under its new name": lambda pair: pair.config.update(
        rope_parameters={"rope_theta": pair.config.pop("rope_theta"), "rope_type": "default"}
    ),
    "another model_type's prefix": lambda pair: _rename(pair, "model.", "model.language_model."),
    "positions stored": lambda pair: pair.original_dense.update(
        {f"{PLACE}self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "a fine-tuned whole": lambda pair: pair.dense.update(
        {name: _noise(x, 0.05) for name, x in pair.dense.items() if x.dtype == torch.bfloat16}
    ),
}


def _rename(pair: Pair, old: str, new: str) -> None:
    for tensors in (pair.dense, pair.stored):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)


def has(fault: str, name: str) -> bool:
    """Whether a fault can be in a format at all."""
    is_of_nvfp4 = "activation scale" in fault or fault == "scales of zero"
    return name == "modelopt-nvfp4" or not is_of_nvfp4


def is_published_named(fault: str, document: Json) -> bool:
    """Whether a fault is named rightly: all damage is of the right kind or at the right place, or it is a notice."""
    _, is_damage, kinds, text = {**ALONE_TOO, **AGAINST}[fault]
    findings = document["damage"] + (not is_damage) * document["notices"]
    named = [x for x in findings if x["kind"] in kinds and text in str(x)]
    return bool(named) and all(x["kind"] in kinds or text in str(x) for x in document["damage"])


FEW_LEVELS = ("gptq-int2", "bitnet", "bitnet-auto")  # formats whose rounding hides moderate changes
MISSED = {
    (name, fault) for name in FEW_LEVELS for fault in ("half another version", "factor 2")
}  # at most


def applies(name: str, fault: str) -> bool:
    """Whether a fault can be in a format at all."""
    direct = FORMATS[name].direct
    if fault == "scales inverted":
        return direct.startswith("int") and "act" not in name
    return direct.endswith("zp") if fault == "zero points off by one" else True


def check(ckpt: Path, original: Path | None) -> Json:
    """The document of a check."""
    with open_source(ckpt) as source:
        if original is None:
            return run_check(source, None, OPTIONS)
        with open_source(original) as theirs:
            return run_check(source, theirs, OPTIONS)


def planted(name: str, folder: Path, faults: dict[str, Any]) -> dict[str, Json]:
    """Documents of a format's checkpoint against originals with faults, by fault."""
    pair, found = pair_of(folder / "src", name), {}
    for number, fault in enumerate(faults):
        if applies(name, fault):
            changed, change = pair.copy(), faults[fault][0]
            change(changed if fault in HARMLESS else changed.layer())
            found[fault] = changed.check(folder / str(number))
    return found


def is_named(fault: str, document: Json) -> bool:
    """Whether all damage is of the right kind, and says what it should."""
    _, kinds, text = FAULTS[fault]
    damage = document["damage"]
    return (
        bool(damage)
        and {x["kind"] for x in damage} <= kinds
        and any(text in str(x) for x in damage)
    )


def published(
    name: str, folder: Path, start: int = 0, step: int = 1
) -> Iterator[tuple[str, bool, Json]]:
    """Faults and sound changes of whole models in a format: name, whether it is sound, and the document.

    start, step: of every how many of them which one.
    """
    pair = rich_pair(folder / "src", name)
    changes: list[tuple[str, Callable[[Pair], None], bool, bool]] = []
    for alone, table in ((True, ALONE_TOO), (False, ALONE_TOO), (False, AGAINST)):
        changes += [(key, row[0], False, alone) for key, row in table.items() if has(key, name)]
    for alone in (True, False):
        changes += [(key, change, True, alone) for key, change in SOUND.items()]
    for number, (key, change, is_sound, alone) in enumerate(changes[start::step]):
        changed = pair.copy()
        change(changed)
        yield key, is_sound, changed.check(folder / str(number), alone=alone)


def main() -> None:
    right, all_, alarms, sound = Counter[str](), Counter[str](), list[str](), 0
    for name in RICH:
        with tempfile.TemporaryDirectory() as folder:
            for fault, is_sound, document in published(name, Path(folder)):
                if is_sound:
                    sound += 1
                    alarms += [f"{name}: {fault}: {x}" for x in document["damage"]]
                    continue
                all_["what publishers do wrong"] += 1
                if is_published_named(fault, document):
                    right["what publishers do wrong"] += 1
                else:
                    print(f"{name}: {fault}: {_shown(document)}", flush=True)
    for name in filter(is_there, FORMATS):
        with tempfile.TemporaryDirectory() as folder:
            found = planted(name, Path(folder), {**FAULTS, **HARMLESS})
            alone = check(Path(folder, "src"), None)
        sound += 1 + len(HARMLESS)
        alarms += [f"{name}: alone: {x}" for x in alone["damage"]]
        for fault, document in found.items():
            if fault in HARMLESS:
                alarms += [f"{name}: {fault}: {x}" for x in document["damage"]]
                continue
            all_[fault] += 1
            right[fault] += is_named(fault, document)
            if not is_named(fault, document):
                print(f"{name}: {fault}: {_shown(document)}", flush=True)
    for fault in all_:
        print(f"| {fault} | {right[fault]} of {all_[fault]} |")
    print(
        f"{right.total()} of {all_.total()} named rightly; {len(alarms)} false alarms in {sound} sound checks"
    )
    print("\n".join(alarms))


def _shown(document: Json) -> list[tuple[str, ...]]:
    findings = [*document["damage"], *document["notices"]]
    return [(x["kind"], x["what"], x["where"], x["found"]) for x in findings]


if __name__ == "__main__":
    main()
