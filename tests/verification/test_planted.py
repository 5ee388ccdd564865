"""Faults that were once missed: planted with sizes and digests made right again, each is found and named.

Where a word of the manifest is all that was changed, and nothing tells what it was, its digest is what shows it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hqconv.artifact.manifest import read_manifest, sealed
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.kernel_layout import transform
from hqconv.schemas.grid import Grid
from hqconv.schemas.weight_schema import WeightSchema
from hqconv.sources.opening import open_source
from hqconv.verification.files import check_files
from tests.make import small
from tests.make.conversions import check, manifest, run, schema_of
from tests.make.damage import Damaged, check_both_ways, found
from tests.make.effort import num_examples
from tests.make.qwen import write_qwen3_moe

SCHEMA = "int4-g64"
DIGEST = "The manifest's bytes are not those that its digest was made of."


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("planted")
    src = write_qwen3_moe(folder / "src")
    run(src, folder / "kernel", SCHEMA, Grid(2, 2))
    run(src, folder / "checkpoint", SCHEMA, layout="checkpoint")
    return {"src": src, "kernel": folder / "kernel", "checkpoint": folder / "checkpoint"}


def copy_of(good: dict[str, Path], layout: str, folder: Path) -> Damaged:
    shutil.copytree(good[layout], folder / "out")
    return Damaged(folder / "out", good["src"], SCHEMA)


@pytest.fixture
def copy(good: dict[str, Path], tmp_path: Path) -> Damaged:
    return copy_of(good, "kernel", tmp_path)


@pytest.fixture
def sharded(good: dict[str, Path], tmp_path: Path) -> Damaged:
    """The checkpoint layout: three shards and an index."""
    return copy_of(good, "checkpoint", tmp_path)


# --- the manifest's digest ---------------------------------------------------------------------------------


def is_altered(root: Path) -> bool:
    """Whether a reader of the manifest sees that its bytes are not those of its digest."""
    try:
        return read_manifest(root).alteration is not None
    except HqconvError:  # no manifest any more, which says so
        return True


def test_the_digest_is_the_last_field_of_every_manifest(good: dict[str, Path]) -> None:
    for layout in ("kernel", "checkpoint"):
        data, document = (good[layout] / "hqconv.json").read_bytes(), manifest(good[layout])
        assert list(document)[-1] == "digest"
        before, _, _ = data.rpartition(b',\n  "digest": ')
        assert document["digest"] == hashlib.sha256(before).hexdigest()
        assert sealed(document) == data
        assert not is_altered(good[layout])


def test_any_altered_byte_of_the_manifest_shows(copy: Damaged) -> None:
    path = copy.root / "hqconv.json"
    data = path.read_bytes()
    for position in [*range(0, len(data), 41), *range(len(data) - 90, len(data))]:
        for mask in (0x01, 0x20):
            altered = bytearray(data)
            altered[position] ^= mask
            path.write_bytes(altered)
            assert is_altered(copy.root), bytes(altered[position - 20 : position + 20])


def test_a_manifest_of_another_form(copy: Damaged) -> None:
    document = manifest(copy.root)
    (copy.root / "hqconv.json").write_text(json.dumps(document))
    assert is_altered(copy.root)
    without = {key: value for key, value in document.items() if key != "digest"}
    (copy.root / "hqconv.json").write_text(json.dumps(without, indent=2) + "\n")
    files, _ = copy.check(with_source=False)
    found(files, "hqconv.json: digest", DIGEST)


@pytest.mark.parametrize(("key", "value"), [("name", "org/other"), ("revision", "b" * 40)])
def test_a_repo_and_its_commit(copy: Damaged, key: str, value: str) -> None:
    recorded = {"name": "org/model", "revision": "a" * 40}
    copy.edit_manifest(lambda document: document["source"].update(recorded))
    for opened_as, count in ((recorded, 0), ({**recorded, key: value}, 1)):
        with Artifact(copy.root) as artifact, open_source(copy.source) as source:
            source.repo_id, source.revision = opened_as["name"], opened_as["revision"]
            result = check_files(artifact, source, 2)
        assert len(result.findings) == count, (opened_as, result.findings)
    found(result, f"hqconv.json: source: {key}", recorded[key], value)


# --- shards, and files that are listed ---------------------------------------------------------------------


STRAYS = (
    "more/model.safetensors",
    "more/pytorch_model.bin",
    "a.gguf",
    "original/params.json",
    "more/x.index.json",
)


@pytest.mark.parametrize(
    ("layout", "path"),
    [("kernel", "experts/tp0-ep0/x.safetensors"), *(("checkpoint", path) for path in STRAYS)],
)
def test_stray_weights_that_the_manifest_lists(
    good: dict[str, Path], tmp_path: Path, layout: str, path: str
) -> None:
    copy = copy_of(good, layout, tmp_path)
    (copy.root / path).parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(4)}, copy.root / path, {"format": "pt"})
    copy.edit_manifest(lambda words: words["files"].update({path: {"size_bytes": 0, "sha256": ""}}))
    copy.reseal()
    files, _ = copy.check(with_source=False)
    assert [f.where for f in files.findings] == [path]
    assert "weight" in files.findings[0].what


def test_a_rank_file_that_names_no_rank(copy: Damaged) -> None:
    copy.edit_header(copy.path, lambda entries: entries["__metadata__"].update(rank=""))
    copy.reseal()
    found(copy.check(with_source=False)[0], f"{copy.path}", "another rank", "tp1-ep1")


# --- the padding of an uneven last rank ------------------------------------------------------------------------

TWICE = WeightSchema(
    name="twice",
    b_dtype="float4e2m1",
    bs_dtype="float8e4m3",
    weight_scale_type="group",
    weight_scale_group_size=32,
    weight_scale_2_type="channel",
)


def padding_of(monkeypatch: pytest.MonkeyPatch, tensor: str, axis: int, value: int) -> None:
    """From now on, conversions write another value into one tensor's padding."""
    pad = transform._pad

    def damaged(
        tensors: dict[str, Any], schema: WeightSchema, along: int, size: int, share: int
    ) -> dict[str, Any]:
        padded = pad(tensors, schema, along, size, share)
        one, length = (
            padded[tensor],
            tensors[tensor].size(along) if tensors[tensor].ndim > along else 0,
        )
        if along == axis and one.size(along) > length > 0:
            bits = one.view({1: torch.uint8, 2: torch.int16}[one.element_size()])
            bits.narrow(along, length, one.size(along) - length).fill_(value)
        return padded

    monkeypatch.setattr(transform, "_pad", damaged)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("gemm", "axis"), [("w13", 1), ("w2", 2)])
