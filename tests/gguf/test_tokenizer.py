"""Tokenizers made from the metadata of GGUF files, against the original ones: transformers' own classes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hqconv.gguf.header import read_header
from hqconv.gguf.source import _RULES
from hqconv.sources.opening import open_source
from tests.make.command import call
from tests.make.gguf_models import recorded, rewrite
from tests.make.hub_server import serve, use
from tests.make.qwen import read_tree
from tests.make.startup import cold

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL, THINK = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<think>"
TEXTS = [
    "the quick brown fox's 12 345 times don't DON'T",
    "<|im_start|>the <think>fox</think><|im_end|>\n\n  over\tthe   dog ",
    "cafe\u0301 日本語 \U0001f600\r\n x1234567",
    " ",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
CHAT = [{"role": "user", "content": "the fox"}]
MADE = "The tokenizer was made from the metadata of m.gguf by transformers"
NOT_MADE = "No tokenizer was made from the metadata of m.gguf: "
PROSE = [
    "the quick brown fox jumps over the lazy dog's 12345 times, don't you think so? 日本語 café"
] * 3


@cache
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Words and merges of a small byte-level tokenizer."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        PROSE, tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet)
    )
    return trained.get_vocab(), [
        tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]
    ]


@cache
def sentencepiece() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Words and merges of a small tokenizer as llama's: special words, bytes, then words in the order of merges."""
    trained = tokenizers.SentencePieceBPETokenizer()
    trained.train_from_iterator(PROSE, vocab_size=120, special_tokens=[], show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    joined = [first + second for first, second in merges]
    words += joined + sorted(set(model["vocab"]) - set(joined))
    return {word: number for number, word in enumerate(words)}, merges


def original(kind: str) -> Any:
    """The publisher's tokenizer."""
    if kind == "llama":
        words, merges = sentencepiece()
        return transformers.LlamaTokenizer(
            vocab=words, merges=merges, add_bos_token=True, chat_template=TEMPLATE
        )
    words, merges = byte_level()
    cls = {"qwen2": transformers.Qwen2Tokenizer, "gpt-2": transformers.GPT2Tokenizer}[kind]
    names = {
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
    }
    tokenizer = cls(vocab=words, merges=merges, **names, chat_template=TEMPLATE)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(word, special=True, normalized=False) for word in SPECIAL]
    )
    tokenizer.add_tokens([tokenizers.AddedToken(THINK, special=False, normalized=False)])
    return tokenizer


