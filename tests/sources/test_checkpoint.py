"""Headers, index, folder, Hub cache and reads, against the safetensors library and literal bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hqconv.errors import InputError, RequestError
from hqconv.io.safetensors_header import read_header
from hqconv.models.source_protocol import Source
from hqconv.schemas.tensors import DTYPES, num_bits
from hqconv.sources.opening import open_source
from hqconv.sources.safetensors import SafetensorsSource
from tests.make.effort import num_examples
from tests.make.hub_server import COMMIT, serve, use

ONE = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def pack(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_folder(root: Path, shards: dict[str, dict[str, np.ndarray]], config: str = "{}") -> Path:
    """A checkpoint folder by the safetensors library, with an index unless there is one plain file."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(config)
    for name, tensors in shards.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / name, metadata={"format": "pt", "shard": name})
    if list(shards) != ["model.safetensors"]:
        write_index(root, {name: file for file, tensors in shards.items() for name in tensors})
    return root


def write_index(root: Path, weight_map: object) -> None:
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def two_shards() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    first = {
        "a": rng.integers(0, 256, (3, 5), np.uint8),
        "b": rng.standard_normal((4, 4)).astype(np.float32),
    }
    second = {"c": rng.integers(-9, 9, (2, 2, 2), np.int64), "empty": np.zeros((0, 7), np.float16)}
    return {"model-1-of-2.safetensors": first, "model-2-of-2.safetensors": second}


def read_all(checkpoint: Source, name: str) -> bytes:
    buffer = bytearray(checkpoint.tensors[name].num_bytes)
    checkpoint.read_into(checkpoint.tensors[name], buffer)
    return bytes(buffer)


# --- dtypes ---


def test_dtypes_are_those_of_the_library() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(pack({"a": tensor("NOPE", [1], 0, 1)}, b"x"))
    codes = re.findall(r"`(\w+)`", str(caught.value).split("expected one of")[1])
    assert sorted(codes) == sorted(DTYPES)
    for code in codes:
        num_bytes = num_bits(code)  # of 8 elements
        safetensors.deserialize(pack({"a": tensor(code, [8], 0, num_bytes)}, bytes(num_bytes)))


# --- headers ---


def entry(**fields: object) -> dict[str, object]:
    return {**ONE, **fields}


