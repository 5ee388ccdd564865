"""vLLM's weight cache with an artifact: one daemon, several starts; which files each opens, and how long it takes.

    python scripts/check_weight_cache.py --work DIR [--schema mxfp4] [--layers 4 --experts 64] [--runs 2] [--out FILE]

An engine that loads the artifact from its files, `vllm preload` of the same artifact, and engines with
`--load-format ipc_cache` beside the daemon: tokens and log-probabilities must be the same, bit for bit. The daemon may
open files of the artifact only, none of the source, and of the rank files its own rank's; an engine reads headers of
rank files, and no weights. Then the daemon of another artifact with the same shapes: an engine must not take its
experts. Needs vLLM and a GPU of the target. Opened files are told by the kernel (inotify).

`--dry-run` converts, tries the watch and prints the commands: for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.schemas import artifact_names as names
from scripts import few_kernels
from scripts.engines import THREADS, Engine
from scripts.serving_answers import GOOD, verdict, write
from scripts.shared import make_source

READY_S = 240.0
SIZES = ("hidden", "intermediate", "layers", "experts")
IN_OPEN = 0x20


class Opened:
    """Files below folders that any process opens, as the kernel tells it: `take` gives those since the last time."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raises OSError where the kernel has no inotify."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watched: dict[int, Path] = {}
        for folder in folders:
            for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
                watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(place), IN_OPEN)
                if watch < 0:
                    raise OSError(ctypes.get_errno(), f"inotify_add_watch {place}")
                self._watched[watch] = place

    def take(self) -> set[Path]:
        """Files, without folders, opened since the last call."""
        found = set()
        with suppress(BlockingIOError):
            while data := os.read(self._descriptor, 1 << 16):
                found |= set(self._names(data))
        return {path for path in found if path.is_file()}

    def _names(self, data: bytes) -> Iterator[Path]:
        begin = 0
        while begin < len(data):
            watch, _, _, length = struct.unpack_from("iIII", data, begin)
            name = data[begin + 16 : begin + 16 + length].rstrip(b"\0")
            yield self._watched[watch] / os.fsdecode(name)
            begin += 16 + length


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models, on a RAM disk")
    parser.add_argument("--schema", default="mxfp4")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2, help="engines beside one daemon")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["zero_copy"], help="also copy")
    parser.add_argument("--words", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--device", default="auto", help="of the conversions")
    parser.add_argument("--dry-run", action="store_true", help="convert, try the watch, print the commands")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    few_kernels.use(a.work)  # whose sums have one order
    sources, artifacts = make_models(a)
    report: dict[str, Any] = {"failed": False, "rank_bytes": rank_bytes(artifacts[0])}
    for name, found in dry_run(a, sources, artifacts) if a.dry_run else steps(a, sources, artifacts):
        report[name] = found
        report["failed"] |= not found["good"]
        print(
            name, {key: value for key, value in found.items() if key not in ("answers", "again", "first")}, flush=True
        )
        if a.out:
            write(a.out, report)
    print(said := verdict(report), flush=True)
    sys.exit(said != GOOD)


def make_models(a: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Two sources of the same shapes, and an artifact of each."""
    sources, artifacts = [], []
    for seed in range(2):
        source, out = a.work / f"source-{seed}", a.work / f"{a.schema}-{seed}"
        if not source.exists():
            make_source(source, **{key: getattr(a, key) for key in SIZES}, seed=seed, distinct_layers=2)
        if not out.exists():
            hqconv.convert(source, out, schema=a.schema, target="sm90", device=a.device)
        sources.append(source)
        artifacts.append(out)
    return sources, artifacts


def rank_bytes(artifact: Path) -> int:
    """Bytes of all rank files."""
    return sum(path.stat().st_size for path in (artifact / names.EXPERTS_FOLDER).rglob("*.safetensors"))


def dry_run(a: argparse.Namespace, sources: list[Path], artifacts: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that needs no GPU."""
    opened = Opened([*sources, *artifacts])
    index = next((artifacts[0] / names.EXPERTS_FOLDER).rglob("*.safetensors"))
    index.read_bytes()
    yield "watch", {"good": opened.take() == {index} and not opened.take()}
    yield "daemon", {"good": True, "command": shlex.join(daemon_command(artifacts[0], a.work / "sockets"))}
    engine = cached_engine(a, artifacts[0], a.work / "sockets", a.modes[0], fallback=False)
    yield "engine", {"good": True, "arguments": shlex.join(engine.arguments)}


def steps(a: argparse.Namespace, sources: list[Path], artifacts: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each start, and if it was as it must be."""
    opened = Opened([*sources, *artifacts])
    own = {path for path in artifacts[0].rglob("*") if path.is_file()}
    plain = Engine("from files", artifacts[0], ["--words", json.dumps(a.words)])
    for number in range(a.runs):  # the second finds compiled kernels
        first = plain.run()
        yield f"from files, {number}", {"good": "failed" not in first, **first}
    if "failed" in first:
        return
    opened.take()
    with daemon(artifacts[0], a.work / "sockets") as started:
        files = opened.take()
        strangers = sorted(map(str, files - own))
        yield "daemon", {"good": started["ready"] and not strangers, **started, "strangers": strangers, **counts(files)}
        for mode in a.modes if started["ready"] else ():
            for number in range(a.runs if mode == "zero_copy" else 1):  # a copy releases the daemon's weights
                found = cached_engine(a, artifacts[0], a.work / "sockets", mode, fallback=False).run()
                yield f"{mode}, {number}", judge(first, found, opened.take(), own, rank_bytes(artifacts[0]))
    with daemon(artifacts[0], a.work / "sockets") as started:
        found = cached_engine(a, artifacts[1], a.work / "sockets", "zero_copy", fallback=False).run()
        said = found.get("failed", ["it started"])
        is_refused = "failed" in found and any("weight cache holds other" in line for line in said)
        yield "another artifact", {"good": started["ready"] and is_refused, "said": said}
        found = cached_engine(a, artifacts[1], a.work / "sockets", "zero_copy", fallback=True).run()
        other = Engine("from files", artifacts[1], ["--words", json.dumps(a.words)]).run()
        is_same = "failed" not in found and found["answers"] == other.get("answers")
        yield "another artifact, with its own files", {"good": is_same}
        found = cached_engine(a, artifacts[0], a.work / "sockets", "zero_copy", fallback=False).run()
        yield "the daemon's after that", judge(first, found, opened.take() & own, own, rank_bytes(artifacts[0]))


def judge(
    plain: dict[str, Any], found: dict[str, Any], files: set[Path], own: set[Path], num_bytes: int
) -> dict[str, Any]:
    """Good: the bits of the engine from files, no file but the artifact's, and no weights read."""
    if "failed" in found:
        return {"good": False, "why": found["failed"]}
    is_same = all(plain[key] == found[key] for key in ("answers", "first"))
    has_read = found["read_bytes"] * 4 > num_bytes
    times = {key: found.get(key) for key in ("load_s", "loaded_s", "engine_s", "answered_s", "gpu_bytes", "read_bytes")}
    good = is_same and not has_read and files <= own
    return {"good": good, "same_bits": is_same, "has_read_weights": has_read, **times, **counts(files)}


def counts(files: set[Path]) -> dict[str, int]:
    """How many files were opened, by kind."""
    experts = sum(names.EXPERTS_FOLDER in path.parts for path in files)
    shards = sum(path.suffix == ".safetensors" for path in files) - experts
    return {"rank_files": experts, "shards": shards, "other_files": len(files) - experts - shards}


def cached_engine(a: argparse.Namespace, artifact: Path, sockets: Path, mode: str, *, fallback: bool) -> Engine:
    """An engine whose weights are the daemon's."""
    extra = {"socket_dir": str(sockets), "mode": mode, "fallback": fallback, "state_timeout_s": 20}
    words = {**a.words, "load_format": "ipc_cache", "model_loader_extra_config": extra}
    return Engine(mode, artifact, ["--words", json.dumps(words)])


def daemon_command(artifact: Path, sockets: Path) -> list[str]:
    """vLLM's command, with the arguments of serve_once.py that decide which weights these are."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(artifact)]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    return [*command, "--weight-cache-socket-dir", str(sockets)]


@contextmanager
def daemon(artifact: Path, sockets: Path) -> Iterator[dict[str, Any]]:
    """A daemon that is ready, or the last lines of its log."""
    sockets.mkdir(mode=0o700, exist_ok=True)
    log, begun = sockets.parent / "daemon.log", time.perf_counter()
    with log.open("wb") as out:
        started = subprocess.Popen(
            daemon_command(artifact, sockets),
            stdout=out,
            stderr=out,
            env={**os.environ, **THREADS},
            start_new_session=True,
        )
        try:
            while not (is_ready := any(sockets.glob("*.sock"))):
                if started.poll() is not None or time.perf_counter() - begun > READY_S:
                    break
                time.sleep(0.1)
            found = {"ready": is_ready, "seconds": time.perf_counter() - begun}
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            yield found if is_ready else {**found, "said": lines[-12:]}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                started.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            for path in sockets.glob("*.sock"):
                path.unlink()


if __name__ == "__main__":
    main()
