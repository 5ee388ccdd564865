"""What a model folder says to transformers: its code is never loaded, and values of any type end as one message."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hqconv.calibration.transformers_model import folder_of
from hqconv.sources.opening import open_source
from tests.make.command import call
from tests.make.families import save_family
from tests.make.qwen import set_config
from tests.make.tokenizer import write_tokenizer

MARKER = "code-has-run"
CODE = f"from pathlib import Path\nPath(__file__).with_name({MARKER!r}).touch()\nPath({{here!r}}).touch()\n"


class _Pickled:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A mixtral with code, pickles and an adapter beside its weights: whatever loads one of these leaves a marker."""
    folder = tmp_path / "src"
    save_family(folder, "mixtral", inner=64)
    write_tokenizer(folder)
    for name in ("configuration_own", "modeling_own", "tokenization_own", "custom_generate"):
        (folder / f"{name}.py").write_text(CODE.format(here=str(tmp_path / MARKER)))
    for name in ("pytorch_model.bin", "model.pt", "adapter_model.bin", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(_Pickled(tmp_path / MARKER)))
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'
    )
    (tmp_path / "text").write_text(" ".join(map(str, range(3, 43))))
    return folder


def measure(src: Path) -> tuple[int, str]:
    """Exit code and output of a calibrated conversion; no code of the folder has run."""
    out = src.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    options = ["--schema", "int8-g32", "--target", "sm90", "--device", "cpu", "--threads", 1]
    calibrate = ["--calibrate", src.parent / "text", "--calibrate-context", 16]
    done = call("convert", src, "-o", out, *options, *calibrate)
    assert not (src.parent / MARKER).exists()
    assert (out / "hqconv.json").exists() == (done.exit_code == 0)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


OWN = {
    name: f"{file}.Own"
    for name, file in (("AutoConfig", "configuration_own"), ("AutoModel", "modeling_own"))
}


def test_code_of_the_folder_is_not_asked_for_and_not_run(src: Path) -> None:
    """With the classes of transformers, and without any that it has."""
    set_config(src, auto_map={**OWN, "AutoModelForCausalLM": "modeling_own.Own"})
    set_config(
        src, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]}
    )
    code, output = measure(src)
    assert code == 0, output
    set_config(src, model_type="own", architectures=["OwnForCausalLM"])
    code, output = measure(src)
    assert code == 2, output
    assert "The transformers library cannot run this model" in output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_attn_implementation", "org/kernel@v1:forward"),
        ("attn_implementation", {"": "paged|org/kernel"}),
        ("_experts_implementation", "org/experts"),
        ("use_kernels", True),
        ("kernel_config", {"kernel_mapping": {"RMSNorm": "org/norm:Norm"}}),
        ("text_config", {"attn_implementation": "org/kernel"}),
    ],
)
def test_kernels_of_the_hub_are_not_asked_for(src: Path, key: str, value: object) -> None:
    """transformers never sees the key, and runs its own code."""
    set_config(src, **{key: value})
    with open_source(src) as source, folder_of(source) as folder:
        assert not re.search("implementation|kernel", (folder / "config.json").read_text())
    code, output = measure(src)
    # mixtral cannot have a text_config
    assert code == (2 if key == "text_config" else 0), output


WRONG: list[tuple[str, object]] = [
    ("architectures", [5]),
    ("architectures", "MixtralForCausalLM"),
    ("auto_map", 5),
    ("auto_map", {"AutoConfig": [None]}),
    ("torch_dtype", "save"),
    ("torch_dtype", ["bfloat16"]),
    ("num_attention_heads", 0),
    ("num_attention_heads", "2"),
    ("rope_parameters", {"rope_type": 5}),
    ("vocab_size", -1),
    ("layer_types", 5),
    ("hidden_act", 7),
    ("rms_norm_eps", "small"),
    ("model_type", ["mixtral"]),
    ("pad_token_id", 10**9),
    ("id2label", 5),
    ("per_layer_config", 5),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_values_of_other_types_end_as_one_message(src: Path, key: str, value: object) -> None:
    set_config(src, **{key: value})
    code, output = measure(src)
    assert code in (0, 2, 3), output
    assert code != 0 or key != "num_attention_heads", output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", ["tokenization_own.Own"]),
        ("tokenizer_class", "pipeline"),
        ("added_tokens_decoder", 5),
        ("bos_token", 5),
        ("model_max_length", "long"),
    ],
)
def test_wrong_values_of_a_tokenizer_end_as_one_message(src: Path, key: str, value: object) -> None:
    set_config(src, "tokenizer_config.json", **{key: value})
    code, output = measure(src)
    assert code in (0, 2), output


def test_an_error_of_the_run_is_one_message(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a value that shows only now")

    monkeypatch.setattr("torch.nn.functional.embedding", fail)
    code, output = measure(src)
    assert (code, "ValueError: a value that shows only now" in output) == (2, True), output


def test_weights_that_the_model_lacks_are_not_drawn(src: Path) -> None:
    """transformers would fill them with random numbers, and measure what these make of the text."""
    index = json.loads((src / "model.safetensors.index.json").read_bytes())
    name = "model.layers.0.self_attn.q_proj.weight"
    shard = src / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, {"format": "pt"})
    set_config(src, "model.safetensors.index.json", weight_map=index["weight_map"])
    code, output = measure(src)
    assert (
        code,
        "weights for model.layers.0.self_attn.q_proj.weight" in " ".join(output.split()),
    ) == (3, True), output
