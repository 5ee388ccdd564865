"""Sound checkpoints of every format with their originals, and faults planted between the two."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hqconv.checkup.check import CheckOptions, run_check
from hqconv.checkup.matrices import decoded
from hqconv.sources.opening import open_source
from tests.make.formats import FORMATS, Written, write

Json = dict[str, Any]
Experts = dict[str, torch.Tensor]  # w1, w3, w2, and their formats' cells as c1, c3, c2: [E, N, K]
OPTIONS = CheckOptions(layers=None, sample=None, num_threads=1, max_memory_bytes=1 << 30)
ROLES = {"w1": 0, "w3": 1, "w2": 2}


def is_there(name: str) -> bool:
    """Whether the package of a format is installed."""
    return not FORMATS[name].needs or importlib.util.find_spec(FORMATS[name].needs) is not None


def originals(written: Written, seed: int = 0) -> dict[str, Experts]:
    """Weights that round to the codes of a checkpoint, and the cells of these codes, by layer."""
    generator = torch.Generator().manual_seed(seed)
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


def write_original(folder: Path, written: Written, layers: dict[str, Experts]) -> Path:
    """Write weights as a float32 checkpoint with tensors of their own for each expert."""
    folder.mkdir(parents=True)
    tensors = {"model.norm.weight": torch.ones(8)}
    for layer, experts in layers.items():
        for role, word in zip(ROLES, written.spec.layout.words, strict=True):
            for e, values in enumerate(experts[role]):
                tensors[f"{layer}.{e}.{word}.weight"] = values.clone()
                bias = written.truth[layer].get(f"b{role[1]}")
                if bias is not None:
                    tensors[f"{layer}.{e}.{word}.bias"] = bias[e].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = json.loads((written.folder / "config.json").read_text())
    for key in ("quantization_config", "quantize"):
        words.pop(key, None)
    (folder / "config.json").write_text(json.dumps(words))
    return folder


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


def _neurons(x: Experts) -> None:
    order = torch.randperm(x["w1"].size(1), generator=torch.Generator().manual_seed(1))
    x["w1"], x["w3"], x["w2"] = (
        x["w1"][:, order].clone(),
        x["w3"][:, order].clone(),
        x["w2"][:, :, order].clone(),
    )


def _smooth(x: Experts) -> None:
    generator = torch.Generator().manual_seed(2)
    columns, rows = (
        torch.randn(x[role].size(2), generator=generator).mul(0.4).exp() for role in ("w1", "w2")
    )
    x["w1"], x["w3"] = x["w1"] * columns, x["w3"] * columns
    x["w3"], x["w2"] = x["w3"] * rows[:, None], x["w2"] / rows


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
HARMLESS: dict[str, tuple[Callable[[Experts], None], str]] = {
    "nothing": (lambda x: None, ""),
    "neurons in another order": (_neurons, "neuron-order"),
    "columns smoothed": (_smooth, "column-scales"),
}


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
    written = write(folder / "src", name)
    layers = originals(written)
    found = {}
    for number, fault in enumerate(faults):
        if applies(name, fault):
            changed = {
                layer: {k: v.clone() for k, v in experts.items()}
                for layer, experts in layers.items()
            }
            faults[fault][0](changed[next(iter(changed))])
            found[fault] = check(
                written.folder, write_original(folder / str(number), written, changed)
            )
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
