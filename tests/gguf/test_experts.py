"""Experts in GGUF files: decoded as the gguf library decodes whole tensors, and refused where they are not whole."""

from __future__ import annotations

import builtins
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hqconv.errors import InputError, RequestError
from hqconv.formats.encoding import SourceMatrix
from hqconv.gguf.header import read_header
from hqconv.gguf.model import Metadata, architecture_of
from hqconv.gguf.source import GgufSource, open_gguf
from hqconv.models.expert_map import ExpertMap
from hqconv.models.source_protocol import Source
from hqconv.sources.safetensors import SafetensorsSource
from tests.make.conversions import assert_verified, run
from tests.make.gguf_models import decodable, recorded_types, refused
from tests.make.qwen import set_config, write_qwen3_moe
from tests.make.startup import cold
from tests.make.tensors import load_file

gguf = pytest.importorskip("gguf")
Kind, dequantize, quantize = gguf.GGMLQuantizationType, gguf.quants.dequantize, gguf.quants.quantize

E, H, I = 4, 256, 512  # noqa: E741
CPU = torch.device("cpu")
SHAPES = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
ROLES = {"gate": "w1", "up": "w3", "down": "w2"}
Stack = tuple[np.ndarray[Any, Any], Any]  # bytes (or floats) [E, out, …], and their type


