"""`hqconv importance` against plain recomputations from what transformers' own modules are given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.conversion.collect_importance import Measures, ProductSums, Routing, collect, experts_modules, matched
from hqconv.errors import RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.sources.opening import open_source
from tests.make.families import make_family, moe_layers, save_family
from tests.make.importance import write_tokenizer

IDS = torch.arange(40) * 7 % 61 + 3
CPU = torch.device("cpu")
# On the disk mixtral's block is `block_sparse_moe`, in transformers it is `mlp`; the others multiply in other ways.
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "aria_text", "nemotron_h", "granitemoe")


def token_batches(ids: list[int], context: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.tensor([ids[begin : begin + context]], device=device) for begin in range(0, len(ids), context)]


def layers_of(folder: Path) -> tuple[MoeLayer, ...]:
    with open_source(folder) as source:
        return source.map_experts().layers


class Call(NamedTuple):
    """A module of experts: its input [T, H], the chosen experts [T, k] and the router's weights [T, k], float64."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    module: nn.Module


def recomputed(model: nn.Module, batches: list[torch.Tensor]) -> list[Call]:
    """The calls of each module of experts, joined, in layer order."""
    seen = []
    for _, _, module in moe_layers(model):
        calls: list[tuple[Any, ...]] = []
        handle = module.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids)
        handle.remove()
        x, chosen, weights = (torch.cat([call[i].flatten(0, -2) for call in calls]) for i in range(3))
        seen.append(Call(x.double(), chosen, weights.double(), module))
    return seen


