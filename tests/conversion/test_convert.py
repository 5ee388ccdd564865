"""Conversions of checkpoints that transformers wrote, against Humming's own code run on whole stacks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tests.make.quant_weight  # noqa: F401 - lets Humming quantize on the CPU
from hqconv.errors import InputError, RequestError
from hqconv.humming_ops import cpu_ops
from hqconv.humming_ops.runtime import humming, humming_schema, resident, target_facts
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.tensors import torch_dtype_of
from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema
from tests.make.conversions import manifest, run, schema_of
from tests.make.matrices import SCHEMAS
from tests.make.models import MODELS, save_model
from tests.make.quantized import quantize
from tests.make.tensors import assert_same, load_all, load_file, pick, raw, snapshot, words_of

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
ModelOf = Callable[..., Path]
PROJECTIONS = {"mixtral": ("w1", "w3", "w2")}
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
IN_TURN = [
    (name, PARAM_DTYPES[n % 2]) for n, name in enumerate(SCHEMAS)
]  # golden artifacts have each in both


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """A model by family and options, written once per module."""

    @functools.cache
    def make(family: str, **options: Any) -> Path:
        return save_model(tmp_path_factory.mktemp(family) / family, family, **options)

    return make


def family_of(src: Path) -> str:
    return str(json.loads((src / "config.json").read_bytes())["model_type"])


def expert_stacks(src: Path) -> dict[str, dict[str, list[torch.Tensor]]]:
    """layer → role → the experts' matrices, found by a pattern of our own."""
    names = PROJECTIONS.get(family_of(src), GATE_UP_DOWN)
    roles = dict(zip(names, ("w1", "w3", "w2"), strict=True))
    found: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in load_all(src).items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            of_role = found.setdefault(match[1], {}).setdefault(roles[match[3]], {})
            of_role[int(match[2])] = tensor
    return {
        layer: {role: [stack[e] for e in range(len(stack))] for role, stack in parts.items()}
        for layer, parts in found.items()
    }


# --- the oracle: Humming's transform of whole stacks, cut by hand ------------------------------------------


def unpack(words: torch.Tensor, bits: int) -> np.ndarray:
    """Codes of the last dimension, from its little-endian bit string."""
    rows = words.contiguous().numpy().view(np.uint8)
    rows = np.unpackbits(rows, axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, bits)
    return np.asarray((rows << np.arange(bits)).sum(-1), np.int32)


@dataclasses.dataclass
class Loose:
    """A stack of experts' matrices, unpacked: codes [E, N, K], scales and zero points with whole dimensions."""

    codes: np.ndarray
    scale: torch.Tensor
    zero: np.ndarray | torch.Tensor | None
    scale_2: torch.Tensor | None

    def cut(self, dim: int, part: int, parts: int) -> Loose:
        """The part-th of `parts` equal slices along N (1) or K (2), of everything that has that dimension."""

        def one(x: Any) -> Any:
            if x is None or x.ndim < 3 or x.shape[dim] == 1:
                return x
            assert x.shape[dim] % parts == 0
            step = x.shape[dim] // parts
            return x[(slice(None),) * dim + (slice(part * step, (part + 1) * step),)]

        return Loose(one(self.codes), one(self.scale), one(self.zero), one(self.scale_2))


def quantized_stack(
    parts: dict[str, list[torch.Tensor]], schema: WeightSchema, dtype: str
) -> dict[str, Loose]:
    """Every expert quantized at full size: by Humming's `quant_tensor`, or the contract's recipe if coupled."""
    target = humming_schema(schema)
    packed: dict[str, list[Tensors]] = {role: [] for role in parts}
    for expert in range(len(parts["w2"])):
        for roles in (("w1", "w3"), ("w2",)):
            matrices = [parts[role][expert] for role in roles]
            if schema.is_coupled:  # tests/test_quantize.py checks these
                results = [q.tensors for q in quantize(matrices, schema, dtype)]
            else:
                with resident(CPU):
                    results = [
                        target.quant_tensor(m, target, torch_dtype_of(dtype)) for m in matrices
                    ]
            for role, tensors in zip(roles, results, strict=True):
                packed[role].append(tensors)
    return {role: _loosen(stack, schema) for role, stack in packed.items()}


