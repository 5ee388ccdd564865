"""Copied shards are hashed behind the threads that write them, in whatever order these do."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hqconv
from hqconv.artifact.manifest import read_manifest
from hqconv.conversion import executor, output_folder, resources
from hqconv.conversion.executor import WrittenBytes
from hqconv.errors import OutputError
from hqconv.io.file_access import sha256_as_written
from tests.make.qwen import read_tree, write_qwen3_moe

OPTIONS: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu"}
SHARD = "model.safetensors"


@given(st.data())
def test_the_end_is_that_of_the_first_gap(data: st.DataObject) -> None:
    header = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=8))
    ends = [header + sum(sizes[: number + 1]) for number in range(len(sizes))]
    begins = [header, *ends][: len(sizes)]
    written, done = WrittenBytes(header), set[int]()
    for number in data.draw(st.permutations(range(len(sizes)))):
        written.add(begins[number], ends[number])
        done.add(number)
        first = next(one for one in range(len(sizes) + 1) if one not in done)
        assert written.end == [*begins, (ends or [header])[-1]][first]


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(1, 400), max_size=5), chunk_bytes=st.integers(1, 100))
def test_digests_behind_a_writer(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int], chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("written") / "file"
    path.write_bytes(data)
    ends = iter(sorted({*cuts, len(data)}))
    with path.open("rb") as file:

        def wait_beyond(offset: int) -> int:
            return next(end for end in ends if end > offset)

        assert sha256_as_written(file.fileno(), len(data), wait_beyond, chunk_bytes) == hashlib.sha256(data).hexdigest()


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="ends at byte 10"):
        sha256_as_written(file.fileno(), 11, lambda _: 11, 4)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a shard of many pieces."""
    monkeypatch.setattr(executor, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(resources, "_CPU_BATCH_BYTES", 1)  # one expert: as large as a piece
    model = write_qwen3_moe(tmp_path / "model")
    tensors = load_file(model / SHARD)
    noise = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({**tensors, "model.embed_tokens.weight": noise}, model / SHARD)
    return model


def assert_digests(out: Path) -> None:
    for path, entry in read_manifest(out).files.items():
        assert hashlib.sha256((out / path).read_bytes()).hexdigest() == entry.sha256, path


def test_the_shard_is_read_once_while_it_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, offsets, threads = list[str](), list[int](), set[str]()
    sha256_of, as_written, add = output_folder.sha256_of, output_folder.sha256_as_written, WrittenBytes.add
    header_ends, is_behind = list[int](), threading.Event()

    def noted(path: Path, *arguments: Any) -> str:
        hashed.append(path.name.removesuffix(".partial"))
        return sha256_of(path, *arguments)

    def followed(descriptor: int, size: int, wait_beyond: Any, *arguments: Any) -> str:
        def wait(offset: int) -> int:
            offsets.append(offset)
            threads.add(threading.current_thread().name)
            if len(offsets) > 2:  # of the start, of the header's end, and of a piece's
                is_behind.set()
            return int(wait_beyond(offset))

        return as_written(descriptor, size, wait, *arguments)

    def held(written: WrittenBytes, begin: int, end: int) -> None:
        """Write no more than some first pieces before they are hashed."""
        header_ends.append(written.end)
        if written.end > header_ends[0]:
            assert is_behind.wait(60)
        add(written, begin, end)

    monkeypatch.setattr(WrittenBytes, "add", held)
    monkeypatch.setattr(output_folder, "sha256_of", noted)
    monkeypatch.setattr(output_folder, "sha256_as_written", followed)
    report = hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert_digests(tmp_path / "out")
    assert SHARD not in hashed
    assert len(hashed) == len(report.plan.layers)  # their files
    assert offsets[0] == 0
    assert len(offsets) > 2
    assert all(name.startswith("hqconv-finish") for name in threads)


def test_pieces_in_another_order(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is hashed before it is written: bytes that are not written yet are zeros."""
    split_unit = executor.split_unit

    def from_the_end(*arguments: Any) -> Iterator[Any]:
        return reversed(list(split_unit(*arguments)))

    hqconv.convert(model, tmp_path / "plain", **OPTIONS)
    monkeypatch.setattr(executor, "split_unit", from_the_end)
    hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert_digests(tmp_path / "out")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "plain")


def test_a_disk_that_cannot_read_back(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(output_folder, "sha256_as_written", fail)
    with pytest.raises(OutputError, match="Writing the output failed"):
        hqconv.convert(model, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out" / "hqconv.json").exists()
