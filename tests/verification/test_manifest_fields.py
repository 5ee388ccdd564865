"""Every field of a manifest: a value that is not the conversion's is refused by its type, or found by a check.

The forger makes the manifest's digest, the model card and its entry anew.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.model_card import card_bytes
from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from hqconv.verification.files import check_files
from hqconv.verification.weights import check_weights
from tests.make import small
from tests.make.conversions import manifest, run, write_manifest
from tests.make.effort import ALL
from tests.make.qwen import write_qwen3_moe

EVERY = 7 if ALL else 37  # of the mutations
ABSENT = object()
Place = tuple[Any, ...]


def of(name: str, schema: str, **options: Any) -> Callable[[Path], tuple[Path, Path]]:
    def make(folder: Path) -> tuple[Path, Path]:
        src = small.save(folder / "src", small.GOOD[name][0]())
        run(src, folder / "out", schema, **options)
        return src, folder / "out"

    return make


def in_ranks(folder: Path) -> tuple[Path, Path]:
    src = write_qwen3_moe(folder / "src", num_layers=1, num_experts=4)
    run(src, folder / "out", "int4-g64", Grid(2, 2))
    return src, folder / "out"


def of_artifact(folder: Path) -> tuple[Path, Path]:
    _, first = in_ranks(folder / "first")
    run(first, folder / "out", "source")
    return first, folder / "out"


ARTIFACT = "of an artifact"  # only the source tells what its tensors were
MADE: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "in ranks, with a warning": in_ranks,
    "direct, with an activation's numbers": of("gpt_oss_mxfp4", "source"),
    "requantized": of("gpt_oss_mxfp4", "int4-g64-zp"),
    "rounded scales and static activations": of("fp8_tensors", "fp8", input_schema="fp8"),
    "searched": of("fp8_tensors", "int4-g64", quantizer="mse"),
    "checkpoint layout": of("fp8_blocks", "int4-g64", layout="checkpoint"),
    ARTIFACT: of_artifact,
}
# Fields that nothing tells: names that a user gave, and digests that a conversion may leave out.
FREE = [
    ("source", "name"),
    ("schema_name",),
    ("derived_from", 0, "schema_name"),
    ("derived_from", 0, "source", "name"),
]
FREE_IF_GONE = [("source", "files", "sha256")]
# What only the source tells: of the source itself, of the quantization's errors, of the request.
OF_SOURCE = (
    "source",
    "quantization_error",
    "quantizer_version",
    "warnings",
    "README.md",
    "dropped",
    "converted",
)


def places(words: Any, path: Place = ()) -> Iterator[Place]:
    """Positions of all values; of long lists and tables of equal things the first two."""
    items: Any = (
        words.items()
        if isinstance(words, dict)
        else enumerate(words)
        if isinstance(words, list)
        else ()
    )
    if path in {
        ("files",),
        ("tensors", "converted"),
        ("tensors", "copied"),
        ("tensors", "dropped"),
        ("content_sums",),
    }:
        items = itertools.islice(items, 2)
    yield from [path] * bool(path)
    for key, one in items:
        yield from places(one, (*path, key))


def others(value: Any) -> Iterator[Any]:
    """Yield values that a field might have instead."""
    yield from (ABSENT, None, {}, [], "", 7)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, float(value), str(value), 10**10)
    elif isinstance(value, float):
        yield from (value * 1.001 + 1e-3, 0.0, -1.0)
    elif isinstance(value, str):
        yield from (f"{value}x", "../x", "{expert.__class__}", "{expert:9999999999}")
    elif isinstance(value, dict):
        yield {**value, "more": 1}
    elif isinstance(value, list):
        yield [*value, "more"]


def mutations(words: dict[str, Any]) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    for path in places(words):
        if path == ("digest",):
            continue
        before = functools.reduce(lambda one, key: one[key], path, words)
        for value in others(before):
            if value is not ABSENT and json.dumps(value) == json.dumps(before):
                continue
            changed = copy.deepcopy(words)
            holder = functools.reduce(lambda one, key: one[key], path[:-1], changed)
            if value is ABSENT:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield path, value, changed


def is_free(path: Place, value: Any, *, with_source: bool) -> bool:
    is_gone = value is ABSENT and tuple(key for key in path if type(key) is not int) in FREE_IF_GONE
    if is_gone or (path in FREE and type(value) is str and (value or path[-1] == "name")):
        return True
    return not with_source and any(key in OF_SOURCE for key in path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    return functools.cache(lambda name: MADE[name](tmp_path_factory.mktemp("fields")))


@pytest.mark.parametrize(
    ("name", "with_source"),
    [
        (name, is_given)
        for name in MADE
        for is_given in (True, False)
        if name != ARTIFACT or is_given
    ],
)
def test_no_other_value_passes(
    name: str, with_source: bool, made: Callable[[str], tuple[Path, Path]]
) -> None:
    src, out = made(name)
    words, card = manifest(out), (out / "README.md").read_bytes()
    with open_source(src) as source:

        def passes(changed: dict[str, Any], path: Place) -> bool:
            write_manifest(out, changed)
            try:
                if "files" not in path:
                    again = card_bytes(
                        read_manifest(out),
                        source.sidecar_files.card,
                        is_artifact=source.guard.is_held,
                    )
                    (out / "README.md").write_bytes(again)
                    sha256 = hashlib.sha256(again).hexdigest()
                    changed["files"]["README.md"] = {"size_bytes": len(again), "sha256": sha256}
                    write_manifest(out, changed)
                with Artifact(out) as artifact:
                    given = source if with_source else None
                    if check_files(
                        artifact, given, 1
                    ).findings:  # which finds most, and reads no weights
                        return False
                    return not check_weights(artifact, given, None, 1, 1 << 30).findings
            except HqconvError:
                return False

        try:
            assert passes(copy.deepcopy(words), ())
            found = [
                (path, value)
                for path, value, changed in itertools.islice(mutations(words), None, None, EVERY)
                if passes(changed, path) and not is_free(path, value, with_source=with_source)
            ]
        finally:
            write_manifest(out, words)
            (out / "README.md").write_bytes(card)
    assert not found, "\n".join(map(repr, found))
