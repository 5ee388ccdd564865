"""What transformers, hqconv and a reader see in the checkpoints of scripts/make_checkpoint.py."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from hqconv.models.expert_map import map_experts
from hqconv.sources.opening import open_source
from scripts import make_checkpoint
from scripts.make_checkpoint import MODELS, main

TINY = ("--hidden=128", "--intermediate=64", "--layers=2", "--experts=4", "--top-k=2", "--vocab=64")


def make(out: Path, *options: str) -> Path:
    main([str(out), *TINY, *options])
    return out


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_loads_every_tensor(tmp_path: Path, model_type: str, dtype: str) -> None:
    out = make(tmp_path / "m", "--model-type", model_type, "--dtype", dtype, "--shard-size", "200KB")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert type(model).__name__ == MODELS[model_type].architecture
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    assert model.dtype == getattr(torch, dtype)
    logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    assert tokenizer("<s> </s>")["input_ids"] == [1, 2]


@pytest.mark.parametrize("model_type", MODELS)
def test_hqconv_maps_every_expert(tmp_path: Path, model_type: str) -> None:
    out = make(tmp_path / "m", "--model-type", model_type)
    with open_source(out) as checkpoint:
        found = map_experts(checkpoint.tensors, checkpoint.config)
    assert [layer.num_experts for layer in found.layers] == [4] * (1 if model_type == "deepseek_v3" else 2)
    assert {(layer.hidden_size, layer.intermediate_size, layer.top_k) for layer in found.layers} == {(128, 64, 2)}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again = make(tmp_path / "a"), make(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_values_depend_on_seed_and_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(make(tmp_path / "a"))
    monkeypatch.setattr(make_checkpoint, "NUM_THREADS", 3)
    other_shards = load(make(tmp_path / "b", "--shard-size", "100KB"))
    assert base.keys() == other_shards.keys()
    assert all(torch.equal(base[name], other_shards[name]) for name in base)
    deeper = load(make(tmp_path / "c", "--layers", "3"))
    assert all(torch.equal(base[name], deeper[name]) for name in base)
    reseeded = load(make(tmp_path / "d", "--seed", "1"))
    assert not any(torch.equal(base[name], reseeded[name]) for name in base)
    digests = {tensor.view(torch.uint8).numpy().tobytes() for tensor in base.values()}
    assert len(digests) == len(base)


def test_chunks_do_not_change_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(make(tmp_path / "a"))
    monkeypatch.setattr(make_checkpoint, "CHUNK_ELEMENTS", 1000)
    chunked = load(make(tmp_path / "b"))
    assert all(torch.equal(base[name], chunked[name]) for name in base)


def test_weights_have_heavy_channels_and_uneven_rows(tmp_path: Path) -> None:
    out = make(tmp_path / "m", "--hidden", "1024", "--intermediate", "512", "--layers", "1", "--dtype", "float32")
    weight = load(out)["model.layers.0.mlp.experts.0.gate_proj.weight"]
    columns = weight.std(0).sort(descending=True).values
    assert (columns[:2] > 8 * columns.median()).all()
    assert columns[2] < 2 * columns.median()
    assert columns.median() == pytest.approx(1024**-0.5, rel=0.25)
    rows = weight[:, weight.std(0) < 2 * columns.median()].std(1)
    assert rows.log().std() == pytest.approx(0.3, rel=0.15)


def test_shards_and_index_agree(tmp_path: Path) -> None:
    out = make(tmp_path / "m", "--model-type", "deepseek_v3", "--shard-size", "100KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = load(out)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    shards = sorted(out.glob("model-*.safetensors"))
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert len(shards) > 3
    for path in shards:
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
            assert file.metadata() == {"format": "pt"}
        size = sum(tensors[key].nbytes for key in keys)
        assert size <= 100_000 or len(keys) == 1
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    names = {path.name for path in make(tmp_path / "m", "--shard-size", "1GB").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


def test_sparse_layout_of_terabytes_takes_no_disk_and_opens_fast(tmp_path: Path) -> None:
    start = time.monotonic()
    out = make(
        tmp_path / "m",
        *("--sparse", "--model-type=deepseek_v3", "--layers=60", "--experts=384", "--top-k=8"),
        *("--hidden=7168", "--intermediate=2048", "--vocab=163840", "--shard-size=5GB"),
    )
    with open_source(out) as checkpoint:
        found = map_experts(checkpoint.tensors, checkpoint.config)
    assert time.monotonic() - start < 120  # it reads no tensor
    assert len(found.layers) == 59
    assert checkpoint.total_bytes > 2e12
    assert sum(512 * path.stat().st_blocks for path in out.iterdir()) < 50e6


def test_sparse_has_the_same_headers(tmp_path: Path) -> None:
    full, sparse = make(tmp_path / "a"), make(tmp_path / "b", "--sparse")
    with open_source(full) as left, open_source(sparse) as right:
        assert left.tensors == right.tensors
        assert [f.header_sha256 for f in left.files] == [f.header_sha256 for f in right.files]


def test_a_folder_has_its_name_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(make_checkpoint, "write_tensor", fail)
        with pytest.raises(OSError, match="disk full"):
            make(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    make(tmp_path / "m")  # over what is left of the first attempt
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shared", "1"), "--shared: qwen3_moe has no shared experts"),
        (("--top-k", "5"), "--top-k 5 is more than --experts 4"),
        (("--vocab", "2"), "--vocab 2 is less"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        make(tmp_path / "m", *options)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_existing_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make(tmp_path)
    assert stop.value.code == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--shard-size=0MB", "--shard-size=3XB", "--layers=0", "--experts=-1"])
def test_nonsense_numbers_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "m"), option])
    assert stop.value.code == 2