def metadata(kind: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes of a tokenizer."""
    keys: dict[str, Any] = {"tokenizer.chat_template": TEMPLATE}
    if kind == "llama":
        words, merges = sentencepiece()
        keys |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.merges": None,
        }
        keys["tokenizer.ggml.scores"] = [
            float(-max(number - 259, 0)) for number in range(len(words))
        ]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(words) - 259)]
        ids = {"unknown": 0, "bos": 1, "eos": 2}
    else:
        number, merges, words = len(byte_level()[0]), byte_level()[1], original(kind).get_vocab()
        keys |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": kind,
            "tokenizer.ggml.add_bos_token": False,
        }
        keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
        types = [1] * number + [3, 3, 3, 4]
        first = words[SPECIAL[0]]
        ids = {"unknown": first, "bos": first, "eos": words[SPECIAL[2]], "padding": first}
    keys |= {f"tokenizer.ggml.{word}_token_id": number for word, number in ids.items()}
    return {
        **keys,
        "tokenizer.ggml.tokens": sorted(words, key=words.__getitem__),
        "tokenizer.ggml.token_type": types,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded("qwen3_moe", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Callable[[str], Path]:
    """A GGUF file with a tokenizer of a kind."""
    root = tmp_path_factory.mktemp("files")

    def make(kind: str) -> Path:
        (root / kind).mkdir()
        return rewrite(plain, root / kind / "m.gguf", keys=metadata(kind))

    return cache(make)


@pytest.fixture(scope="module")
def converted(
    tmp_path_factory: pytest.TempPathFactory, files: Callable[[str], Path]
) -> tuple[Path, Path, str]:
    out = tmp_path_factory.mktemp("converted") / "out"
    done = convert(files("qwen2"), out, "--source-digests")
    assert done.exit_code == 0, done.stderr
    return files("qwen2"), out, done.stderr


def convert(model: Path, out: Path, *more: object) -> Any:
    command = ("convert", model, "-o", out, "--schema", "int8", "--target", "sm90")
    return call(*command, "--device", "cpu", *more)


def made(path: object, **options: Any) -> tuple[dict[str, bytes], str]:
    with open_source(path, **options) as source:
        return source.sidecar_files.generate()


def compare(folder: Path, kind: str) -> None:
    found, expected = transformers.AutoTokenizer.from_pretrained(folder), original(kind)
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids, text
        assert found.decode(ids) == expected.decode(ids)
        assert found.decode(ids, skip_special_tokens=True) == expected.decode(
            ids, skip_special_tokens=True
        )
    for asks in (True, False):
        options = {"tokenize": False, "add_generation_prompt": asks}
        chat = found.apply_chat_template(CHAT, **options)
        assert chat == expected.apply_chat_template(CHAT, **options)
    third = "pad_token_id" if kind != "llama" else "unk_token_id"
    for name in ("bos_token_id", "eos_token_id", third):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.parametrize("kind", ["qwen2", "gpt-2", "llama"])
def test_the_made_tokenizer_encodes_as_the_original(
    tmp_path: Path, files: Callable[[str], Path], plain: Path, kind: str
) -> None:
    found, remark = made(files(kind))
    assert (set(found), remark.startswith(MADE)) == (FILES, True)
    assert (found, remark) == made(files(kind))
    for name, data in found.items():
        (tmp_path / name).write_bytes(data)
    with open_source(plain) as source:
        (tmp_path / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
    compare(tmp_path, kind)


def test_an_artifact_has_the_tokenizer(converted: tuple[Path, Path, str], tmp_path: Path) -> None:
    path, out, printed = converted
    compare(out, "qwen2")
    assert {name: (out / name).read_bytes() for name in FILES} == made(path)[0]
    manifest = json.loads((out / "hqconv.json").read_bytes())
    assert [text.startswith(MADE) for text in manifest["warnings"]] == [True]
    assert printed.count("was made from") == 1
    for more in ((), ("--source", path)):
        done = call("verify", out, "--checks", "files,weights", "--json", *more)
        assert done.exit_code == 0, done.stdout
    done = convert(path, out, "--update", "--json")
    assert (done.exit_code, '"was_finished": true' in done.stdout) == (0, True), done.stdout
    again = convert(path, tmp_path / "again", "--threads", 1, "--source-digests")
    assert (again.exit_code, read_tree(tmp_path / "again")) == (0, read_tree(out))


def test_looking_at_a_file_loads_nothing(files: Callable[[str], Path]) -> None:
    path = files("qwen2")
    assert cold("inspect", path)[0] == set()
    done = convert(path, path.parent / "out", "--dry-run", "--json")
    assert (done.exit_code, "no tokenizer" in done.stderr) == (0, False), done.stderr
    assert json.loads(done.stdout)["warnings"] == []


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pre", "deepseek-v3", "the rules of its tokenizer.ggml.pre, deepseek-v3, are not known"),
        ("pre", None, "the rules of its tokenizer.ggml.pre, no value, are not known"),
        ("model", "rwkv", "its tokenizer.ggml.model, rwkv, is not known"),
    ],
)
def test_unknown_rules_are_told_before(
    tmp_path: Path, plain: Path, key: str, value: str | None, reason: str
) -> None:
    keys = {**metadata("qwen2"), f"tokenizer.ggml.{key}": value}
    path = rewrite(plain, tmp_path / "m.gguf", keys=keys)
    done = convert(path, tmp_path / "out", "--dry-run", "--json")
    first, second = json.loads(done.stdout)["warnings"]
    assert first == f"The tokenizer in m.gguf is left out: {reason}."
    assert "has no tokenizer" in second
    assert made(path) == ({}, "")


def test_a_failure_is_a_warning(tmp_path: Path, plain: Path) -> None:
    keys = metadata("qwen2")
    keys["tokenizer.ggml.tokens"][-2] = "<｜end｜>"  # transformers gives it another id
    path = rewrite(plain, tmp_path / "m.gguf", keys=keys)
    done = convert(path, tmp_path / "out", "--source-digests")
    assert done.exit_code == 0, done.stderr
    assert f"{NOT_MADE}ValueError: the special word" in done.stderr
    assert not any((tmp_path / "out" / name).exists() for name in FILES)
    assert json.loads((tmp_path / "out/hqconv.json").read_bytes())["warnings"][0].startswith(
        NOT_MADE
    )
    assert call("verify", tmp_path / "out", "--source", path, "--checks", "files").exit_code == 0
    done = convert(path, tmp_path / "out", "--update", "--json")
    assert (done.exit_code, '"was_finished": true' in done.stdout) == (0, True), done.stdout


def test_without_transformers(
    files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqconv.gguf.source.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = convert(files("qwen2"), tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    for reason in ("transformers is not installed", f"{NOT_MADE}ModuleNotFoundError"):
        assert reason in done.stderr
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_the_publishers_tokenizer_is_taken(tmp_path: Path, files: Callable[[str], Path]) -> None:
    shutil.copy(files("qwen2"), tmp_path / "m.gguf")
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert set(made(tmp_path)[0]) == FILES - {"tokenizer_config.json"}
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert made(tmp_path) == ({}, "")


def test_of_a_split_file_and_of_the_hub(
    tmp_path: Path, files: Callable[[str], Path], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(files("qwen2"))[0]
    folder = tmp_path / "repo"
    folder.mkdir()
    for number in range(2):
        name = f"m-{number + 1:05d}-of-00002.gguf"
        rewrite(plain, folder / name, keys=None if number else metadata("qwen2"), part=(number, 2))
    assert made(folder / "m-00002-of-00002.gguf")[0] == expected
    with serve(folder) as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        assert made("org/name", is_lazy=True)[0] == expected
        assert hub.whole == []


def test_the_file_with_metadata_alone(tmp_path: Path, files: Callable[[str], Path]) -> None:
    whole, out = read_header(files("qwen2")), tmp_path / "metadata.gguf"
    out.write_bytes(whole.metadata_file)
    header = read_header(out)
    assert (header.tensors, header.metadata) == ({}, whole.metadata)
    assert header.sha256 == hashlib.sha256(whole.metadata_file).hexdigest()  # nothing follows


def test_the_names_of_rules_are_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert set(_RULES) - {"gpt-2"} <= set(
        GGUF_PRE_TOKENIZER_SPLITS
    )  # and it takes GPT-2's for other names