def stack(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> Stack:
    """A tensor of the type: of random numbers where Python can quantize them, else of random layers."""
    generator = np.random.default_rng(seed)
    try:
        return quantize(generator.normal(0, 0.05, shape).astype(np.float32), kind), kind
    except NotImplementedError:
        numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        layers = generator.integers(0, 256, (np.prod(shape) // numbers, num_bytes), np.uint8)
        with np.errstate(all="ignore"):
            large = np.abs(dequantize(layers, kind)).max(-1, initial=0)
        good = large < 100  # no scale is NaN, infinite or huge
        layers[~good] = generator.choice(layers[good], np.count_nonzero(~good))
        return layers.reshape(*shape[:-1], shape[-1] // numbers * num_bytes), kind


def floats(stack: Stack) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return np.asarray(dequantize(*stack), np.float32)


def write_gguf(path: Path, tensors: Mapping[str, Stack], alignment: int = 32) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "слово", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_bool("flag", True)
    writer.add_float64("number", 1.0)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=None if raw.dtype != np.uint8 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layer_of(layer: int, kinds: Mapping[str, Kind]) -> dict[str, Stack]:
    return {
        f"blk.{layer}.ffn_{word}_exps.weight": stack(kind, SHAPES[word], 10 * layer + index)
        for index, (word, kind) in enumerate(kinds.items())
    }


def same(kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(SHAPES, kind)


def without_experts(folder: Path, **words: Any) -> Path:
    """A qwen3_moe model whose safetensors hold all but the experts."""
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
    write_qwen3_moe(folder, **{**sizes, **words})
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def others() -> dict[str, Stack]:
    return {
        "token_embd.weight": stack(Kind.Q8_0, (64, H)),
        "blk.0.ffn_gate_inp.weight": stack(Kind.F32, (E, H)),
        "blk.0.exp_probs_b.bias": stack(Kind.F32, (E,)),
    }


def one_layer(folder: Path, stacks: Mapping[str, Stack], **config: Any) -> Path:
    """A model of one layer whose experts are in m.gguf; config: other values of its config.json."""
    without_experts(folder, num_layers=1)
    set_config(folder, **config)
    write_gguf(folder / "m.gguf", stacks)
    return folder


MIXED = {"gate": Kind.Q4_K, "up": Kind.Q4_K, "down": Kind.Q6_K}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Stack]:
    """Two layers, mixed as in a Q4_K_M file."""
    return {**others(), **layer_of(0, MIXED), **layer_of(1, {**MIXED, "down": Kind.Q4_K})}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, Stack]) -> Path:
    folder = without_experts(tmp_path / "model")
    write_gguf(folder / "model-Q4_K_M.gguf", tensors)
    return folder


def read(source: Source, experts: ExpertMap, layer: int, expert: int) -> dict[str, SourceMatrix]:
    block = experts.layers[layer]
    return source.read_expert(block, expert, block.roles, CPU)


def assert_bits(found: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    assert found.dtype == torch.float32
    assert found.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


# --- decoding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", decodable()[1:], ids=lambda kind: kind.name)
def test_every_type_decodes_as_llama_cpp_does(tmp_path: Path, kind: Kind) -> None:
    """Blocks of its quantizer have the values of its dequantizer (scripts/record_gguf.py); F32 is not decoded."""
    blocks, values = recorded_types()[kind.name]
    per_block = values.shape[1]
    stacks: dict[str, Stack] = {}
    for word, (_, rows, columns) in SHAPES.items():
        row_blocks = columns // per_block
        raw = np.resize(blocks, (E * rows * row_blocks, blocks.shape[1]))
        stacks[f"blk.0.ffn_{word}_exps.weight"] = raw.reshape(E, rows, -1), kind
    with open_gguf(one_layer(tmp_path / "model", stacks)) as source:
        experts = source.map_experts()
        for expert in range(E):
            stored = read(source, experts, 0, expert)
            for word, role in ROLES.items():
                assert_bits(stored[role].values(), np.resize(values, SHAPES[word])[expert])


def test_only_the_experts_own_bytes_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = SafetensorsSource.read_into
    with open_gguf(model) as source:
        experts = source.map_experts()

        def spy(self: SafetensorsSource, ref: Any, buffer: Any, start: int = 0) -> None:
            seen.append(memoryview(buffer).nbytes)
            plain(self, ref, buffer, start)

        monkeypatch.setattr(SafetensorsSource, "read_into", spy)
        read(source, experts, 0, 1)
    per_256 = {kind: gguf.GGML_QUANT_SIZES[kind][1] for kind in MIXED.values()}
    assert seen == [H * I // 256 * per_256[kind] for kind in MIXED.values()]
    assert experts.layers[0].num_bytes == E * sum(seen)


def test_gate_and_up_in_one_stack(tmp_path: Path) -> None:
    both = stack(Kind.Q5_1, (E, 2 * I, H))
    down = stack(Kind.IQ4_NL, SHAPES["down"])
    stacks = {"blk.0.ffn_gate_up_exps.weight": both, "blk.0.ffn_down_exps.weight": down}
    with open_gguf(one_layer(tmp_path / "model", stacks)) as source:
        experts = source.map_experts()
        assert experts.layers[0].num_bytes == both[0].nbytes + down[0].nbytes
        for expert in range(E):
            stored = read(source, experts, 0, expert)
            assert_bits(stored["w1"].values(), floats(both)[expert, :I])
            assert_bits(stored["w3"].values(), floats(both)[expert, I:])
            assert_bits(stored["w2"].values(), floats(down)[expert])


def test_second_scales_of_nvfp4(tmp_path: Path) -> None:
    stacks = layer_of(0, same(Kind.NVFP4))
    scale = np.asarray([0.1, 0.5, 3.0, 1.0], np.float32)
    more = {
        "blk.0.ffn_down_exps.scale": (scale, Kind.F32),
        "blk.0.ffn_down_exps.input_scale": (scale, Kind.F32),
    }
    with open_gguf(one_layer(tmp_path / "model", {**stacks, **more})) as source:
        experts = source.map_experts()
        assert experts.dropped == {
            "m.gguf:blk.0.ffn_down_exps.input_scale": "activation scale, not used by 16-bit activations"
        }
        for expert in range(E):
            stored = read(source, experts, 0, expert)
            down = floats(stacks["blk.0.ffn_down_exps.weight"])[expert]
            assert_bits(stored["w2"].values(), down * scale[expert])
            assert_bits(stored["w1"].values(), floats(stacks["blk.0.ffn_gate_exps.weight"])[expert])


def test_a_scale_that_may_be_the_routers(tmp_path: Path) -> None:
    """llama.cpp calls gemma4's per_expert_scale as it calls the second scale of NVFP4 weights."""
    scale = {"blk.0.ffn_down_exps.scale": (np.ones(E, np.float32), Kind.F32)}
    config = {"hidden_activation": "gelu_pytorch_tanh", "top_k_experts": 2}
    stacks = {**layer_of(0, same(Kind.Q8_0)), **scale}
    folder = one_layer(tmp_path / "model", stacks, model_type="gemma4_text", **config)
    prefix = "model.layers.0"
    kept = {
        f"{prefix}.router.proj.weight": torch.zeros(E, H),
        f"{prefix}.input_layernorm.weight": torch.ones(H),
    }
    save_file(kept, folder / "model.safetensors")
    refused(folder, InputError, r"m\.gguf:blk\.0\.ffn_down_exps\.scale")  # not in the safetensors
    save_file(
        {**kept, f"{prefix}.router.per_expert_scale": torch.ones(E)}, folder / "model.safetensors"
    )
    with open_gguf(folder) as source:
        experts = source.map_experts()
        assert experts.dropped == {
            "m.gguf:blk.0.ffn_down_exps.scale": "the safetensors' tensor is used"
        }
        assert experts.layers[0].name == f"{prefix}.experts"
    write_gguf(folder / "m.gguf", {**layer_of(0, same(Kind.NVFP4)), **scale})
    refused(folder, InputError, r"m\.gguf:blk\.0\.ffn_down_exps\.scale")  # both at once


def test_biases(tmp_path: Path) -> None:
    stacks = layer_of(0, same(Kind.MXFP4))
    for word in SHAPES:
        stacks[f"blk.0.ffn_{word}_exps.bias"] = stack(Kind.F32, SHAPES[word][:2])
    sizes = {"num_local_experts": E, "intermediate_size": I}
    folder = one_layer(tmp_path / "model", stacks, model_type="gpt_oss", **sizes)
    with open_gguf(folder) as source:
        experts = source.map_experts()
        assert experts.layers[0].has_bias
        stored = read(source, experts, 0, 2)
        for word, role in ROLES.items():
            bias = stored[role].bias
            assert bias is not None
            assert_bits(bias, floats(stacks[f"blk.0.ffn_{word}_exps.bias"])[2])
    run(folder, tmp_path / "out", "int4")
    assert_verified(tmp_path / "out", folder)
    del stacks["blk.0.ffn_up_exps.bias"]
    write_gguf(folder / "m.gguf", stacks)
    refused(folder, InputError, r"blk\.0\.ffn_up_exps\.bias")


def test_mtp_layers_count_on(tmp_path: Path, tensors: dict[str, Stack]) -> None:
    folder = without_experts(tmp_path / "model", num_layers=1)
    kept = load_file(folder / "model.safetensors")
    kept["mtp.layers.0.mlp.gate.weight"] = torch.zeros(E, H)
    save_file(kept, folder / "model.safetensors")
    write_gguf(folder / "m.gguf", tensors)
    with open_gguf(folder) as source:
        experts = source.map_experts()
    names = [(layer.name, layer.index) for layer in experts.layers]
    assert names == [("model.layers.0.mlp.experts", 0), ("mtp.layers.0.mlp.experts", 1)]


# --- conversion --------------------------------------------------------------------------------------------


def test_inspect_loads_nothing_heavy(model: Path) -> None:
    assert cold("inspect", model)[0] == set()


def test_experts_of_the_safetensors_win(model: Path, tmp_path: Path) -> None:
    both = write_qwen3_moe(tmp_path / "both")
    shutil.copy(model / "model-Q4_K_M.gguf", both)
    with open_gguf(both) as source:
        assert not isinstance(source, GgufSource)
        assert all(layer.format.is_float for layer in source.map_experts().layers)


# --- what is refused ---------------------------------------------------------------------------------------


def test_experts_alone_are_not_enough(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "lacks a number" in refused(model, RequestError, "Q4_K_M.gguf").what


def test_a_dense_model_is_refused_without_a_config_to_add() -> None:
    with pytest.raises(RequestError, match="without experts") as error:
        architecture_of(Metadata("a.gguf", {"general.architecture": "llama"}, {}))
    assert "config" not in error.value.remedy


def test_without_the_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def none(name: str, *words: Any, **more: Any) -> Any:
        if name.split(".")[0] == "gguf":
            raise ModuleNotFoundError(f"No module named {name!r}", name="gguf")
        return plain(name, *words, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    assert "pip install 'gguf>=0.17'" in refused(model, RequestError, "").remedy


def test_no_experts_at_all(model: Path) -> None:
    write_gguf(model / "model-Q4_K_M.gguf", others())
    assert "nothing to convert" in refused(model, RequestError, "").what


def test_experts_of_another_number_than_the_config_says(model: Path) -> None:
    set_config(model, num_experts=E + 4)
    assert "num_experts" in refused(model, InputError, r"blk\.0\.ffn_.*_exps\.weight").expected


GATE, UP, DOWN = (f"blk.0.ffn_{word}_exps.weight" for word in SHAPES)
Q8_K = np.zeros((E, I, H // 256 * gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
# Tensor → shape, type and bytes, or None for one that is left out; what the message must name.
REFUSED: list[tuple[str, tuple[int, ...] | Stack | None, str]] = [
    *((name, None, name) for name in (GATE, UP, DOWN)),
    (GATE, (E + 1, I, H), GATE),
    (UP, (E - 1, I, H), UP),
    (DOWN, (E, I, H), DOWN),
    (GATE, (E, I // 2, H), GATE),
    (UP, (E, I, 2 * H), UP),
    (DOWN, (H, I), DOWN),
    (DOWN, (1, E, H, I), DOWN),
    ("blk.0.ffn_gate_up_exps.weight", (E, 2 * I, H), "ffn_gate"),  # a projection twice
    (UP, (Q8_K, Kind.Q8_K), UP),  # which cannot be decoded
    *(
        (name, (E, 32), name)
        for name in (
            "blk.0.ffn_gate_chexps.weight",
            "blk.0.ffn_norm_exps.weight",
            "blk.0.ffn_up.3.weight",
            "blk.00.ffn_up_exps.weight",
            "blk.0.ffn_up_exps.weight2",
            "blk.0.ffn_up_exps.scale",
        )
    ),
]


@pytest.mark.parametrize(("name", "content", "where"), REFUSED)
def test_stacks_that_are_not_right(
    name: str,
    content: tuple[int, ...] | Stack | None,
    where: str,
    model: Path,
    tensors: dict[str, Stack],
) -> None:
    changed = dict(tensors)
    if content is None:
        del changed[name]
    elif isinstance(content[0], int):
        changed[name] = stack(Kind.Q8_0, content)
    else:
        changed[name] = content
    write_gguf(model / "model-Q4_K_M.gguf", changed)
    refused(model, InputError, re.escape(where))


def test_layers_that_only_the_router_or_the_stacks_have(
    model: Path, tensors: dict[str, Stack]
) -> None:
    first = {name: one for name, one in tensors.items() if "blk.1." not in name}
    write_gguf(model / "model-Q4_K_M.gguf", first)
    refused(model, InputError, r"model\.layers\.1\.mlp\.gate\.weight")
    write_gguf(model / "model-Q4_K_M.gguf", {**tensors, **layer_of(2, MIXED)})
    refused(model, InputError, r"blk\.2\.ffn_down_exps\.weight")


def test_two_quantizations_in_one_folder(model: Path) -> None:
    shutil.copy(model / "model-Q4_K_M.gguf", model / "other.gguf")
    refused(model, InputError, r"other\.gguf:token_embd\.weight")


def test_an_unknown_model(model: Path) -> None:
    set_config(model, model_type="new_moe")
    refused(model, RequestError, "model_type")


@pytest.mark.parametrize(
    ("name", "what"), [(b"{expert}.gguf", "has braces"), (b"caf\xe9.gguf", "no valid Unicode")]
)
def test_a_name_that_a_manifest_cannot_record(name: bytes, what: str, model: Path) -> None:
    (model / "model-Q4_K_M.gguf").rename(model / os.fsdecode(name))
    assert what in refused(model, InputError, "expert|model$").what


def test_numbers_that_are_none(model: Path, tensors: dict[str, Stack], tmp_path: Path) -> None:
    name = "blk.1.ffn_up_exps.weight"
    values = np.zeros(SHAPES["up"], np.float32)
    values[2, 5, 7] = np.nan
    write_gguf(model / "model-Q4_K_M.gguf", {**tensors, name: (values, Kind.F32)})
    with pytest.raises(InputError) as caught:
        run(model, tmp_path / "out", "int4")
    assert caught.value.where.endswith(f"model-Q4_K_M.gguf:{name}, expert 2")


def test_a_file_that_changes_meanwhile(model: Path) -> None:
    with open_gguf(model) as source:
        experts = source.map_experts()
        (model / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
        with pytest.raises(InputError, match="changed"):
            read(source, experts, 0, 0)


# --- headers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_headers_read_as_the_library_reads_them(
    tmp_path: Path, tensors: dict[str, Stack], alignment: int
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors, alignment)
    header, _, metadata, _ = read_header(path, 3)
    expected = gguf.GGUFReader(path).tensors
    assert list(header) == [tensor.name for tensor in expected]
    for tensor in expected:
        found = header[tensor.name]
        assert (found.name, found.file) == (f"m.gguf:{tensor.name}", 3)
        assert found.dtype == tensor.tensor_type.name
        assert found.num_bytes == tensor.n_bytes
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert found.offset_bytes == tensor.data_offset
    fields = gguf.GGUFReader(path).fields
    kept = {"general.architecture", "tokenizer.ggml.scores", "flag", "number"}
    kept |= {"general.alignment"} if alignment != 32 else set()
    assert metadata == {key: fields[key].contents() for key in kept}


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    folder = one_layer(tmp_path / "model", layer_of(0, same(Kind.Q4_0)))
    path = folder / "m.gguf"
    raw = path.read_bytes()
    first = min(tensor.offset_bytes for tensor in read_header(path)[0].values())
    for length in range(0, first, 7):
        path.write_bytes(raw[:length])
        refused(folder, InputError, r"m\.gguf")
    end = max(t.data_offset + t.n_bytes for t in reader_of(path, raw))
    for length in (first, first + 1000, end - 1):
        path.write_bytes(raw[:length])
        refused(folder, InputError, r"m\.gguf:blk\.0\.ffn_.*_exps\.weight")


def reader_of(path: Path, raw: bytes) -> list[Any]:
    path.write_bytes(raw)
    return list(gguf.GGUFReader(path).tensors)


def test_damaged_headers(tmp_path: Path) -> None:
    folder = without_experts(tmp_path / "model", num_layers=1)
    path = folder / "m.gguf"
    write_gguf(path, layer_of(0, same(Kind.Q4_0)), alignment=64)
    raw = path.read_bytes()

    def with_bytes(at: int, new: bytes) -> None:
        path.write_bytes(raw[:at] + new + raw[at + len(new) :])

    name = b"blk.0.ffn_up_exps.weight"
    info = raw.index(name) + len(name)
    huge = (1 << 62).to_bytes(8, "little")
    cases = {
        "(?s)not a GGUF file.*copy the file again": (0, b"GGML"),
        "(?s)not a GGUF file.*git lfs pull": (0, b"version https://git-lfs"),
        "(?s)version is not known.*newer hqconv": (4, b"\4\0\0\0"),
        "(?s)version is not known.*little-endian": (4, b"\0\0\0\3"),
        "ends inside": (8, huge),
        "not usable": (raw.index(b"general.alignment") + 21, b"\x30"),
        "dimensions": (info, b"\5"),
        "truncated": (info + 4 + 3 * 8 + 4, huge),
        "does not know": (info + 4 + 3 * 8, b"\x90"),
        "wrong shape": (info + 4, b"\1\1"),
        "not text": (raw.index(name), b"\xff"),
    }
    for what, (at, new) in cases.items():
        with_bytes(at, new)
        with pytest.raises(InputError, match=what) as caught, open_gguf(folder) as source:
            source.map_experts()
        if at > info - len(name) and what != "not text":
            assert name.decode() in str(caught.value)