ONE_TEXT = json.dumps(ONE).encode()
NONE_TEXT = json.dumps(tensor("U8", [0], 2, 2)).encode()
# What must be said of tensor 'a', with two bytes of data → its entries.
BROKEN_ENTRIES: dict[str, list[object]] = {
    "malformed": [
        ["U8", [2], [0, 2]],
        *({key: ONE[key] for key in ONE if key != absent} for absent in ONE),
        entry(x=1),
    ],
    "dtype is unknown": [entry(dtype="F12"), entry(dtype=["U8"])],
    "shape is malformed": [
        entry(shape=shape) for shape in (2, [-1, -2], [True, 2], [2.0], ["2"], {}, "")
    ],
    "data_offsets are malformed": [
        entry(data_offsets=offsets) for offsets in ([2], [0, 2, 2], [0, 2.0], [False, True])
    ],
    "overflows": [
        tensor("U8", shape, 0, 0) for shape in ([2**32] * 2, [2**32, 2**32, 0], [0, 2**64], [2**62])
    ],
    "whole bytes": [tensor("F4", [3], 0, 2), tensor("F6_E2M3", [2], 0, 2)],
    "out of order": [tensor("U8", [2], -2, 0), tensor("U8", [0], 2, 0)],
    "disagree": [tensor("U8", [1], 0, 2), tensor("F32", [1], 0, 2)],
    "hole after the header": [tensor("U8", [1], 1, 2)],
}
EMPTY_TWICE = pack(b'{"a":%s,"b":%s,"b":%s}' % (ONE_TEXT, NONE_TEXT, NONE_TEXT), b"xx")
BROKEN: list[tuple[bytes, str | None, str]] = [
    # bytes, tensor that must be named, text that must be said
    (b"", None, "truncated"),
    (b"\x02\0\0\0\0\0\0", None, "truncated"),
    (struct.pack("<Q", 0), None, "header length"),
    (struct.pack("<Q", 100_000_001) + b"{}", None, "header length"),
    (struct.pack("<Q", 3) + b"{}", None, "truncated"),
    (b"\xff" * 8 + b"{}", None, "header length"),
    *(
        (pack(text), None, "not valid JSON")
        for text in (b'{"\xff":1}', b"{", b"{}\0", b"\xef\xbb\xbf{}", b"[" * 200_000)
    ),
    (pack({"\ud800": ONE}, b"xx"), None, "not valid JSON"),
    (pack(b'{"a":' + b"9" * 5000 + b"}"), None, "not valid JSON"),
    (pack([]), None, "not a JSON object"),
    (pack({"__metadata__": []}), None, "__metadata__"),
    (pack({"__metadata__": {"x": 1}}), None, "__metadata__"),
    (pack(b'{"__metadata__":{},"__metadata__":{}}'), None, "twice"),
    (pack(b'{"__metadata__":{"x":"1","x":"1"}}'), None, "twice"),
    (pack(b'{"a":%s,"b":1,"a":%s}' % (ONE_TEXT, ONE_TEXT), b"xx"), "a", "twice"),
    (pack(b'{"a\\u003ab":1,"a:b":%s}' % ONE_TEXT, b"xx"), None, "twice"),
    (EMPTY_TWICE, None, "twice"),
    (pack(b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}'), "a", "'dtype' twice"),
    (pack(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "a", "shape is malformed"),
    (pack(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}'), "a", "are malformed"),
    *(
        (pack({"a": broken}, b"xx"), "a", text)
        for text, entries in BROKEN_ENTRIES.items()
        for broken in entries
    ),
    (pack({"b": tensor("U8", [1], 0, 1), "a": tensor("U8", [2], 1, 3)}, b"xx"), "a", "truncated"),
    *(
        (pack({"b": ONE, "a": tensor("U8", [end - begin], begin, end)}, b"xxx"), "a", "overlaps tensor 'b'")
        for begin, end in ((1, 3), (0, 2), (1, 1))
    ),
    (pack({"b": ONE, "a": tensor("U8", [1], 3, 4)}, b"xxxx"), "a", "hole after tensor 'b'"),
    (pack({"b": ONE}, b"xxx"), None, "after tensor 'b' belong to no tensor"),
    (pack({}, b"x"), None, "after the header belong to no tensor"),
]  # fmt: skip
# What the library reads and we do not: a guess at the meaning would be needed.
STRICTER = [
    EMPTY_TWICE,
    pack(b'{"__metadata__":{"x":"1","x":"1"}}'),
    pack({"a": ["U8", [2], [0, 2]]}, b"xx"),
    pack({"a": entry(x=1)}, b"xx"),
]


@pytest.mark.parametrize(("raw", "name", "text"), BROKEN)
def test_broken_header(tmp_path: Path, raw: bytes, name: str | None, text: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_header(path)
    message = str(caught.value)
    assert text in message
    assert str(path) in caught.value.where
    assert ("tensor 'a'" in caught.value.where) == (name == "a")
    assert "what to do" in message
    assert len(message) < 1500
    if raw not in STRICTER:
        with pytest.raises((safetensors.SafetensorError, ValueError)):
            safetensors.deserialize(raw)


def test_unreadable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "absent", "."):
        with pytest.raises(InputError, match=re.escape(str(tmp_path))):
            read_header(tmp_path / name)


def test_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    header = {
        "z": tensor("U8", [1], 3, 4),
        "e": tensor("U8", [0], 3, 3),
        "a": tensor("U8", [3], 0, 3),
    }
    (tmp_path / "f").write_bytes(pack(header, b"abcd"))
    assert list(read_header(tmp_path / "f")[0]) == ["a", "e", "z"]


def test_a_huge_but_empty_tensor_is_fine(tmp_path: Path) -> None:
    raw = pack({"a": tensor("BF16", [2**62, 0], 0, 0), "b": tensor("U8", [0, 2**63, 2**63], 0, 0)})
    assert ours(raw, tmp_path / "f") == theirs(raw)


def test_a_null_metadata_and_surrogate_pairs_are_fine(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pack({"__metadata__": None, "\U0001f600": ONE}, b"xx"))
    entries, metadata, _ = read_header(tmp_path / "f")
    assert (list(entries), metadata) == (["\U0001f600"], {})


# --- headers against the library, on random files; on mutants: scripts/torture/headers.py ---


@st.composite
def valid_files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(st.text(max_size=4), max_size=5, unique=True)):
        if name == "__metadata__":
            continue
        code = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if int(np.prod(shape)) * num_bits(code) % 8:
            shape = [*shape, 4]
        begin, end = end, end + int(np.prod(shape)) * num_bits(code) // 8
        header[name] = tensor(code, shape, begin, end)
    names = draw(st.permutations(list(header)))
    header = {name: header[name] for name in names}
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        )
    return header, draw(st.binary(min_size=end, max_size=end))


def ours(raw: bytes, path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    path.write_bytes(raw)
    return {
        name: (ref.dtype, ref.shape, raw[ref.offset_bytes :][: ref.num_bytes])
        for name, ref in read_header(path)[0].items()
    }


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(raw)
    }


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "f.safetensors"


@settings(max_examples=num_examples(300), deadline=None)
@given(file=valid_files())
def test_valid_files_read_as_the_library_reads_them(
    scratch: Path, file: tuple[dict[str, Any], bytes]
) -> None:
    raw = pack(*file)
    assert ours(raw, scratch) == theirs(raw)
    _, metadata, sha256 = read_header(scratch)
    assert metadata == file[0].get("__metadata__", {})
    assert sha256 == hashlib.sha256(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()


# --- folders ---


def test_opens_a_sharded_folder(tmp_path: Path) -> None:
    shards = two_shards()
    root = write_folder(tmp_path / "my-model", shards, '{"model_type": "x", "limit": Infinity}')
    with open_source(root) as checkpoint:
        assert (checkpoint.root, checkpoint.name) == (root, "my-model")
        assert (checkpoint.revision, checkpoint.repo_id) == (None, None)
        assert checkpoint.config == {"model_type": "x", "limit": float("inf")}
        assert [file.name for file in checkpoint.files] == sorted(shards)
        index = (root / "model.safetensors.index.json").read_bytes()
        assert checkpoint.index_sha256 == hashlib.sha256(index).hexdigest()
        order = [(ref.file, ref.offset_bytes) for ref in checkpoint.tensors.values()]
        assert order == sorted(order)
        for number, name in enumerate(sorted(shards)):
            file = checkpoint.files[number]
            assert file.size_bytes == (root / name).stat().st_size
            assert file.header_sha256 == read_header(root / name)[2]
            with safetensors.safe_open(root / name, "np") as oracle:
                for key in oracle.keys():  # noqa: SIM118
                    value = oracle.get_tensor(key)
                    ref = checkpoint.tensors[key]
                    assert (ref.name, ref.file, ref.shape) == (key, number, value.shape)
                    assert ref.dtype == oracle.get_slice(key).get_dtype()
                    assert ref.num_bytes == value.nbytes
                    assert read_all(checkpoint, key) == value.tobytes()
        assert len(checkpoint.tensors) == 4


FIRST, SECOND = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
# Beside a checkpoint: files that are written, what the index names (None: it is removed), and what must be said.
TWICE_READ: dict[str, tuple[list[str], list[str] | None, list[str]]] = {
    "a single file": (
        ["model.safetensors"],
        [FIRST, SECOND],
        ["read in two ways", f"which names {FIRST}", "model.safetensors"],
    ),
    "a single file and an index of lost shards": (
        ["model.safetensors"],
        ["lost.safetensors"],
        ["read in two ways"],
    ),
    "shards of another count": (
        ["model-00001-of-00003.safetensors"],
        [FIRST, SECOND],
        [FIRST, "model-00001-of-00003"],
    ),
    "a file of another save": (
        ["old.safetensors"],
        [FIRST, SECOND],
        [f"{FIRST} and old.safetensors", "tensor 'a'"],
    ),
    "a single file and shards, no index": (
        ["model.safetensors"],
        None,
        ["model.safetensors and model-1-of-2"],
    ),
    "ranks, no index": (
        ["m-TP-000.safetensors", "m-TP-001.safetensors"],
        None,
        ["parts of tensors|model-1-of-2.safetensors and"],
    ),
}


@pytest.mark.parametrize("case", TWICE_READ)
@pytest.mark.parametrize("on_hub", [False, True])
def test_a_folder_that_can_be_read_in_two_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, on_hub: bool
) -> None:
    """vLLM would load the shards of the index, transformers a single file, and others every file."""
    root = write_folder(tmp_path / "repo", two_shards())
    files, named, texts = TWICE_READ[case]
    for name in files:
        save_file({**two_shards()[FIRST], **two_shards()[SECOND]}, root / name)
    index = root / "model.safetensors.index.json"
    if named is None:
        index.unlink()
    elif named != [FIRST, SECOND]:
        write_index(root, dict.fromkeys("abc", named[0]))
        (root / FIRST).unlink()
        (root / SECOND).unlink()
    with serve(root) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        with pytest.raises(InputError) as caught:
            open_source("org/name" if on_hub else root, is_lazy=True)
    for text in texts:
        assert re.search(text, str(caught.value)), str(caught.value)
    assert "what to do: " in str(caught.value)


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    """One more of the same set, with other tensors: of an index that was written before the last shard."""
    first, third = ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    root = write_folder(tmp_path, {first: {"a": np.ones(1)}})
    save_file({"z": np.ones(1)}, root / third)
    refuse(root, "does not name a shard", third, "'z'")


@pytest.mark.parametrize("on_hub", [False, True])
def test_shards_without_an_index_are_the_model_beside_gguf_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hub: bool
) -> None:
    name = "model-00001-of-00001.safetensors"
    root = write_folder(
        tmp_path / "repo", {name: {"model.layers.0.mlp.experts.0.up_proj.weight": np.ones((2, 2))}}
    )
    (root / "model.safetensors.index.json").unlink()
    (root / "other.gguf").write_bytes(b"another model")
    with serve(root) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        source = open_source("org/name" if on_hub else root, is_lazy=True)
    assert [file.name for file in source.files] == [name]


