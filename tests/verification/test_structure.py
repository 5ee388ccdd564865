"""The comparer: every altered key that a reader uses, and every altered byte of a header, is found.

The forger makes the digests of manifest and files anew.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.models.source_protocol import Source
from hqconv.schemas.grid import Grid
from hqconv.sources.opening import open_source
from hqconv.verification.files import check_files
from hqconv.verification.weights import check_weights
from tests.make import small
from tests.make.conversions import manifest, run, write_manifest
from tests.make.damage import Damaged
from tests.make.effort import ALL
from tests.make.qwen import write_qwen3_moe

EVERY = 13 if ALL else 37  # of the mutations
ABSENT = object()
Place = tuple[Any, ...]
Made = tuple[Path, Path]  # source and artifact


def convert_small(name: str, schema: str, **options: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        src = small.save(folder / "src", small.GOOD[name][0]())
        run(src, folder / "out", schema, **options)
        return src, folder / "out"

    return make


def in_ranks(folder: Path) -> Made:
    src = write_qwen3_moe(folder / "src", num_layers=1, num_experts=4)
    run(src, folder / "out", "int4-g64", Grid(2, 2))
    return src, folder / "out"


def from_artifact(folder: Path) -> Made:
    _, first = in_ranks(folder / "first")
    run(first, folder / "out", "source")
    return first, folder / "out"


ARTIFACT = "of an artifact"  # only the source tells what its tensors were
MADE: dict[str, Callable[[Path], Made]] = {
    "in ranks": in_ranks,
    "direct, with an activation's numbers": convert_small("gpt_oss_mxfp4", "source"),
    "requantized": convert_small("gpt_oss_mxfp4", "int4-g64-zp"),
    "rounded scales and static activations": convert_small(
        "fp8_tensors", "fp8", input_schema="fp8"
    ),
    "a schema for each GEMM": convert_small("fp8_tensors", "int4-g64+int8"),
    "searched": convert_small("fp8_tensors", "int4-g64", quantizer="mse"),
    "checkpoint layout": convert_small("fp8_blocks", "int4-g64", layout="checkpoint"),
    ARTIFACT: from_artifact,
}
# Sentences for people, names that a user gave, and measurements of the conversion's machine.
FREE = ("warnings", "dropped", "name", "schema_name", "hqconv_version", "humming_kernels_version")
MAY_BE_GONE = ("sha256", "hub_sha256")
# What only the source tells: of the source itself, and of the quantization's errors.
OF_SOURCE = ("source", "quantization_error", "quantizer_version", "converted")
# The model card is its owner's: a note says that it is not the manifest's.
EDITED = "README.md was edited since the conversion"


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Positions of all values; of long lists and tables of equal things the first two."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if path == ("files",) or path[:1] == ("tensors",):
        items = itertools.islice(items, 3)
    if path:
        yield path
    for key, inner in items:
        yield from places(inner, (*path, key))


def alternatives(value: Any) -> Iterator[Any]:
    """Values that a field might have instead."""
    yield from (ABSENT, None, {}, [], "", 7)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, float(value), str(value), 10**10)
    elif isinstance(value, float):
        yield from (value * 1.001 + 1e-3, 0.0, -1.0)
    elif isinstance(value, str):
        yield from (f"{value}x", "../x", "{expert.__class__}", "{expert:9999999999}")
    elif isinstance(value, list):
        yield [*value, "more"]


def mutations(document: dict[str, Any]) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    for path in places(document):
        if path == ("digest",):
            continue
        before = functools.reduce(lambda holder, key: holder[key], path, document)
        for value in alternatives(before):
            if value is not ABSENT and json.dumps(value) == json.dumps(before):
                continue
            changed = copy.deepcopy(document)
            holder = functools.reduce(lambda inner, key: inner[key], path[:-1], changed)
            if value is ABSENT:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            yield path, value, changed


def is_free(path: Place, value: Any, *, with_source: bool) -> bool:
    if path[-1] in MAY_BE_GONE and value is ABSENT:
        return True
    if any(key in FREE for key in path):
        return True
    return not with_source and any(key in OF_SOURCE for key in path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return functools.cache(lambda name: MADE[name](tmp_path_factory.mktemp("fields")))


def passes(out: Path, source: Source | None) -> bool:
    """Whether `files`, which finds most, and then `weights` find nothing."""
    try:
        with Artifact(out) as artifact:
            files = check_files(artifact, source, 1)
            if files.findings or EDITED in files.notes:
                return False
            return not check_weights(artifact, source, None, 1, 1 << 30).findings
    except HqconvError:
        return False


CASES = [(name, True) for name in MADE] + [(name, False) for name in MADE if name != ARTIFACT]


@pytest.mark.parametrize(("name", "with_source"), CASES)
def test_every_altered_key_is_found(
    name: str, with_source: bool, made: Callable[[str], Made]
) -> None:
    src, out = made(name)
    document = manifest(out)
    passed = []
    with open_source(src) as source:
        given = source if with_source else None
        assert passes(out, given)
        try:
            for path, value, changed in itertools.islice(mutations(document), 0, None, EVERY):
                if is_free(path, value, with_source=with_source):
                    continue
                write_manifest(out, changed)
                if passes(out, given):
                    passed.append(f"{path} = {value!r}")
        finally:
            write_manifest(out, document)
    assert not passed, "\n".join(passed)


@pytest.mark.parametrize("name", ["in ranks", "checkpoint layout"])
def test_every_altered_byte_of_a_header_is_found(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """A blank that becomes a tab leaves the JSON as it is; a server may read either."""
    src, good = made(name)
    out = tmp_path / "out"
    shutil.copytree(good, out)
    damaged = Damaged(out, src, "int4-g64")
    path = max(out.rglob("*.safetensors"), key=lambda file: "expert" in str(file))
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    for position in range(0, length, 29 if ALL else 97):
        for mask in (0x01, 0x20):
            changed = bytearray(data)
            changed[position] ^= mask
            path.write_bytes(changed)
            damaged.reseal()
            assert not passes(out, None), (position, bytes(changed[position - 20 : position + 20]))


@pytest.mark.parametrize("document", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("name", ["in ranks", "checkpoint layout"])
def test_every_altered_key_of_config_and_index_is_found(
    name: str, document: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    src, good = made(name)
    out = tmp_path / "out"
    shutil.copytree(good, out)
    damaged = Damaged(out, src, "int4-g64")
    before = json.loads((out / document).read_bytes())
    with open_source(src) as source:
        for path, value, changed in itertools.islice(mutations(before), 0, None, EVERY):
            (out / document).write_text(json.dumps(changed))
            damaged.reseal()
            with Artifact(out) as artifact:
                found = check_files(artifact, source, 1).findings
            assert found, f"{path} = {value!r}"
