"""`hqconv importance` against plain recomputations from what transformers' own modules are given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import hqconv
from hqconv.cli.app import app
from hqconv.conversion.collect_importance import collect, experts_modules, matched, token_batches
from hqconv.errors import RequestError
from hqconv.models.moe_layer import MoeLayer
from hqconv.sources.opening import open_source
from tests.make.families import make_family, moe_layers, save_family
from tests.make.importance import write_tokenizer

IDS = torch.arange(40) * 7 % 61 + 3
CPU = torch.device("cpu")
# On the disk mixtral's block is `block_sparse_moe`, in transformers it is `mlp`; the others multiply in other ways.
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "aria_text", "nemotron_h", "granitemoe")


def layers_of(folder: Path) -> tuple[MoeLayer, ...]:
    with open_source(folder) as source:
        return source.map_experts().layers


def recomputed(model: nn.Module, batches: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, nn.Module]]:
    """Of each module of experts, in layer order: its input [T, H], the chosen experts [T, k], and itself."""
    seen: list[tuple[torch.Tensor, torch.Tensor, nn.Module]] = []
    for _, _, module in moe_layers(model):
        calls: list[tuple[Any, ...]] = []
        handle = module.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids)
        handle.remove()
        x, chosen = (torch.cat([call[i].flatten(0, -2) for call in calls]) for i in (0, 1))
        seen.append((x.double(), chosen, module))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_the_modules(family: str, tmp_path: Path) -> None:
    model = save_family(tmp_path, family, torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 16, CPU)
    assert [ids.shape[1] for ids in batches] == [16, 16, 8]
    found = collect(model, batches, layers)
    expected = {f"{layer.name}.{gemm}" for layer in layers for gemm in ("w13", "w2")}
    assert set(found) == expected
    for layer, (x, _, _) in zip(layers, recomputed(model, batches), strict=True):
        values = found[f"{layer.name}.w13"]
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), x.square().mean(0), rtol=1e-5, atol=0)
        inner = found[f"{layer.name}.w2"]
        assert (inner.shape, inner.dtype) == ((layer.intermediate_size,), torch.float32)
        assert bool((inner > 0).all())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_inner_activations_are_those_of_the_chosen_experts(family: str, tmp_path: Path) -> None:
    """By hand: every token through each of its experts, silu(gate) * up."""
    model = save_family(tmp_path, family, torch.float32)
    layers, batches = layers_of(tmp_path), token_batches(IDS.tolist(), 40, CPU)
    found = collect(model, batches, layers)
    for layer, (x, chosen, module) in zip(layers, recomputed(model, batches), strict=True):
        rows = []
        for token, experts in zip(x, chosen.tolist(), strict=True):
            for expert in experts:
                gate, up = (module.gate_up_proj[expert].double() @ token).chunk(2)
                rows.append(functional.silu(gate) * up)
        assert len(rows) == 2 * len(IDS)
        expected = torch.stack(rows).square().mean(0).detach()
        torch.testing.assert_close(found[f"{layer.name}.w2"].double(), expected, rtol=1e-4, atol=0)


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
    expected = collect(model, token_batches(IDS.tolist(), 16, CPU), layers_of(src))
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
    assert (no_tokenizer.exit_code, "cannot load this model" in no_tokenizer.stderr) == (2, True)
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
        collect(model, [], layers)
    assert caught.value.where.endswith("w13")
    other = make_family("mixtral", torch.float32, hidden=128)
    with pytest.raises(RequestError, match="another size"):
        collect(other, batches, layers)
    experts = moe_layers(model)[0][2]
    experts.extra_proj = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RequestError, match="not understood") as caught:
        collect(model, batches, layers)
    assert "extra_proj" in caught.value.where