def test_files_that_are_no_second_reading(tmp_path: Path) -> None:
    """An index that names the single file, Mistral's own names, and files that no server can read."""
    root = write_folder(tmp_path, {"model.safetensors": {"a": np.ones(2)}})
    write_index(root, {"a": "model.safetensors"})
    save_file({"layers.0.attention.wq.weight": np.ones(1)}, root / "consolidated.safetensors")
    (root / "broken.safetensors").write_bytes(b"no header")
    assert [file.name for file in open_source(root).files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00000-TP-{:03}",
        "model-rank-{}-part-0",
        "model{}-mp2",
        "mp_rank_{:02}",
        "rank{}",
    ],
)
@pytest.mark.parametrize("num_files", [1, 2])
def test_parts_for_ranks_are_called_so(tmp_path: Path, name: str, num_files: int) -> None:
    root = write_folder(
        tmp_path,
        {f"{name.format(rank)}.safetensors": {"a": np.ones(2)} for rank in range(num_files)},
    )
    (root / "model.safetensors.index.json").unlink()
    refuse(root, "parts of tensors, cut for tensor-parallel ranks", name.format(0), "--tp")


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    root = write_folder(
        tmp_path, {"sub/m.safetensors": {"a": np.arange(3)}, "n.safetensors": {"b": np.ones(1)}}
    )
    checkpoint = open_source(root)
    assert [file.name for file in checkpoint.files] == ["n.safetensors", "sub/m.safetensors"]
    assert read_all(checkpoint, "a") == np.arange(3).tobytes()


