"""What transformers, hqconv and a reader see in the checkpoints of scripts/make_checkpoint.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hqconv.sources.opening import open_source
from scripts import make_checkpoint
from scripts.make_checkpoint import MODELS, main

TINY = ("--hidden=128", "--intermediate=64", "--layers=2", "--experts=4", "--top-k=2", "--vocab=64")


def make(out: Path, *options: str) -> Path:
    main([str(out), *TINY, *options])
    return out


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_loads_every_tensor(tmp_path: Path, model_type: str) -> None:
    out = make(tmp_path / "m", "--model-type", model_type, "--shard-size", "200KB")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype="auto"
    )
    assert type(model).__name__ == MODELS[model_type].architecture
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    assert model.dtype == torch.bfloat16
    logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("a <s> </s>")["input_ids"] == [0, 1, 2]


def test_values_depend_on_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(make(tmp_path / "a"))
    monkeypatch.setattr(make_checkpoint, "NUM_THREADS", 3)
    other_shards = load(make(tmp_path / "b", "--shard-size", "100KB"))
    assert base.keys() == other_shards.keys()
    assert all(torch.equal(base[name], other_shards[name]) for name in base)
    deeper = load(make(tmp_path / "c", "--layers", "3"))
    assert all(torch.equal(base[name], deeper[name]) for name in base)
    digests = {tensor.view(torch.uint8).numpy().tobytes() for tensor in base.values()}
    assert len(digests) == len(base)


def test_sparse_has_the_same_headers(tmp_path: Path) -> None:
    full, sparse = make(tmp_path / "a"), make(tmp_path / "b", "--sparse")
    with open_source(full) as left, open_source(sparse) as right:
        assert left.tensors == right.tensors
        assert [f.header_sha256 for f in left.files] == [f.header_sha256 for f in right.files]


def test_a_folder_has_its_name_only_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(make_checkpoint, "write_tensor", fail)
        with pytest.raises(OSError, match="disk full"):
            make(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    make(tmp_path / "m")  # over what is left of the first attempt
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
