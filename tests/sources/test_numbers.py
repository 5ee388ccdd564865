"""Numbers that nobody means, in options, configs, names, headers and manifests: refused at once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hqconv
from hqconv.errors import HqconvError, InputError, RequestError, VerificationError
from hqconv.models.expert_map import map_experts
from hqconv.schemas.grid import MAX_COUNT, Grid
from hqconv.schemas.tensors import TensorRef
from hqconv.sources.opening import open_source
from tests.make.conversions import write_manifest
from tests.make.nodes import in_time
from tests.make.qwen import set_config, write_qwen3_moe
from tests.make.small import GPT_OSS

HUGE = (10**9, 10**30, 10**4000, -(10**30))
ON_CPU: dict[str, Any] = {"schema": "int4", "target": "sm90", "device": "cpu"}
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("numbers") / "model", num_layers=1)


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("numbers") / "out"
    hqconv.convert(model, out, **ON_CPU, threads=2)
    return out


def at_once(call: Callable[[], object]) -> HqconvError:
    """The error of a call that does not hang."""
    begun = time.process_time()  # other processes may keep this one waiting
    with pytest.raises(HqconvError) as caught:
        in_time(call)
    assert time.process_time() - begun < 60
    assert len(str(caught.value)) < 3000
    return caught.value


@pytest.mark.parametrize(
    "number", [*HUGE, MAX_COUNT + 1, 0.5, "8", True], ids=lambda n: str(n)[:12]
)
@pytest.mark.parametrize("option", ["tp", "ep", "redundant_experts"])
def test_options(option: str, number: Any, model: Path, tmp_path: Path) -> None:
    words = {**ON_CPU, option: number}
    for call in (
        lambda: hqconv.plan(model, **words),
        lambda: hqconv.convert(model, tmp_path / "out", **words),
    ):
        error = at_once(call)
        assert (error.exit_code, error.where) == (2, f"--{option.replace('_', '-')}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tp", "ep"), [(2, MAX_COUNT), (MAX_COUNT, MAX_COUNT), (257, 256)])
def test_ranks_are_bounded(tp: int, ep: int) -> None:
    error = at_once(lambda: Grid(tp, ep))
    assert (error.where, error.found) == ("--tp, --ep", str(tp * ep))
    assert Grid(256, 256).tp == 256


def with_config(model: Path, folder: Path, **words: Any) -> Path:
    shutil.copytree(model, folder)
    set_config(folder, **words)
    return folder


KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
)


@pytest.mark.parametrize(
    "number", [*HUGE, 0, True, 2.5, [10**30], float("inf")], ids=lambda n: str(n)[:12]
)
@pytest.mark.parametrize("key", KEYS)
def test_configs(key: str, number: Any, model: Path, tmp_path: Path) -> None:
    source = with_config(model, tmp_path / "src", **{key: number})
    error = at_once(lambda: hqconv.plan(source, schema="int4", target="sm90"))
    assert error.exit_code == 3
    assert isinstance(error, InputError)
    assert at_once(lambda: hqconv.inspect(source)).exit_code == 3


def test_more_experts_for_a_token_than_there_are(model: Path, tmp_path: Path) -> None:
    source = with_config(model, tmp_path / "src", num_experts_per_tok=5)
    error = at_once(lambda: hqconv.plan(source, schema="int4", target="sm90"))
    assert (error.where, error.found) == (LAYER, "5")
    fits = with_config(model, tmp_path / "fits", num_experts_per_tok=4)
    assert hqconv.plan(fits, schema="int4", target="sm90").layers[0].layer.top_k == 4


@pytest.mark.parametrize("number", [10**9, 10**15])
def test_stacks_of_so_many_experts(number: int) -> None:
    """Headers may say so where another dimension is none, and no byte is needed for it."""
    config = {**GPT_OSS, "num_local_experts": number}
    for shape in ((0, 0), (0, 256), (256, 0)):
        refs = {
            f"{LAYER}.{name}": TensorRef(
                f"{LAYER}.{name}", "BF16", (number, *shape[:dims]), 0, 0, 0
            )
            for name, dims in {"gate_up_proj": 2, "down_proj": 2, "gate_up_proj_bias": 1}.items()
        }
        assert at_once(lambda refs=refs: map_experts(refs, config)).exit_code == 3


@pytest.mark.parametrize("digits", [30, 4000, 5000])
@pytest.mark.parametrize("part", ["layers.0.", "experts.0."])
def test_names(part: str, digits: int, model: Path) -> None:
    with open_source(model) as source:
        to = part.replace("0", "1" * digits)
        refs = {
            n.replace(part, to): r._replace(name=n.replace(part, to))
            for n, r in source.tensors.items()
        }
        assert at_once(lambda: map_experts(refs, source.config)).exit_code == 3


TOP, OF_BLOCK = (
    ("tp", "ep", "redundant_experts"),
    ("layer", "num_experts", "top_k", "hidden_size", "intermediate_size"),
)


@pytest.mark.parametrize("number", HUGE, ids=lambda n: str(n)[:12])
@pytest.mark.parametrize("key", [*TOP, *OF_BLOCK, "size_bytes"])
def test_manifests(key: str, number: int, artifact: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(artifact, tmp_path / "out"))
    words = json.loads((out / "hqconv.json").read_text())
    places = {
        **dict.fromkeys(OF_BLOCK, words["blocks"][LAYER]),
        "size_bytes": words["files"]["config.json"],
    }
    places.get(key, words)[key] = number
    write_manifest(out, words)
    is_size = key == "size_bytes"
    if is_size and number == 10**9:  # which a file may have
        assert hqconv.inspect(out)["missing_or_resized_files"] == ["config.json"]
        return
    error = at_once(lambda: hqconv.inspect(out))
    assert isinstance(error, VerificationError)
    assert error.where.endswith(key)
    error = at_once(lambda: hqconv.plan(out, schema="source", target="sm90"))
    assert isinstance(error, InputError | RequestError)
    assert not in_time(lambda: hqconv.verify(out, device="cpu", checks=("files",))).passed