words = str.split
COPIED = words("""
    generation_config.json merges.txt chat_template.jinja tokenizer.json tokenizer.model vocab.json vocab.txt
    tekken.json special_tokens_map.json added_tokens.json preprocessor_config.json
    video_preprocessor_config.json params.json processor_config.json quantize_config.json recipe.yaml
    qwen.tiktoken LICENSE LICENSE-CODE NOTICE.txt USE_POLICY.md README_zh.md configuration.json
    additional_chat_templates/rag.jinja tokenizer/tokenizer.json
    modules.json 1_Pooling/config.json SYSTEM_PROMPT.txt modeling_x.py layers.py ops/__init__.py
    ops/norm.py mel_filters.npz nano_v3_reasoning_parser.py train.py
""")
SKIPPED = words("""
    README.md SHA256SUMS pytorch_model.bin pytorch_model.bin.index.json a.pt b.pth c.gguf d.h5 e.msgpack f.onnx
    consolidated.safetensors original/params.json original/consolidated.00.pth .gitattributes
    .cache/huggingface/x.json .git/HEAD tokenizer/.hidden/x.txt tokenizer/w.bin
""")
LEFT_OUT = words("""
    optimizer.pkl trainer_state.json all_results.json adapter_config.json ds_config.json train_config.json
    latest debug.log core core.4711 tokenizer.json.bak config.json~ vocab.json.part tokenizer.json.incomplete
    run.sh data.jsonl requirements.txt events.out.tfevents.1 other.png notes.txt experts
""")
FOLDERS = [
    "checkpoint-20/tokenizer.json",
    "runs/events",
    "wandb/vocab.json",
    "global_step20/latest",
    "logs/a.md",
]
FOLDERS += [
    "pytorch_model_fsdp_0/__0_0.distcp",
    "best/config.json",
    "epoch_1/merges.txt",
    "lora/adapter_config.json",
]


