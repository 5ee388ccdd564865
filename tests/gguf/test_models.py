"""Whole models in GGUF files, against llama.cpp's own conversion of tiny models (scripts/record_gguf.py)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hqconv.gguf.model
from hqconv.errors import InputError, RequestError
from hqconv.gguf.model import ARCHITECTURES
from hqconv.models.source_protocol import Source
from hqconv.sources.opening import open_source
from tests.make.command import call
from tests.make.conversions import assert_verified, run
from tests.make.gguf_models import (
    MODELS,
    QUANTIZED,
    WIDE,
    recorded,
    refused,
    rewrite,
    write,
    write_quantized,
)
from tests.make.hub_server import serve, use
from tests.make.qwen import read_tree
from tests.make.tensors import load_file

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
Tensor = tuple[np.ndarray[Any, Any], Any]  # data and ggml type
Kind, dequantize, quantize = gguf.GGMLQuantizationType, gguf.quants.dequantize, gguf.quants.quantize
CPU = torch.device("cpu")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What llama.cpp's converter wrote of each matrix; BF16 unless named here.
STORED = {"deepseek_v2": Kind.F16, "mixtral": Kind.F16, "olmoe": Kind.F32, "dots1": Kind.Q8_0}
# Keys of a config that change nothing of short texts.
SAME_KEYS = ("bos_token_id", "eos_token_id", "max_position_embeddings")
# Kept in float32 by the published models, and in bfloat16 by transformers' own tiny ones.
FLOAT32 = {"minimax_m2": ".block_sparse_moe.gate.weight", "ernie4_5_moe": ".mlp.gate.weight"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The original checkpoint of a case, as transformers writes it."""
    root = tmp_path_factory.mktemp("published")
    return cache(lambda case: write(case, root / case))


def read(source: Source, name: str) -> torch.Tensor:
    ref = source.tensors[name]
    data = bytearray(ref.num_bytes)
    source.read_into(ref, data)
    return torch.frombuffer(data, dtype=DTYPES[ref.dtype]).reshape(ref.shape)


def through(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """A published tensor after the type's own rounding, rounded to 16 bits."""
    if kind in (Kind.F32, Kind.BF16):
        return values
    if kind == Kind.F16:
        return values.half()
    floats = dequantize(quantize(values.float().numpy(), kind), kind)
    return torch.from_numpy(np.ascontiguousarray(floats)).bfloat16()


def without(name: str) -> Callable[..., Tensor | None]:
    return lambda tensor, *content: None if tensor == name else content


def as_kind(kind: Kind) -> Callable[..., Tensor]:
    """Quantize every matrix that llama.cpp would, but those whose rows are no whole blocks."""

    def change(name: str, data: np.ndarray[Any, Any], stored: Kind) -> Tensor:
        if stored == Kind.F32 or dequantize(data, stored).shape[-1] % 32:
            return data, stored
        return quantize(dequantize(data, stored), kind), kind

    return change


# --- against llama.cpp's conversion


def test_every_architecture_is_recorded() -> None:
    model_types = {name for row in ARCHITECTURES.values() for name in row.model_types}
    assert model_types - {"kimi_k2"} == {case for case in MODELS if not case.endswith("_yarn")}


@pytest.mark.parametrize("case", MODELS)
def test_every_tensor_is_the_published_one(
    tmp_path: Path, published: Callable[[str], Path], case: str
) -> None:
    kind = STORED.get(case, Kind.BF16)
    original = load_file(published(case) / "model.safetensors")
    with open_source(recorded(case, tmp_path)) as source, open_source(published(case)) as theirs:
        experts, expected = source.map_experts(), theirs.map_experts()
        assert set(experts.copied) == set(expected.copied)
        assert not experts.dropped
        for name in experts.copied:
            found, tensor = read(source, name), original[name]
            is_matrix = tensor.ndim > 1 and not re.search(
                r"(?:gate|router|router\.layer|_bias)(?:\.weight|$)", name
            )
            assert found.shape == tensor.shape, name
            if name.endswith(("e_score_correction_bias", FLOAT32.get(case, "none"))):
                assert found.dtype == torch.float32
                assert torch.equal(found, tensor.float()), name
                continue
            tensor = through(tensor, kind) if is_matrix else tensor
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name
        assert [layer.name for layer in experts.layers] == [layer.name for layer in expected.layers]
        for ours, layer in zip(experts.layers, expected.layers, strict=True):
            assert (ours.index, ours.top_k, ours.activation) == (
                layer.index,
                layer.top_k,
                layer.activation,
            )
            for expert in range(layer.num_experts):
                mine = source.read_expert(ours, expert, ours.roles, CPU)
                for role, matrix in theirs.read_expert(layer, expert, layer.roles, CPU).items():
                    values = matrix.values().bfloat16()
                    assert torch.equal(
                        mine[role].values().bfloat16(), through(values, kind).bfloat16()
                    ), (expert, role)
                    if matrix.bias is not None:
                        bias = mine[role].bias
                        assert bias is not None
                        assert torch.equal(bias, matrix.bias.float())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", MODELS)
def test_transformers_builds_the_same_model(
    tmp_path: Path, published: Callable[[str], Path], case: str
) -> None:
    """With the derived config, the weights fit by name and shape, and the logits are those of the original."""
    import transformers

    original = load_file(published(case) / "model.safetensors")
    with open_source(recorded(case, tmp_path)) as source:
        copied = source.map_experts().copied
        weights = {**original, **{name: read(source, name) for name in copied}}
        (tmp_path / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(published(case))
    assert type(config) is type(theirs)
    for key in SAME_KEYS:
        assert getattr(config, key, None) == getattr(theirs, key, None), key
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not [
        name for name in info["unexpected_keys"] if not name.startswith("model.layers.2.")
    ]  # the draft layer
    original_model = transformers.AutoModelForCausalLM.from_pretrained(
        published(case), dtype=torch.bfloat16
    )
    words = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        ours, expected = model.eval()(words).logits, original_model.eval()(words).logits
    if case == "dots1":
        assert (ours - expected).norm() < 0.05 * expected.norm()  # of 8-bit weights
    else:
        assert torch.equal(ours, expected) or (
            case == "deepseek_v2" and torch.allclose(ours, expected, atol=1e-2)
        )


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "granitemoeshared"])
def test_any_range_of_bytes_is_the_same(tmp_path: Path, case: str) -> None:
    generator = np.random.default_rng(0)
    with open_source(recorded(case, tmp_path)) as source:
        for name in source.map_experts().copied:
            ref = source.tensors[name]
            whole = bytearray(ref.num_bytes)
            source.read_into(ref, whole)
            for _ in range(5):
                start, end = sorted(generator.integers(0, ref.num_bytes + 1, 2).tolist())
                some = bytearray(end - start)
                source.read_into(ref, some, start)
                assert some == whole[start:end], (name, start, end)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "granitemoeshared"])
