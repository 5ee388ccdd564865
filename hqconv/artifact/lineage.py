"""Where an artifact that was made from an artifact comes from: `derived_from` of its manifest, the nearest first.

Each entry is what the manifest of an artifact on the way said of itself, with its `source`: the last one's is the model
that all began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.schemas.options import ENCODING_KEYS

DERIVED = "derived_from"
_KEYS = (
    *("hqconv_version", "humming_kernels_version", "layout", "schema_name", "weight_schema", "input_schema"),
    *("dtype", "target", "cuda", "tp", "ep", *ENCODING_KEYS),
)


def derived_from(words: Mapping[str, Any], sha256: str) -> list[dict[str, Any]]:
    """What is made from the artifact with this manifest says of where it comes from; sha256: of the manifest."""
    own = {
        "manifest_sha256": sha256,
        **{key: words[key] for key in _KEYS if key in words},
        "blocks": {
            name: {key: block[key] for key in ("conversion", "weight_schema") if key in block}
            for name, block in words["blocks"].items()
        },
        "source": words["source"],
    }
    return [own, *ancestors(words)]


def ancestors(words: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The artifacts that an artifact comes from, by its manifest; none where it says so in no way that can be read."""
    found = words.get(DERIVED, [])
    return list(found) if is_lineage(found) else []


def is_lineage(found: Any) -> bool:
    """Whether this is what a manifest says of where it comes from."""
    return isinstance(found, list) and all(isinstance(one, dict) and _is_ancestor(one) for one in found)


def _is_ancestor(words: Mapping[str, Any]) -> bool:
    source, blocks = words.get("source"), words.get("blocks")
    texts = ("manifest_sha256", "schema_name", "dtype")
    return (
        isinstance(source, dict)
        and isinstance(source.get("name"), str)
        and isinstance(source.get("files"), list)
        and all(isinstance(file, dict) and isinstance(file.get("name"), str) for file in source["files"])
        and isinstance(blocks, dict)
        and all(isinstance(block, dict) for block in blocks.values())
        and isinstance(words.get("weight_schema"), dict)
        and all(isinstance(words.get(key), str) for key in texts)
    )


def origin(words: Mapping[str, Any]) -> dict[str, Any]:
    """The `source` of the model that an artifact comes from in the end."""
    return dict([words, *ancestors(words)][-1]["source"])