def _loosen(experts: list[Tensors], schema: WeightSchema) -> Loose:
    def stack(name: str) -> torch.Tensor | None:
        if name not in experts[0]:
            return None
        stacked = torch.stack([words_of(e[name]) for e in experts]).view(experts[0][name].dtype)
        return stacked.reshape(-1) if experts[0][name].shape == (1,) else stacked

    zero: Any = stack("zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack(zero.transpose(1, 2), schema.num_bits).swapaxes(1, 2)
    weight, scale = stack("weight"), stack("weight_scale")
    assert weight is not None
    assert scale is not None
    return Loose(unpack(weight, schema.num_bits), scale, zero, stack("weight_scale_2"))


def _join(first: Any, second: Any) -> Any:
    """gate above up."""
    if first is None or first.ndim == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second], axis=1)
    return torch.cat([words_of(first), words_of(second)], dim=1).view(first.dtype)


def _tighten(loose: Loose, schema: WeightSchema) -> Tensors:
    tensors = {
        "weight": cpu_ops.pack_weight(
            torch.from_numpy(np.ascontiguousarray(loose.codes)), schema.num_bits
        ),
        "weight_scale": loose.scale.contiguous(),
    }
    if isinstance(loose.zero, np.ndarray):
        codes = torch.from_numpy(np.ascontiguousarray(loose.zero.swapaxes(1, 2)))
        tensors["zero_point"] = (
            cpu_ops.pack_weight(codes, schema.num_bits).transpose(1, 2).contiguous()
        )
    elif loose.zero is not None:
        tensors["zero_point"] = loose.zero.contiguous()
    if loose.scale_2 is not None:
        tensors["weight_scale_2"] = loose.scale_2
    return tensors


def humming_kernel(loose: Loose, schema: WeightSchema, dtype: str) -> tuple[str, Tensors]:
    """(LayerConfig as JSON, kernel tensors) of a whole stack, by Humming's own functions, in vLLM's order."""
    lib, tensors = humming(), _tighten(loose, schema)
    num_experts, n, k = loose.codes.shape
    words: dict[str, Any] = {
        "shape_n": n,
        "shape_k": k,
        "weight_schema": humming_schema(schema),
        "num_experts": num_experts,
        "pad_n_to_multiple": 256,
        "pad_k_to_multiple": 128,
        "torch_dtype": torch_dtype_of(dtype),
        "device": -1,
    }
    with resident(CPU), target_facts(GpuTarget(90)):
        if not (schema.bs_dtype == "float8e8m0" and dtype == "float16"):
            config, kernel = lib.transform.prepare_and_transform_humming_tensors(tensors, **words)
            return config.to_str(), kernel
        config = lib.transform.prepare_layer_config(**words)
        config, tensors = lib.transform.prepare_fp16_e8m0_scale(config, tensors)
        kernel = lib.transform.transform_humming_tensors(config, tensors)
        # hqconv's one addition: the second scale is there even if no exponent needs it.
        kernel.setdefault("weight_scale_2", torch.ones(num_experts))
        config = dataclasses.replace(config, weight_scale_2_type=lib.config.WeightScale2Type.TENSOR)
        return config.to_str(), kernel


def expected_kernel(
    src: Path, schema: WeightSchema, dtype: str, tp: int
) -> dict[tuple[str, int, str], tuple[str, Tensors]]:
    """(layer, tp rank, gemm) → what Humming makes of all experts at once."""
    expected = {}
    for layer, parts in expert_stacks(src).items():
        loose = quantized_stack(parts, schema, dtype)
        for rank in range(tp):
            gate, up = (loose[role].cut(1, rank, tp) for role in ("w1", "w3"))
            fields = ("codes", "scale", "zero", "scale_2")
            both = Loose(*(_join(getattr(gate, f), getattr(up, f)) for f in fields))
            expected[layer, rank, "w13"] = humming_kernel(both, schema, dtype)
            expected[layer, rank, "w2"] = humming_kernel(
                loose["w2"].cut(2, rank, tp), schema, dtype
            )
    return expected