def by_hand(rows: list[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Mean of p² x² of rows (p, x), token by token."""
    total = sum((p * p * x.square() for p, x in rows), torch.zeros(()))
    mean: torch.Tensor = total / sum(p * p for p, _ in rows)
    return mean


def uses(call: Call, expert: int | None = None) -> list[tuple[float, int, int]]:
    """(router's weight, token, expert) of every use of an expert; None: of all."""
    pairs = zip(call.weights.tolist(), call.chosen.tolist(), strict=True)
    every = [(p, t, e) for t, (ps, es) in enumerate(pairs) for p, e in zip(ps, es, strict=True)]
    return [one for one in every if expert in (None, one[2])]


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_the_modules(family: str, tmp_path: Path) -> None:
    model = save_family(tmp_path, family, torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 16, CPU)
    assert [ids.shape[1] for ids in batches] == [16, 16, 8]
    done = collect(model, batches, layers)
    assert done.unweighted_layers == []
    found = done.means()
    expected = {f"{layer.name}.{gemm}" for layer in layers for gemm in ("w13", "w2")}
    assert set(found) == expected
    for layer, call in zip(layers, recomputed(model, batches), strict=True):
        values = found[f"{layer.name}.w13"]
        assert values.dtype == torch.float32
        torch.testing.assert_close(
            values.double(), by_hand([(p, call.x[t]) for p, t, _ in uses(call)]), rtol=1e-5, atol=0
        )
        inner = found[f"{layer.name}.w2"]
        assert (inner.shape, inner.dtype) == ((layer.intermediate_size,), torch.float32)
        assert bool((inner > 0).all())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_inner_activations_are_those_of_the_chosen_experts(family: str, tmp_path: Path) -> None:
    """By hand: every token through each of its experts, silu(gate) * up; all experts together, and each alone."""
    model = save_family(tmp_path, family, torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    found = collect(model, batches, layers).means()
    each = collect(model, batches, layers, Measures(per_expert=True, min_tokens=1)).means()
    few = collect(model, batches, layers, Measures(per_expert=True, min_tokens=20))
    for layer, call in zip(layers, recomputed(model, batches), strict=True):

        def inner(token: int, expert: int, call: Call = call) -> torch.Tensor:
            gate, up = (call.module.gate_up_proj[expert].double() @ call.x[token]).chunk(2)
            return (functional.silu(gate) * up).detach()

        name = f"{layer.name}.w2"
        assert len(uses(call)) == 2 * len(IDS)
        whole = by_hand([(p, inner(t, e)) for p, t, e in uses(call)])
        torch.testing.assert_close(found[name].double(), whole, rtol=1e-4, atol=0)
        assert each[name].shape == (layer.num_experts, layer.intermediate_size)
        rows = few.means()[name]
        num_own = 0
        for expert in range(layer.num_experts):
            own = uses(call, expert)
            mean = by_hand([(p, inner(t, e)) for p, t, e in own]) if own else whole
            torch.testing.assert_close(each[name][expert].double(), mean, rtol=1e-4, atol=0)
            torch.testing.assert_close(rows[expert].double(), mean if len(own) >= 20 else whole, rtol=1e-4, atol=0)
            num_own += len(own) >= 20
        assert 0 < num_own < layer.num_experts
    assert few.num_few() > 0


def shrinkage(rows: torch.Tensor, used: list[tuple[float, int, int]], repeats: int) -> float:
    """By hand, pair by pair: one less the variance of correlations over their squares, of rows p · x."""
    counts = torch.tensor([p * p for p, _, _ in used], dtype=torch.float64)
    mean = (rows.T @ rows / counts.sum()).numpy()
    squares = (rows.square().T @ rows.square()).numpy()
    variance = np.maximum(squares - mean**2 * float(counts.square().sum()), 0) / float(counts.sum()) ** 2 * repeats
    sizes = np.outer(np.diag(mean), np.diag(mean))
    pairs = [(i, j) for i in range(len(mean)) for j in range(len(mean)) if i != j]
    noise = sum(variance[i, j] / sizes[i, j] for i, j in pairs)
    return float(np.clip(1 - noise / sum(mean[i, j] ** 2 / sizes[i, j] for i, j in pairs), 0, 1))


@pytest.mark.parametrize(("num_tokens", "least", "most"), [(60, 0.3, 0.8), (4000, 0.95, 1.0)])
def test_shrunk_products_are_closer_to_the_true_ones(num_tokens: int, least: float, most: float) -> None:
    """Inputs with known products; correlations that are all chance become none."""
    random = np.random.default_rng(2)
    mixture, sizes = random.standard_normal((16, 128)), np.exp2(random.standard_normal(128))
    true = (mixture.T @ mixture / 16 + 0.1 * np.eye(128)) * np.outer(sizes, sizes)

    def measured(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = random.standard_normal((num_tokens, 128)) @ np.linalg.cholesky(matrix).T
        sums = ProductSums(128, CPU)
        sums.add(torch.from_numpy(x), torch.ones(num_tokens, dtype=torch.float64))
        return x.T @ x / num_tokens, sums.means()[0].double().numpy()

    def distance(products: np.ndarray) -> float:
        return float((((products - true) / np.outer(sizes, sizes)) ** 2)[~np.eye(128, dtype=bool)].sum())

    raw, shrunk = measured(true)
    np.testing.assert_allclose(np.diag(shrunk), np.diag(raw), rtol=1e-6)
    assert least < shrunk[0, 1] / raw[0, 1] < most
    assert distance(shrunk) < distance(raw) * (0.95 if num_tokens < 100 else 1.01)
    raw, shrunk = measured(np.diag(sizes))
    off = ~np.eye(128, dtype=bool)
    assert (shrunk[off] ** 2).sum() < 0.05 * (raw[off] ** 2).sum()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_products_of_columns_are_those_of_the_inputs(family: str, tmp_path: Path) -> None:
    model = save_family(tmp_path, family, torch.float32, hidden=192)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    found = collect(model, batches, layers, Measures(hessian=True)).means()
    assert len(found) == 4 * len(layers)
    for layer, call in zip(layers, recomputed(model, batches), strict=True):
        tiles = found[f"{layer.name}.w13.hessian"]
        assert (tiles.shape, tiles.dtype) == ((2, 128, 128), torch.float32)
        used = uses(call)
        rows = torch.stack([p * call.x[t] for p, t, _ in used])
        whole = rows.T @ rows / sum(p * p for p, _, _ in used)
        for tile, begin, size in ((tiles[0], 0, 128), (tiles[1, :64, :64], 128, 64)):
            columns = slice(begin, begin + size)
            expected = whole[columns, columns] * shrinkage(rows[:, columns], used, repeats=2)
            expected.diagonal().copy_(whole.diagonal()[columns])
            torch.testing.assert_close(tile.double(), expected, rtol=1e-4, atol=1e-7)
        assert not bool(tiles[1, 64:].any())
        assert not bool(tiles[1, :, 64:].any())
        for gemm in ("w13", "w2"):
            name = f"{layer.name}.{gemm}"
            diagonal = found[f"{name}.hessian"].diagonal(dim1=1, dim2=2).flatten()[: found[name].numel()]
            torch.testing.assert_close(diagonal, found[name], rtol=1e-5, atol=0)


def test_inputs_that_the_router_has_scaled_count_as_they_are(tmp_path: Path) -> None:
    """Llama 4 multiplies an expert's input by the router's weight, which is zero for tokens of other experts."""
    model = save_family(tmp_path, "llama4_text", torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    seen: list[torch.Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
        for _, _, module in moe_layers(model)
    ]
    done = collect(model, batches, layers, Measures(per_expert=True, min_tokens=1))
    for handle in handles:
        handle.remove()
    assert done.unweighted_layers == []
    found = done.means()
    for layer, x in zip(layers, seen, strict=True):
        for expert, rows in enumerate(x.view(layer.num_experts, -1, layer.hidden_size)):
            chosen = rows[rows.any(1)]
            assert 0 < len(chosen) < len(IDS)
            torch.testing.assert_close(
                found[f"{layer.name}.w13"][expert].double(), chosen.square().mean(0), rtol=1e-5, atol=0
            )


def test_router_weights_that_cannot_be_seen_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules whose rows come in another order: every token counts the same then, and the layers are named."""
    model = save_family(tmp_path, "mixtral", torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    right = Routing.of_expert

    def shifted(self: Routing, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        token, weights = right(self, expert)
        return (token + 1) % len(self.x), weights

    monkeypatch.setattr(Routing, "of_expert", shifted)
    done = collect(model, batches, layers)
    assert done.unweighted_layers == [layer.name for layer in layers]
    for layer, call in zip(layers, recomputed(model, batches), strict=True):
        plain = by_hand([(1.0, call.x[t]) for _, t, _ in uses(call)])
        torch.testing.assert_close(done.means()[f"{layer.name}.w13"].double(), plain, rtol=1e-5, atol=0)


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["importance", *map(str, arguments), "--device", "cpu"])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_command_writes_what_convert_takes(family: str, tmp_path: Path) -> None:
    src, text, out = tmp_path / "src", tmp_path / "text", tmp_path / "columns.safetensors"
    save_family(src, family, inner=64)
    write_tokenizer(src)
    text.write_text(" ".join(map(str, [*IDS.tolist(), 5, 6])))
    arguments = (src, "--text", text, "-o", out, "--context", 16, "--tokens", len(IDS))
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{out}: {2 * len(layers_of(src))} tensors from 40 tokens\n")
    assert "Running 40 tokens through the model on cpu." in done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(src, dtype="auto").eval()
    expected = collect(model, token_batches(IDS.tolist(), 16, CPU), layers_of(src)).means()
    found = load_file(out)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    options: dict[str, Any] = {"schema": "int4-g32", "target": "sm90", "device": "cpu", "quantizer": "mse"}
    hqconv.convert(src, tmp_path / "out", importance=out, **options)
    assert hqconv.verify(tmp_path / "out", src, checks=("files", "weights")).passed
    again = call(*arguments)
    assert (again.exit_code, "exists already" in again.stderr) == (4, True)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    save_family(tmp_path / "src", "mixtral", inner=64)
    return tmp_path / "src"


def test_a_text_that_cannot_be_used(mixtral: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "columns.safetensors"
    missing = call(mixtral, "--text", text, "-o", out)
    assert (missing.exit_code, "The text cannot be read" in missing.stderr) == (2, True)
    text.write_text("1 2 3")
    no_tokenizer = call(mixtral, "--text", text, "-o", out)
    assert (no_tokenizer.exit_code, "cannot run this model" in no_tokenizer.stderr) == (2, True)
    write_tokenizer(mixtral)
    text.write_text("")
    empty = call(mixtral, "--text", text, "-o", out)
    assert (empty.exit_code, "The text has no tokens" in empty.stderr) == (2, True)
    assert not out.exists()


def test_transformers_may_be_missing(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = call(mixtral, "--text", tmp_path / "text", "-o", tmp_path / "columns.safetensors")
    assert done.exit_code == 2
    assert "which is not installed" in done.stderr
    assert "Run: pip install 'transformers" in done.stderr


def test_what_cannot_be_matched_is_refused(tmp_path: Path) -> None:
    model = save_family(tmp_path, "mixtral", torch.float32)
    layers = layers_of(tmp_path)
    assert [layer for layer, _, _ in experts_modules(model)] == [0, 1]
    assert [module for _, module in matched(model, layers).values()] == [m for _, _, m in moe_layers(model)]
    with pytest.raises(RequestError, match="no layer of the checkpoint") as caught:
        collect(model, [], layers[:1])
    assert ".1." in caught.value.where
    dense = make_family("qwen3_moe", torch.float32)  # its second layer has no experts
    with pytest.raises(RequestError, match="not one module") as caught:
        collect(dense, [], layers)
    assert "layer 1" in caught.value.where


def test_what_is_not_seen_or_not_understood_is_refused(tmp_path: Path) -> None:
    model = save_family(tmp_path, "mixtral", torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    with pytest.raises(RequestError, match="No product") as caught:
        collect(model, [], layers).means()
    assert caught.value.where.endswith("w13")
    other = make_family("mixtral", torch.float32, hidden=128)
    with pytest.raises(RequestError, match="another size"):
        collect(other, batches, layers)
    experts = moe_layers(model)[0][2]
    experts.extra_proj = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RequestError, match="not understood") as caught:
        collect(model, batches, layers)
    assert "extra_proj" in caught.value.where