def test_memory_is_that_of_a_few_rows(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a head, or as many rows as a piece holds, are decoded at a time; the bytes stay the same."""
    with open_source(recorded(case, tmp_path)) as source:
        names = [
            name for name in source.map_experts().copied if source.tensors[name].num_bytes > 2048
        ]
        whole = {name: read(source, name) for name in names}
        sizes: list[int] = []
        plain = hqconv.gguf.model.dequantize

        def spy(raw: np.ndarray[Any, Any], ggml_type: str) -> np.ndarray[Any, Any]:
            floats = plain(raw, ggml_type)
            sizes.append(floats.size)
            return floats

        monkeypatch.setattr("hqconv.gguf.model.dequantize", spy)
        monkeypatch.setattr("hqconv.gguf.model._CHUNK_NUMBERS", 512)
        for name in names:
            assert torch.equal(read(source, name), whole[name]), name
        assert sizes
        assert max(sizes) <= 1024  # a head has 16 · 64 numbers at most


@pytest.mark.parametrize(
    "kind", [Kind.Q8_0, Kind.Q5_1, Kind.Q4_0, Kind.MXFP4], ids=lambda kind: kind.name
)
def test_quantized_rows_of_q_and_k(
    tmp_path: Path, published: Callable[[str], Path], kind: Kind
) -> None:
    """A row is quantized by itself: where llama.cpp put it changes nothing."""
    original = load_file(published("granitemoe") / "model.safetensors")
    path = rewrite(recorded("granitemoe", tmp_path / "plain"), tmp_path / "m.gguf", as_kind(kind))
    with open_source(path) as source:
        for name in source.map_experts().copied:
            is_matrix = original[name].ndim > 1 and "router" not in name
            assert torch.equal(
                read(source, name), through(original[name], kind) if is_matrix else original[name]
            ), name


# --- against llama.cpp's quantizer (scripts/record_gguf.py)


def test_a_model_of_llama_cpps_quantizer(tmp_path: Path, published: Callable[[str], Path]) -> None:
    """Q4_K_M has Q4_K, Q6_K and F32: every value is that of llama.cpp's dequantizer, at its place in the original."""
    path = write_quantized(tmp_path / "wide-Q4_K_M.gguf")
    digests = json.loads((QUANTIZED / "recorded.json").read_bytes())["values_sha256"]
    theirs = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert {
        name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in theirs.items()
    } == digests
    original = load_file(published(WIDE) / "model.safetensors")
    with open_source(path) as source, open_source(published(WIDE)) as expected:
        experts, layers = source.map_experts(), expected.map_experts().layers
        assert [layer.format.name for layer in experts.layers] == ["gguf Q4_K", "gguf Q4_K+Q6_K"]
        for name in experts.copied:
            found, tensor = read(source, name), original[name]
            assert found.shape == tensor.shape, name
            assert (found - tensor).norm() < 0.1 * tensor.norm(), name
        for ours, layer in zip(experts.layers, layers, strict=True):
            for expert in range(layer.num_experts):
                mine = source.read_expert(ours, expert, ours.roles, CPU)
                for role, matrix in expected.read_expert(layer, expert, layer.roles, CPU).items():
                    values = mine[role].values()
                    stack = {"w1": "gate", "w3": "up", "w2": "down"}[role]
                    stored = theirs[f"blk.{layer.index}.ffn_{stack}_exps.weight"][expert]
                    assert torch.equal(values, torch.from_numpy(stored))
                    assert (values - matrix.values()).norm() < 0.1 * values.norm()
    run(path, tmp_path / "out", "int8")
    assert_verified(tmp_path / "out", path)


# --- conversion


# --- files


def test_a_split_model(tmp_path: Path) -> None:
    path, folder = recorded("glm4_moe", tmp_path), tmp_path / "split"
    folder.mkdir()
    for number in range(3):
        rewrite(path, folder / f"glm-{number + 1:05d}-of-00003.gguf", part=(number, 3))
    with open_source(path) as whole:
        names = whole.map_experts().copied
        for typed in (folder, folder / "glm-00002-of-00003.gguf"):
            with open_source(typed) as source:
                assert len(source.files) == 3
                assert set(source.map_experts().copied) == set(names)
                assert all(torch.equal(read(source, name), read(whole, name)) for name in names)
                assert source.config == whole.config
    (folder / "glm-00003-of-00003.gguf").unlink()
    error = refused(folder, InputError, r"glm-00003-of-00003\.gguf")
    assert "missing" in error.what


def test_a_folder_of_several_models(tmp_path: Path) -> None:
    first, _ = recorded("qwen2_moe", tmp_path), recorded("mixtral", tmp_path)
    (tmp_path / "mmproj-qwen.gguf").write_bytes(b"of pictures")
    error = refused(tmp_path, RequestError, str(tmp_path))
    assert "mixtral, qwen2_moe" in str(error.found)
    with open_source(first) as source:
        assert source.name == source.config["model_type"] == "qwen2_moe"
        assert source.sidecar_files.names == ()
    (tmp_path / "mixtral.gguf").unlink()
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with open_source(tmp_path) as source:
        assert source.config["model_type"] == "qwen2_moe"
        assert source.sidecar_files.names == ("tokenizer.json",)


def test_the_publishers_config(tmp_path: Path, published: Callable[[str], Path]) -> None:
    recorded("mixtral", tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "mixtral"}', encoding="utf-8"
    )  # as repos of GGUF files have
    with open_source(tmp_path) as source:
        assert source.config["num_local_experts"] == 4
    config = json.loads((published("mixtral") / "config.json").read_bytes())
    words = {"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **words, "own": 1}), encoding="utf-8"
    )
    with open_source(tmp_path) as source:
        assert source.config["own"] == 1
        assert "quantization_config" not in source.config
        assert source.tensors["model.norm.weight"].dtype == "F16"
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "hidden_size": 48}), encoding="utf-8"
    )
    refused(tmp_path, InputError, "config.json: hidden_size")