def check_against_humming(
    src: Path, out: Path, schema: WeightSchema, dtype: str, grid: Grid
) -> None:
    """Every byte and every LayerConfig of every rank file."""
    for (layer, tp_rank, gemm), (config, kernel) in expected_kernel(
        src, schema, dtype, grid.tp
    ).items():
        num_experts = kernel["weight"].size(0)
        for ep_rank in range(grid.ep):
            path = out / f"experts/tp{tp_rank}-ep{ep_rank}/{layer}.safetensors"
            local = list(grid.local_experts(num_experts, ep_rank))
            prefix = f"{layer}.{gemm}_"
            ours = {
                k.removeprefix(prefix): v
                for k, v in load_file(path).items()
                if k.startswith(prefix)
            }
            assert ours.keys() == kernel.keys(), path
            for name, tensor in kernel.items():
                assert_same(ours[name], pick(tensor, local), f"{path.parent.name} {prefix}{name}")
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            assert set(metadata) == {"format", "rank", "w13", "w2"}
            assert (metadata["format"], metadata["rank"]) == ("pt", path.parent.name)
            assert json.loads(metadata[gemm]) == {**json.loads(config), "num_experts": len(local)}
            check_layer_config(metadata[gemm])


def check_layer_config(text: str) -> None:
    """Humming takes the words back and, asked again, says the same."""
    with target_facts(GpuTarget(90)):
        config = humming().config.LayerConfig(**json.loads(text))
        assert json.loads(config.to_str()) == json.loads(text)


# --- kernel layout -----------------------------------------------------------------------------------------


def tp_sizes(schema: WeightSchema, inner: int) -> list[int]:
    period = max(32, schema.weight_scale_group_size, schema.weight_scale_group_size_n)
    return [tp for tp in (1, 2, 3) if inner % (tp * period) == 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), IN_TURN)
def test_rank_files_are_hummings_transform_of_the_whole_stack(
    name: str, dtype: str, model: ModelOf, tmp_path: Path
) -> None:
    src = model("mixtral", intermediate_size=384, num_hidden_layers=1, num_local_experts=3)
    schema = schema_of(name)
    for tp in tp_sizes(schema, 384):
        grid = Grid(tp, 2)
        out = tmp_path / f"tp{tp}"
        try:
            run(src, out, name, grid, dtype=dtype)
        except RequestError as error:
            assert "no kernel" in str(error)  # noqa: PT017
            return
        check_against_humming(src, out, schema, dtype, grid)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_float16_with_exponents_that_need_a_second_scale(
    name: str, model: ModelOf, tmp_path: Path
) -> None:
    """Experts of very different sizes: some shift their exponents, some do not, and all are as Humming's."""
    src = tmp_path / "src"
    shutil.copytree(model("qwen3_moe", max_shard_size="1GB"), src)
    tensors = load_all(src)
    for expert, factor in enumerate((1, 2.0**-20, 2.0**30, 2.0**-40, 0)):
        for projection in GATE_UP_DOWN:
            tensors[f"model.layers.0.mlp.experts.{expert}.{projection}.weight"].mul_(factor)
    tensors["model.layers.1.mlp.experts.0.gate_proj.weight"][3] *= 2.0**60  # both ends cannot fit
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    grid = Grid(2, 2)
    run(src, tmp_path / "out", name, grid, dtype="float16")
    check_against_humming(src, tmp_path / "out", schema_of(name), "float16", grid)
    layer = "model.layers.0.mlp.experts"
    scales = load_file(tmp_path / f"out/experts/tp0-ep0/{layer}.safetensors")[
        f"{layer}.w13_weight_scale_2"
    ]
    assert scales.tolist()[0] == 1
    assert scales.tolist()[1] < 1 < scales.tolist()[2]


# --- checkpoint layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), IN_TURN)
def test_checkpoint_layout_is_the_quantizers_output(
    name: str, dtype: str, model: ModelOf, tmp_path: Path
) -> None:
    src = model("mixtral", intermediate_size=384, num_hidden_layers=1, num_local_experts=3)
    schema = schema_of(name)
    try:
        run(src, tmp_path / "out", name, layout="checkpoint", dtype=dtype)
    except RequestError as error:
        assert "no kernel" in str(error)  # noqa: PT017
        return
    check_checkpoint_layout(src, tmp_path / "out", schema, dtype)