@pytest.mark.parametrize("on_hub", [False, True])
def test_files_that_belong_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hub: bool
) -> None:
    root = write_folder(tmp_path / "repo", two_shards())
    for name in (*COPIED, *SKIPPED, *LEFT_OUT, *FOLDERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name[0]} = 1")
    with serve(root) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        source = open_source("org/name", is_lazy=True) if on_hub else SafetensorsSource(root)
    assert source.sidecar_files.names == tuple(sorted(COPIED))
    folders = {name.split("/")[0] + "/" for name in FOLDERS}
    assert set(source.sidecar_files.left_out) == {*LEFT_OUT, *folders}


def test_an_unreadable_subfolder_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path, two_shards())
    (root / "sub").mkdir()
    real = Path.iterdir

    def iterdir(path: Path) -> Any:  # the tests may run as root, for whom no folder is unreadable
        if path.name == "sub":
            raise PermissionError(13, os.strerror(13), str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(InputError, match="Permission denied") as caught:
        open_source(root)
    assert caught.value.where == str(root / "sub")


def refuse(root: Path, *texts: str) -> None:
    with pytest.raises(InputError) as caught:
        open_source(root)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("config", ["", "[]", "{", "null", '{"a": "\xff"}', "[" * 100_000])
def test_broken_config(tmp_path: Path, config: str) -> None:
    root = write_folder(tmp_path, two_shards())
    (root / "config.json").write_text(config, encoding="latin-1")
    refuse(root, str(root / "config.json"), "JSON")


def test_missing_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "m", two_shards())
    (root / SECOND).unlink()
    refuse(root, "missing (1 of 2)", SECOND, "tensor 'c'", "download")
    (root / "config.json").unlink()
    refuse(root, "has no config.json", FIRST)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("x")
    refuse(tmp_path, "no safetensors checkpoint", "pytorch_model.bin", "save_pretrained")


@pytest.mark.parametrize(
    ("index", "texts"),
    [
        ("{", ["not valid JSON"]),
        ("[]", ["not a JSON object"]),
        ("{}", ["weight_map", "NoneType"]),
        ('{"weight_map": []}', ["weight_map", "list"]),
        ('{"weight_map": {}}', ["weight_map"]),
        ('{"weight_map": 1, "weight_map": {}}', ["'weight_map' twice"]),
        ('{"weight_map": {"a": "x", "a": "y"}}', ["'a' twice"]),
        *(
            (json.dumps({"weight_map": {"a": name}}), ["tensor 'a'", "cannot be a shard", repr(name)[1:-1]])
            for name in [
                "../x.safetensors", "/etc/x.safetensors", "s/../../x.safetensors", "./x.safetensors",
                "s//x.safetensors",
                "", "x.bin", "s\\x.safetensors", "x\0.safetensors", "\ud800.safetensors",
            ]
        ),
        ('{"weight_map": {"a": 1}}', ["tensor 'a'", "cannot be a shard"]),
        ('{"weight_map": {"a": ["x.safetensors"]}}', ["tensor 'a'", "cannot be a shard"]),
    ],
)  # fmt: skip
def test_broken_index(tmp_path: Path, index: str, texts: list[str]) -> None:
    root = write_folder(tmp_path / "m", two_shards())
    save_file({"a": np.ones(1)}, tmp_path / "x.safetensors")  # an escape would find this one
    save_file({"a": np.ones(1)}, root / "x.safetensors")
    (root / "model.safetensors.index.json").write_text(index)
    refuse(root, "model.safetensors.index.json", *texts)