# --- refusals


@pytest.mark.parametrize(
    ("case", "keys", "where"),
    [
        ("qwen3_moe", {"general.architecture": "qwen3next"}, "general.architecture"),
        ("qwen3_moe", {"qwen3moe.attention.clamp_kqv": 8.0}, r"qwen3moe\.attention\.clamp_kqv"),
        ("qwen3_moe", {"qwen3moe.attention.head_count": None}, r"attention\.head_count"),
        (
            "qwen3_moe",
            {"qwen3moe.rope.scaling.type": "longrope", "qwen3moe.rope.scaling.factor": 2.0},
            "rope.scaling",
        ),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func"),
        ("qwen3_moe", {"qwen3moe.rope.dimension_count": 16}, r"rope\.dimension_count"),
        ("deepseek_v3", {"deepseek2.expert_gating_func": None}, "expert_gating_func"),
        ("deepseek_v3", {"deepseek2.expert_group_count": None}, "expert_group_count"),
    ],
)
def test_unclear_metadata_is_refused(
    tmp_path: Path, case: str, keys: dict[str, Any], where: str
) -> None:
    path = rewrite(recorded(case, tmp_path / "plain"), tmp_path / "m.gguf", keys=keys)
    refused(path, RequestError, where)


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output.weight",
        "output_norm.weight",
        "blk.1.attn_v.weight",
        "blk.0.attn_q.bias",
        "blk.0.attn_q_norm.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.exp_probs_b.bias",
        "blk.1.ffn_up_shexp.weight",
        "blk.0.ffn_down.weight",
        "blk.1.ffn_down_exps.weight",
    ],
)
def test_a_missing_tensor_is_noticed(tmp_path: Path, name: str) -> None:
    path = recorded("glm4_moe", tmp_path / "plain")
    rewrite(path, tmp_path / "m.gguf", without(name))
    if name == "output.weight":  # then the embedding is both
        with open_source(tmp_path / "m.gguf") as source:
            assert source.config["tie_word_embeddings"]
    else:
        refused(tmp_path / "m.gguf", InputError, ".")


