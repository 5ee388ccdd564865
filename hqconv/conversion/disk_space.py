"""Whether the Hub's cache has room for what a conversion will fetch, beside the output if that is on the same disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hqconv.conversion.hub_prefetch import CachePolicy, ShardUse
from hqconv.errors import OutputError, RequestError
from hqconv.io.durable_files import output_errors
from hqconv.models.protocols import Source
from hqconv.planning.output_units import OutputUnit


def check_room(
    source: Source, units: Sequence[OutputUnit], use: CachePolicy, out: Path, num_bytes_out: int
) -> None:
    """Refuse a limit or a disk that is too small for the groups' files; `num_bytes_out` will be written to `out`.

    Raises RequestError or OutputError.
    """
    assert source.listing is not None
    needs = ShardUse.of(source, units, keeps=use.keeps)
    limit = needs.default_limit() if use.limit_bytes is None else use.limit_bytes
    if limit < needs.least_bytes and not use.keeps:
        what = "The cache limit is too small for the files that one group of tensors is made of."
        expected, remedy = f"at least {needs.least_bytes} bytes", "Give more, or leave the option out."
        raise RequestError(what, where="--cache-limit", expected=expected, found=limit, remedy=remedy)
    num_bytes = needs.total_bytes if use.keeps else min(needs.total_bytes, limit)
    sizes = source.listing.sizes
    num_bytes += sum(sizes[name] for name in source.other_files if not source.is_here(name))
    _check_disk(source.root, num_bytes, out, num_bytes_out)


def _check_disk(cache: Path, num_bytes: int, out: Path, num_bytes_out: int) -> None:
    cache, out = _existing(cache), _existing(out.absolute())
    with output_errors(cache):
        free, is_shared = shutil.disk_usage(cache).free, cache.stat().st_dev == out.stat().st_dev
    needed = num_bytes + (num_bytes_out if is_shared else 0)
    if free >= needed:
        return
    parts = f"{num_bytes / 1e6:.1f} MB for files of the source"
    parts += f", {num_bytes_out / 1e6:.1f} MB for the artifact" if is_shared else ""
    raise OutputError(
        "The disk cannot hold what is fetched from the Hub.",
        where=str(cache),
        expected=f"{needed / 1e6:.1f} MB free: {parts}",
        found=f"{free / 1e6:.1f} MB free",
        remedy="Free some space, set HF_HOME to another place, or give a smaller --cache-limit.",
    )


def _existing(path: Path) -> Path:
    """The folder of the path that is there."""
    while not path.exists():
        path = path.parent
    return path