def check_checkpoint_layout(src: Path, out: Path, schema: WeightSchema, dtype: str) -> None:
    """Names, dtypes and shapes are `get_tensors_attrs`'s, and values the quantizer's; nothing besides."""
    source, target = load_all(src), humming_schema(schema)
    expected: Tensors = {}
    roles = PROJECTIONS.get(family_of(src), GATE_UP_DOWN)
    for layer, parts in expert_stacks(src).items():
        for e in range(len(parts["w2"])):
            for group in (("w1", "w3"), ("w2",)):
                results = quantize([parts[role][e] for role in group], schema, dtype)
                for role, result in zip(group, results, strict=True):
                    prefix = f"{layer}.{e}.{roles[('w1', 'w3', 'w2').index(role)]}"
                    n, k = parts[role][e].shape
                    attrs = target.get_tensors_attrs(n, k, torch_dtype_of(dtype))
                    assert attrs.keys() == result.tensors.keys()
                    for key, attr in attrs.items():
                        value = result.tensors[key]
                        assert (value.dtype, tuple(value.shape)) == (
                            attr["dtype"],
                            tuple(attr["shape"]),
                        )
                        expected[f"{prefix}.{key}"] = value
                    source.pop(f"{prefix}.weight")
    expected |= source  # the rest is copied
    found = load_all(out)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_same(found[key], value, key)


# --- the artifact as a whole -------------------------------------------------------------------------------


def check_artifact(src: Path, out: Path) -> None:
    """Files, digests, accounting, config, index and copies; by json and hashlib alone."""
    document = manifest(out)
    on_disk = {
        p.relative_to(out).as_posix(): (
            len(data := p.read_bytes()),
            hashlib.sha256(data).hexdigest(),
        )
        for p in out.rglob("*")
        if p.is_file() and p.name not in ("hqconv.json", "SHA256SUMS")
    }
    assert {p: (f["size_bytes"], f["sha256"]) for p, f in document["files"].items()} == on_disk
    assert list(document["files"]) == sorted(document["files"])
    source = load_all(src)
    accounted = [
        *document["tensors"]["converted"],
        *document["tensors"]["copied"],
        *document["tensors"]["dropped"],
    ]
    assert sorted(accounted) == sorted(source)
    assert {name for name in source if re.search(r"\.experts\.\d+\.", name)} == set(
        document["tensors"]["converted"]
    )
    copied = load_all(out)
    for name in document["tensors"]["copied"]:
        assert (copied[name].dtype, copied[name].shape) == (source[name].dtype, source[name].shape)
        assert raw(copied[name]) == raw(source[name]), name
    check_index(out, copied)
    check_loose_files(src, out)


def check_index(out: Path, tensors: Tensors) -> None:
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    where = {name: shard for shard in shards for name in load_file(out / shard)}
    index = out / "model.safetensors.index.json"
    if shards == ["model.safetensors"] and not (out / "experts").exists():
        assert not index.exists()
        return
    document = json.loads(index.read_bytes())
    assert document["weight_map"] == where
    assert document["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        assert shards == [
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
        ]


def check_loose_files(src: Path, out: Path) -> None:
    config = json.loads((out / "config.json").read_bytes())
    method = config.pop("quantization_config")["quant_method"]
    assert method == ("hqconv" if (out / "experts").exists() else "humming")
    if method == "hqconv":
        assert config.pop("transformers_weights") == "serve-with-vllm-and-hqconv.safetensors"
    assert config == json.loads((src / "config.json").read_bytes())
    for name in ("tokenizer.json", "generation_config.json", "tokenizer/vocab.txt"):
        assert (out / name).read_bytes() == (src / name).read_bytes()