def test_another_size_of_heads_is_noticed(tmp_path: Path) -> None:
    """The order of rows of q and k depends on it."""
    keys = {"llama.rope.dimension_count": 8}
    path = rewrite(recorded("mixtral", tmp_path / "plain"), tmp_path / "m.gguf", keys=keys)
    refused(path, InputError, r"attn_[qk]\.weight")


def test_half_of_a_joined_tensor_is_noticed(tmp_path: Path) -> None:
    path = recorded("deepseek_v3", tmp_path / "plain")
    rewrite(path, tmp_path / "m.gguf", without("blk.1.attn_k_b.weight"))
    refused(tmp_path / "m.gguf", InputError, "layers.1.self_attn.k_b_proj")


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    raw = recorded("mixtral", tmp_path / "plain").read_bytes()
    assert raw.count(b"output_norm.weight") == 1
    path.write_bytes(raw.replace(b"output_norm.weight", b"output_n0rm.weight"))
    refused(path, InputError, r"m\.gguf:output_n0rm\.weight")
    path.write_bytes(raw.replace(b"blk.0.ffn_norm.weight", b"blk.0.ffn_norm.wei2ht"))
    refused(path, InputError, r"blk\.0\.ffn_norm\.wei2ht")


# --- the Hub


def test_a_repo_is_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo"
    first, second = recorded("mixtral", folder), recorded("qwen2_moe", folder)
    (folder / "Q8_0").mkdir()
    for number in range(2):
        rewrite(
            second,
            folder / "Q8_0" / f"big-Q8_0-{number + 1:05d}-of-00002.gguf",
            as_kind(Kind.Q8_0),
            part=(number, 2),
        )
    (folder / "README.md").write_text("# models", encoding="utf-8")
    with serve(folder) as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        with pytest.raises(RequestError) as caught:
            open_source("org/name", is_lazy=True)
        assert "Q8_0/big-Q8_0" in str(caught.value.found)
        for typed in ("org/name:Q8_0", "org/name/Q8_0/big-Q8_0-00001-of-00002.gguf"):
            with open_source(typed, is_lazy=True) as source:
                assert [file.name.rpartition("/")[2] for file in source.files] == [
                    f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)
                ]
                assert source.repo_id == "org/name"
        run(f"org/name/{first.name}", tmp_path / "out", "int8")
        assert_verified(tmp_path / "out", f"org/name/{first.name}")
    run(first, tmp_path / "local", "int8")
    trees = [read_tree(tmp_path / name / "experts") for name in ("out", "local")]
    assert trees[0] == trees[1]


def test_looking_at_a_repo_fetches_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo"
    path = recorded("mixtral", folder)
    with path.open("ab") as file:  # more than a request for a header takes
        file.truncate(path.stat().st_size + (64 << 20))
    with serve(folder) as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        for command in (
            ("inspect", "org/name"),
            ("convert", "org/name", "--schema", "int8", "--target", "sm90", "--dry-run"),
        ):
            done = call(*command)
            assert done.exit_code == 0, done.stdout + done.stderr
        assert hub.sent[path.name] < 3 * (4 << 20)
        assert path.name not in hub.whole