def test_an_index_and_files_that_disagree(tmp_path: Path) -> None:
    root = write_folder(tmp_path, two_shards())
    good = {"a": FIRST, "b": FIRST, "c": SECOND, "empty": SECOND}
    write_index(root, {**good, "ghost": FIRST})
    refuse(root, "tensor 'ghost'", "in no file", FIRST)
    write_index(root, {**good, "b": SECOND})
    refuse(root, "tensor 'b'", f"expected: {SECOND}", f"found: {FIRST}")
    write_index(root, {"a": FIRST, "c": SECOND, "empty": SECOND})
    refuse(root, "Tensors are in the files but not in the index: 1.", f"b ({FIRST})")
    save_file({"a": np.ones(1), **two_shards()[SECOND]}, root / SECOND)
    refuse(root, "tensor 'a'", f"{FIRST} and {SECOND}")


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "m", two_shards())
    file = root / "model-1-of-2.safetensors"
    for src in (str(tmp_path / "absent"), str(file), "absent", "./org/name", "a/b/c", ""):
        with pytest.raises(RequestError):
            open_source(src)
    with pytest.raises(RequestError, match="revision"):
        open_source(str(root), "main")
    with pytest.raises(InputError, match="x" * 90 + ".*…"):
        open_source("x" * 300)


# --- reads ---