@pytest.mark.parametrize("layout", ["kernel", "checkpoint"])
@pytest.mark.parametrize("family", MODELS)
def test_the_artifact_is_complete_and_says_what_it_is(
    family: str, layout: str, model: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.planning.output_units.MAX_SHARD_BYTES", 70_000)  # several shards
    src, out = model(family), tmp_path / "out"
    grid = Grid(2, 2) if layout == "kernel" else Grid()
    summary = run(src, out, "mxfp4", grid, layout=layout)
    check_artifact(src, out)
    document = manifest(out)
    assert (document["tp"], document["ep"], document["layout"]) == (grid.tp, grid.ep, layout)
    assert (document["target"], document["input_schema"], document["schema_name"]) == (
        "sm90",
        "a16",
        "mxfp4",
    )
    assert {f["name"] for f in document["source"]["files"]} == {
        p.name for p in src.glob("*.safetensors")
    }
    layers = expert_stacks(src)
    assert list(document["blocks"]) == list(layers)
    for name, parts in layers.items():
        layer = document["blocks"][name]
        assert layer["num_experts"] == len(parts["w1"])
        assert [layer["intermediate_size"], layer["hidden_size"]] == list(parts["w1"][0].shape)
    assert summary.num_bytes_out == sum(p.stat().st_size for p in out.rglob("*.safetensors"))
    assert summary.num_blocks == len(layers)
    assert not list(out.rglob(".*"))
    assert not list(out.rglob("*.partial"))


# --- the same bytes, whatever the way ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), [("mxfp4", "kernel"), ("nvfp4", "checkpoint")])
def test_threads_and_memory_change_no_byte(
    name: str, layout: str, model: ModelOf, tmp_path: Path
) -> None:
    src = model("deepseek_v3")
    settings = [(1, 1 << 30), (2, 1 << 30), (4, 1 << 30), (4, 8 << 20), (4, 14 << 20)]
    results, workers = [], []
    for index, (threads, memory) in enumerate(settings):
        out = tmp_path / str(index)
        summary = run(src, out, name, layout=layout, threads=threads, max_memory=memory)
        results.append(snapshot(out))
        workers.append(summary.num_workers)
    assert workers == [1, 2, 4, 1, 2]
    assert all(result == results[0] for result in results[1:])
    assert "hqconv.json" in results[0]


def test_shards_and_order_of_the_source_change_no_expert(model: ModelOf, tmp_path: Path) -> None:
    """One file, and one file per tensor with gate and up apart."""
    whole = model("mixtral", max_shard_size="1GB")
    spread = model("mixtral", max_shard_size="1KB")
    index = json.loads((spread / "model.safetensors.index.json").read_bytes())["weight_map"]
    prefix = "model.layers.0.block_sparse_moe.experts.0"
    assert len({index[f"{prefix}.{p}.weight"] for p in ("w1", "w2", "w3")}) == 3
    results = []
    for number, src in enumerate((whole, spread)):
        out = tmp_path / str(number)
        run(src, out, "nvfp4", Grid(2, 2))
        check_artifact(src, out)
        results.append({k: v for k, v in snapshot(out).items() if k.startswith("experts/")})
    assert len(results[0]) == 8
    assert results[0] == results[1]


# --- refusals while converting -----------------------------------------------------------------------------


def spoil(src: Path, name: str, value: float) -> None:
    """Overwrite one element of a tensor in its file."""
    for path in src.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name].view(-1)[-1] = value
            save_file(tensors, path, {"format": "pt"})
            return
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "layout", "value"),
    [
        ("mxfp4", "kernel", math.nan),
        ("nvfp4", "checkpoint", math.inf),
        ("int8", "kernel", math.inf),
    ],
)
def test_a_bad_weight_names_its_tensor_and_leaves_no_artifact(
    name: str, layout: str, value: float, model: ModelOf, tmp_path: Path
) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    shutil.copytree(model("qwen3_moe"), src)
    victim = "model.layers.1.mlp.experts.3.up_proj.weight"
    spoil(src, victim, value)
    with pytest.raises(InputError, match=re.escape(victim)) as caught:
        run(src, out, name, layout=layout)
    assert caught.value.exit_code == 3
    assert not (out / "hqconv.json").exists()
    assert not (out / "config.json").exists()
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob("*layers.1*"))


def test_a_weight_too_large_for_the_schema_is_refused(model: ModelOf, tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(model("qwen3_moe"), src)
    victim = "model.layers.0.mlp.experts.2.down_proj.weight"
    spoil(src, victim, 3e38)
    with pytest.raises(InputError, match="too large") as caught:
        run(src, tmp_path / "out", "int4-c-zp", dtype="float16")
    assert victim in str(caught.value)
