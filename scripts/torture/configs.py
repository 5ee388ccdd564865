"""Fuzz of config.json, quantization_config and the index: a plan or one message, quickly, whatever they say."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import hqconv
from hqconv.errors import HqconvError
from scripts.torture.manifests import ODD, changed
from scripts.torture.portions import Findings, in_portions
from scripts.torture.tally import Tally

_PORTION = 500
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# Keys that mean something to some reader, put where they were not.
_KEYS = (
    "model_type architectures torch_dtype num_experts n_routed_experts hidden_size "
    "text_config moe_intermediate_size num_hidden_layers num_experts_per_tok hidden_act "
    "swiglu_limit quantization_config quant_method config_groups ignore "
    "modules_to_not_convert group_size bits fmt format weight_block_size dynamic quant_algo "
    "desc_act compression_config"
)


def run(work: Path, count: int, tally: Tally) -> None:
    """`count` mutants, in portions that have seeds of their own."""
    in_portions(partial(_portion, work), count, _PORTION, tally)


def _portion(work: Path, draw: Random, numbers: range) -> Findings:
    from tests.make.small import GOOD, save

    findings = Findings()
    with tempfile.TemporaryDirectory(dir=work) as name:
        base = draw.choice([*GOOD])
        make, schema = GOOD[base]
        folder = save(Path(name) / base, make())
        config = json.loads((folder / _CONFIG).read_bytes())
        index = _sharded(folder)
        for number in numbers:
            text = _write(folder, config, index, draw)
            asked = draw.choice((schema, "source", "mxfp4", "int4-g64-zp"))
            findings.judge(f"{base}, mutant {number}", text[:1500], partial(_look, folder, asked))
    return findings


def _sharded(folder: Path) -> dict[str, Any]:
    """The index of a folder whose one file is made a shard."""
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    return {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file.name)}


def _write(folder: Path, config: dict[str, Any], index: dict[str, Any], draw: Random) -> str:
    """Both files, one of them changed; what it says."""
    is_config = draw.random() < 0.8
    words: Any = config if is_config else index
    for _ in range(draw.randint(1, 3)):
        words = changed(words, draw)
        if is_config and isinstance(words, dict) and draw.random() < 0.3:
            place = words.get("quantization_config")
            place = place if isinstance(place, dict) and draw.random() < 0.5 else words
            place[draw.choice(_KEYS.split())] = draw.choice(ODD)
    text = json.dumps(words)
    if draw.random() < 0.1:
        at = draw.randrange(len(text) + 1)
        text = (
            text[:at]
            + draw.choice(('"', "[" * 200, "{", "NaN", "\x00", "1e999", "9" * 5000))
            + text[at:]
        )
    (folder / _CONFIG).write_text(text if is_config else json.dumps(config), errors="surrogatepass")
    (folder / _INDEX).write_text(
        text if not is_config else json.dumps(index), errors="surrogatepass"
    )
    return text


def _look(folder: Path, schema: str) -> str:
    with suppress(HqconvError):
        hqconv.inspect(folder)
    try:
        hqconv.plan(folder, schema=schema, target="sm90")
    except HqconvError:
        return "refused"
    return "planned"