@pytest.mark.parametrize(
    ("schema", "tensor", "value"),
    [
        ("mxfp4", "weight_scale", 255),
        ("mxfp4", "weight_scale", 118),
        ("mxfp8", "weight_scale", 126),
        ("int4-g32", "weight_scale", 0x7FC0),
        ("nvfp4", "weight_scale", 0x7F),
        ("twice", "weight_scale_2", 0x7FC0),
    ],
)
def test_padding_of_an_uneven_last_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schema: str,
    tensor: str,
    value: int,
    gemm: str,
    axis: int,
    dtype: str,
) -> None:
    if (tensor, gemm) == ("weight_scale_2", "w2") or (value, dtype) == (255, "float16"):
        pytest.skip(
            "second scales have no columns; Humming itself cannot make a NaN of e8m0 one of float16's"
        )
    src = small.save(tmp_path / "src", small.gpt_oss_floats(320))
    made_of = TWICE if schema == "twice" else schema_of(schema)
    for is_damaged in (False, True):
        if is_damaged:
            padding_of(monkeypatch, tensor, axis, value)
        out = tmp_path / f"out-{is_damaged}"
        run(src, out, made_of, Grid(4), dtype=dtype)
        layer = next(iter(manifest(out)["blocks"]))
        for with_source in (True, False):
            with Artifact(out) as artifact, open_source(src) as source:
                weights = check_both_ways(artifact, source if with_source else None)
            assert bool(weights.findings) == is_damaged, weights.findings[:3]
        if is_damaged:
            what = "The padding of a TP rank is not "
            found(
                weights,
                f"experts/tp3-ep0/{layer}.safetensors, tensor {layer}.{gemm}_{tensor}",
                what,
            )