@pytest.fixture
def big(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    shards = {
        f"model-{s}.safetensors": {
            f"t{s}.{i}": rng.integers(0, 256, 40_000 + i, np.uint8) for i in range(8)
        }
        for s in range(4)
    }
    return write_folder(tmp_path / "big", shards)


def test_reads_into_typed_buffers(tmp_path: Path) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    checkpoint = open_source(str(write_folder(tmp_path, {"model.safetensors": {"a": value}})))
    out = np.zeros((2, 4), np.float32)
    checkpoint.read_into(checkpoint.tensors["a"], out, 16)
    assert (out == value[1:]).all()
    checkpoint.read_into(checkpoint.tensors["a"], np.zeros((0, 4), np.float32), 48)


@pytest.mark.parametrize(
    ("start", "num_bytes"), [(-1, 1), (0, 40_001), (40_000, 1), (39_999, 2), (50_000, 0)]
)
def test_reads_outside_the_tensor(big: Path, start: int, num_bytes: int) -> None:
    with open_source(big) as checkpoint, pytest.raises(ValueError, match=r"t1\.0"):
        checkpoint.read_into(checkpoint.tensors["t1.0"], bytearray(num_bytes), start)


def test_threads_read_the_right_bytes_through_one_descriptor_a_file(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = [], os.open

    def slow_open(path: Path, flags: int) -> int:
        time.sleep(0.01)  # widens the window in which a second thread could open it too
        opened.append(Path(path).name)
        return real(path, flags)

    want = {}
    for path in sorted(big.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            want.update({name: file.get_tensor(name).tobytes() for name in file.keys()})  # noqa: SIM118
    barrier = threading.Barrier(8)
    monkeypatch.setattr(os, "open", slow_open)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        barrier.wait()
        for _ in range(200):
            ref = refs[rng.integers(len(refs))]
            start = int(rng.integers(ref.num_bytes))
            buffer = bytearray(int(rng.integers(ref.num_bytes - start)) + 1)
            checkpoint.read_into(ref, buffer, start)
            assert buffer == want[ref.name][start : start + len(buffer)]

    with open_source(big) as checkpoint:
        refs = list(checkpoint.tensors.values())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    shards = [name for name in opened if name.endswith(".safetensors")]
    assert sorted(shards) == [f"model-{s}.safetensors" for s in range(4)]


def test_descriptors_are_lazy_and_closed(big: Path) -> None:
    def num_open() -> int:
        return sum(
            "model-" in str(fd.readlink())
            for fd in Path("/proc/self/fd").iterdir()
            if fd.is_symlink()
        )

    before = num_open()
    with open_source(big) as checkpoint:
        assert num_open() == before
        read_all(checkpoint, "t0.0")
        read_all(checkpoint, "t0.1")
        assert num_open() == before + 1
    assert num_open() == before
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        read_all(checkpoint, "t0.0")


def test_a_shard_that_shrinks(big: Path) -> None:
    path = big / "model-1.safetensors"
    with open_source(big) as checkpoint:
        *_, ref = (ref for ref in checkpoint.tensors.values() if ref.file == 1)
        read_all(checkpoint, ref.name)
        os.truncate(path, ref.offset_bytes + 100)
        head = bytearray(100)
        checkpoint.read_into(ref, head)
        with pytest.raises(InputError, match="shrank") as caught:
            read_all(checkpoint, ref.name)
        assert ref.name in str(caught.value)
        assert str(path) in str(caught.value)
        assert str(ref.offset_bytes + 100) in caught.value.found


@pytest.mark.parametrize("change", ["shrink", "replace", "remove"])
def test_a_shard_that_changes_before_its_first_read(big: Path, change: str) -> None:
    path = big / "model-1.safetensors"
    with open_source(big) as checkpoint:
        if change == "shrink":
            os.truncate(path, 1000)
        elif change == "replace":
            shutil.copyfile(big / "model-2.safetensors", path)
        else:
            path.unlink()
        with pytest.raises(InputError) as caught:
            read_all(checkpoint, "t1.3")
        assert ("No such file" if change == "remove" else "changed since") in str(caught.value)
        assert str(path) in caught.value.where


def test_a_read_error_says_why(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    with open_source(big) as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(InputError, match="Input/output error") as caught:
            read_all(checkpoint, "t1.3")
        assert "'t1.3'" in caught.value.where


# --- the Hub ---


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline Hub cache that holds org/name: the snapshot, of links to blobs as in a real one."""
    repo = tmp_path / "cache" / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    write_folder(snapshot, two_shards())
    (snapshot / "tokenizer.json").write_text("{}")
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repo / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(repo.parent))
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_opens_a_cached_repo(hub_cache: Path, revision: str | None) -> None:
    with open_source("org/name", revision) as checkpoint:
        assert checkpoint.root == hub_cache
        assert (checkpoint.name, checkpoint.repo_id) == ("name", "org/name")
        assert checkpoint.revision == COMMIT
        assert checkpoint.sidecar_files.names == ("tokenizer.json",)
        for shard in two_shards().values():
            for name, value in shard.items():
                assert read_all(checkpoint, name) == value.tobytes()


def test_a_folder_wins_over_a_repo_of_the_same_name(hub_cache: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "org" / "name", {"model.safetensors": {"local": np.ones(1)}})
    assert list(open_source("org/name").tensors) == ["local"]


@pytest.mark.parametrize(
    ("src", "revision"), [("org/other", None), ("org/name", "v2"), ("org/name", "f" * 40)]
)
def test_offline_and_not_cached(hub_cache: Path, src: str, revision: str | None) -> None:
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set") as caught:
        open_source(src, revision)
    assert src in caught.value.where
    assert (revision or "main") in caught.value.where


def test_an_invalid_repo_id(hub_cache: Path) -> None:
    with pytest.raises(RequestError, match="valid Hub repo id"):
        open_source("org/name--x")


def test_downloads_what_is_needed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = write_folder(tmp_path / "repo", two_shards())
    write_folder(repo, {"[odd].safetensors": {"o": np.ones(1)}})
    first, second = two_shards()
    write_index(
        repo, {"a": first, "b": first, "c": second, "empty": second, "o": "[odd].safetensors"}
    )
    small = words("generation_config.json tokenizer/vocab.txt modeling_x.py")
    unwanted = words("""
        pytorch_model.bin pytorch_model.bin.index.json original/params.json original/w.safetensors
        consolidated.safetensors o.safetensors w.gguf .gitattributes sub/.x/y onnx/m.onnx
    """)
    for name in small + unwanted:  # each of other bytes: the library downloads the same ones once
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(name)
    with serve(repo) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        checkpoint = open_source("org/name", "main")
    wanted = [*small, *words("config.json model.safetensors.index.json [odd].safetensors")]
    wanted += [first, second]
    assert sorted(server.whole) == sorted(wanted)
    headers = {"consolidated.safetensors", "o.safetensors"}  # are they another reading of the repo?
    assert server.fetched == {*wanted, *headers}
    assert checkpoint.sidecar_files.names == tuple(sorted(small))
    assert checkpoint.sidecar_files.names == SafetensorsSource(repo).sidecar_files.names
