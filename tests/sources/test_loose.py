"""Files beside the weights: what an artifact cannot have is refused before anything is written, by its name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hqconv
from hqconv import api
from hqconv.errors import HqconvError, InputError, OutputError
from hqconv.sources.opening import open_source
from tests.make.nodes import NODES, in_time
from tests.make.qwen import write_qwen3_moe

OPTIONS: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu", "threads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("loose") / "model", num_layers=1)


@pytest.fixture
def source(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "src"))


def refusal(source: Path, out: Path, **options: Any) -> HqconvError:
    """Of plan, inspection and conversion alike; nothing is written."""
    with pytest.raises(HqconvError) as planned:
        in_time(lambda: hqconv.plan(source, schema="int4", target="sm90"))
    with pytest.raises(HqconvError) as converted:
        in_time(lambda: hqconv.convert(source, out, **OPTIONS, **options))
    assert str(planned.value) == str(converted.value)
    assert not out.exists()
    return converted.value


def put(*paths: str) -> Callable[[Path], None]:
    def act(source: Path) -> None:
        for path in paths:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text("x")

    return act


def link(path: str, target: str) -> Callable[[Path], None]:
    return lambda source: (source / path).symlink_to(target)


def config(ending: str) -> Callable[[Path], None]:
    def act(source: Path) -> None:
        text = (source / "config.json").read_text().rstrip().removesuffix("}")
        (source / "config.json").write_text(f'{text}, "x": {ending}}}')

    return act


def links(source: Path) -> None:
    """A link to a link, which is hidden, to a file elsewhere."""
    (source / ".a").symlink_to("../other/file")
    (source / "vocab.json").symlink_to(".a")


REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no UTF-8": (put("vocab\udcff.txt"), "vocab", "valid Unicode"),
    "a folder of no UTF-8": (put("a\udcff/b.jinja"), "b.jinja", "valid Unicode"),
    "a name of 248 bytes": (put("x" * 242 + ".jinja"), "x" * 90, "too long"),
    "a name of 249 bytes, fewer letters": (put("é" * 121 + "x.jinja"), "é" * 90, "too long"),
    "below experts": (put("experts/x.jinja"), "experts/x.jinja", "that the artifact needs"),
    "a folder named as the index": (
        put("model.safetensors.index.json/x.md"),
        "index.json",
        "a folder",
    ),
    "a folder named as the manifest": (put("hqconv.json/x.md"), "hqconv.json", "a folder"),
    "a folder named as the journal": (
        put(".hqconv-progress.jsonl/x.md"),
        ".hqconv-progress",
        "a folder",
    ),
    "a folder named as an unfinished file": (
        put("a.md", "a.md.partial/x.jinja"),
        "a.md.partial/x.jinja",
        "needs",
    ),
    "a folder named as an unfinished config": (
        put("config.json.partial/x.jinja"),
        "config.json.partial",
        "needs",
    ),
    "a link to a file of the system": (
        link("tokenizer2.json", "/etc/hostname"),
        "tokenizer2.json",
        "leads out",
    ),
    "a link upwards": (link("tokenizer2.json", "../other/file"), "tokenizer2.json", "leads out"),
    "a link to a link": (links, "vocab.json", "leads out"),
    "a link to nothing": (link("vocab.json", "../blobs/absent"), "vocab.json", "a link to nothing"),
    "a link to itself": (link("vocab.json", "vocab.json"), "vocab.json", "a circle of links"),
    "a config that links to nothing": (
        link("hf_quant_config.json", "absent"),
        "hf_quant",
        "link to nothing",
    ),
    "a config 65 deep": (config("[" * 64 + "]" * 64), "config.json", "nested too deeply"),
    "a config 100000 deep": (
        config("[" * 100_000 + "]" * 100_000),
        "config.json",
        "nested too deeply",
    ),
    "half a surrogate": (config('"\\ud800"'), "config.json", "valid Unicode"),
    "half a surrogate as a key": (config('{"\\udfff": 1}'), "config.json", "valid Unicode"),
    "too long a number": (config("1" * 5000), "config.json", "not valid JSON"),
    "a config of 64 MiB": (
        lambda source: config(f'"{"x" * (64 << 20)}"')(source),
        "config.json",
        "larger than 67108864 bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    change, where, text = REFUSED[name]
    (tmp_path / "other").mkdir()
    put("file")(tmp_path / "other")
    change(source)
    error = refusal(source, tmp_path / "out")
    assert (error.exit_code, where in error.where, text in str(error)) == (3, True, True), str(
        error
    )


def plan_of(source: Path) -> Any:
    return hqconv.plan(source, schema="int4", target="sm90")


SPECIAL = (
    "vocab.txt",
    "config.json",
    "model.safetensors.index.json",
    "hqconv.json",
    ".hqconv-progress.jsonl",
)
SPECIAL += (
    "model.safetensors",
    "hf_quant_config.json",
    "quant_model_description.json",
    "tokenizer/vocab.txt",
)


@pytest.mark.parametrize("kind", [kind for kind in NODES if kind != "a folder"])
@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_is_not_waited_for(
    name: str, kind: str, source: Path, tmp_path: Path
) -> None:
    (source / name).unlink(missing_ok=True)
    (source / name).parent.mkdir(exist_ok=True)
    NODES[kind](source / name)
    error = refusal(source, tmp_path / "out")
    assert (error.exit_code, error.where, error.found) == (3, str(source / name), kind)
    with pytest.raises(InputError):
        in_time(lambda: hqconv.inspect(source))


def test_a_pipe_named_as_gguf_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        n: t for n, t in load_file(source / "model.safetensors").items() if "experts" not in n
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    os.mkfifo(source / "x.gguf")
    error = refusal(source, tmp_path / "out")
    assert (error.exit_code, error.where) == (3, str(source / "x.gguf"))
    assert "pipe" in error.found


@pytest.mark.parametrize(
    "name", ["hqconv.json", ".hqconv-progress.jsonl", ".hqconv-progress.rank1.jsonl"]
)
@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("mode", ["", "resume", "overwrite"])
def test_an_output_that_holds_no_files(
    mode: str, kind: str, name: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    NODES[kind](out / name)
    before = (out / name).lstat()
    options = {**OPTIONS, **({mode: True} if mode else {})}
    if name.endswith("rank1.jsonl"):  # nobody looks at it before there is a journal
        put(".hqconv-progress.jsonl")(out)
    with pytest.raises(OutputError):
        in_time(lambda: hqconv.convert(model, out, **options))
    assert os.path.samestat(before, (out / name).lstat())
    with contextlib.suppress(HqconvError):
        assert not in_time(lambda: hqconv.verify(out, device="cpu")).passed
    with contextlib.suppress(
        HqconvError
    ):  # of a journal that can be read there is something to say
        assert in_time(lambda: hqconv.inspect(out))["kind"] == "unfinished"


def test_the_config_of_an_artifact_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hqconv.convert(model, out, **OPTIONS)
    (out / "config.json").unlink()
    os.mkfifo(out / "config.json")
    report = in_time(lambda: hqconv.verify(out, device="cpu", checks=("files",)))
    assert any("pipe" in finding.found for finding in report.results[0].findings)
    assert in_time(lambda: hqconv.inspect(out))["quant_method"] is None


def test_what_cannot_be_read_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def denied(path: Any, *more: Any, **options: Any) -> int:  # the tests may run as root
        if str(path).endswith("tokenizer.json"):
            raise PermissionError(13, os.strerror(13), str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "open", denied)
    error = refusal(source, tmp_path / "out")
    assert (error.exit_code, error.where) == (3, str(source / "tokenizer.json"))
    assert error.found == "Permission denied"


def test_what_is_left_out_is_said(source: Path, tmp_path: Path) -> None:
    put("a.md.partial", "sub/b.json", ".hidden", "original/x.json", "a.log")(source)
    link("more", "sub")(source)
    report = hqconv.convert(source, tmp_path / "out", **OPTIONS)
    assert [text for text in report.warnings if "left out" in text] == [
        "4 files and folders left out: a.log, a.md.partial, more, sub/."
    ]
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert not copied & {"a.md.partial", "sub", ".hidden", "original", "a.log", "more"}


def test_what_is_left_out_may_change(source: Path, tmp_path: Path) -> None:
    """A trainer goes on to write its log: that is neither another source nor a finding."""
    put("a.log")(source)
    hqconv.convert(source, tmp_path / "out", **OPTIONS, source_digests=True)
    put("b.log", "checkpoint-2/optimizer.pt")(source)
    assert hqconv.verify(tmp_path / "out", source, device="cpu").passed
    assert hqconv.convert(source, tmp_path / "out", **OPTIONS, update=True).was_finished


def test_links_inside_and_into_the_cache_of_the_hub(source: Path, tmp_path: Path) -> None:
    """As in a snapshot, in a folder of links to a snapshot, and in an older download to a folder."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(repo / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    links = tmp_path / "links"
    links.mkdir()
    for file in snapshot.iterdir():
        (links / file.name).symlink_to(file)
    (links / "vocab.json").symlink_to("tokenizer.json")
    for folder in (snapshot, links):
        assert "tokenizer.json" in open_source(folder).sidecar_files.names
    hqconv.convert(links, tmp_path / "out", **OPTIONS)
    assert (tmp_path / "out/vocab.json").read_bytes() == (snapshot / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out/vocab.json").is_symlink()
    put("x/blobs/secret")(tmp_path)  # no cache: there are no snapshots beside it
    (links / "merges.txt").symlink_to(tmp_path / "x/blobs/secret")
    with pytest.raises(InputError, match="leads out"):
        open_source(links)


def test_loose_files_count_in_the_space_that_is_needed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plan_of(source)
    with (source / "vocab.txt").open("wb") as file:
        file.truncate(1 << 40)
    planned = plan_of(source)
    assert planned.other_bytes == plain.other_bytes + (1 << 40)
    free = planned.num_bytes_out + planned.other_bytes - 1
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr("hqconv.io.durable_files.shutil.disk_usage", lambda _: usage)
    notes = api.describe_plan(planned, tmp_path / "out", device="cpu")["notes"]
    assert any("The disk cannot hold the artifact" in note for note in notes)
    with pytest.raises(OutputError, match="cannot hold"):
        hqconv.convert(source, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()
    usage.free += 1
    assert not api.describe_plan(planned, tmp_path / "out", device="cpu")["notes"]