# --- words of every kind --------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 40)
    | st.floats(allow_nan=True)
    | st.sampled_from(["float16", "int8", "none", "channel", ""]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def one_copy(good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return copy_of(good, "kernel", tmp_path_factory.mktemp("one"))


@settings(max_examples=num_examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_words_of_a_layer_config_end_in_findings(
    one_copy: Damaged, data: st.DataObject
) -> None:
    """Every value of any kind: a finding, and never an error of ours."""
    kept = [(path, (one_copy.root / path).read_bytes()) for path in ("hqconv.json", one_copy.path)]
    words = json.loads(one_copy.header(one_copy.path)[0]["__metadata__"]["w2"])
    key, value = data.draw(st.sampled_from(sorted(words))), data.draw(JSON)
    is_changed = json.dumps(words[key]) != json.dumps(value)
    changed = json.dumps({**words, key: value})
    try:
        one_copy.edit_header(
            one_copy.path, lambda entries: entries["__metadata__"].update(w2=changed)
        )
        one_copy.reseal()
        files, _ = one_copy.check(with_source=False)
        assert bool(files.findings) == is_changed
    finally:
        for path, good_bytes in kept:
            (one_copy.root / path).write_bytes(good_bytes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape_k", float("inf")),
        ("pad_shape_n", float("-inf")),
        ("a_dtype", {}),
        ("a_dtype", [1]),
        ("shape_k", 0),
    ],
)
def test_words_of_a_layer_config_that_were_an_internal_error(
    copy: Damaged, key: str, value: Any
) -> None:
    def edit(entries: dict[str, Any]) -> None:
        words = json.loads(entries["__metadata__"]["w13"])
        entries["__metadata__"]["w13"] = json.dumps({**words, key: value})

    copy.edit_header(copy.path, edit)
    copy.reseal()
    files, weights = copy.check()
    found(files, f"{copy.path}, metadata: w13: {key}")
    found(weights, copy.path, "w13")


# --- copied tensors, without the source ----------------------------------------------------------------------

CHANGES: dict[str, Callable[[dict[str, torch.Tensor], list[str]], object]] = {
    "a flipped bit": lambda tensors, names: (
        tensors[names[0]].view(torch.int16).view(-1)[7].bitwise_xor_(1)
    ),
    "a sign": lambda tensors, names: tensors[names[1]].view(-1)[3].neg_(),
    "exchanged tensors": lambda tensors, names: tensors.update(
        {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    ),
    "exchanged values": lambda tensors, names: tensors[names[0]].copy_(tensors[names[0]].flip(0)),
    "shifted values": lambda tensors, names: tensors[names[0]].copy_(tensors[names[0]].roll(1)),
    "zeros": lambda tensors, names: tensors[names[0]].zero_(),
    "another dtype": lambda tensors, names: tensors.update(
        {names[0]: tensors[names[0]].view(torch.float16)}
    ),
}


@pytest.fixture(params=["kernel", "checkpoint"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Damaged:
    """A model with tensors that are copied: an embedding, and two routers of one shape."""
    layout = request.param
    tensors, config = small.plain()
    for name in (
        f"{small.PARENT}.input_layernorm.weight",
        f"{small.PARENT}.post_attention_layernorm.weight",
    ):
        tensors[name] = torch.randn(
            small.HIDDEN, generator=torch.Generator().manual_seed(len(name))
        ).bfloat16()
    src = small.save(tmp_path / "src", (tensors, config))
    run(src, tmp_path / "out", SCHEMA, layout=layout)
    return Damaged(tmp_path / "out", src, SCHEMA)


def replant(copy: Damaged, change: str) -> None:
    """Change copied tensors in their shard, with sizes, digests and the manifest made right again."""
    names = sorted(name for name in manifest(copy.root)["tensors"]["copied"] if "layernorm" in name)
    for path in copy.root.glob("*.safetensors"):
        tensors = load_file(path)
        if names[0] in tensors:
            CHANGES[change](tensors, names)
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                path,
                {"format": "pt"},
            )
    copy.reseal()


@pytest.mark.parametrize("change", CHANGES)
def test_a_copied_tensor_that_is_another(change: str, either: Damaged) -> None:
    assert check(either.root, either.source).passed
    replant(either, change)
    assert not check(either.root, either.source).passed
