"""What checks on a GPU would have to wait for, begun beside those before them: Humming's kernels, compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import torch

from hqconv.artifact.opened import Artifact
from hqconv.backends.runtime import humming
from hqconv.errors import HqconvError
from hqconv.schemas import artifact as names
from hqconv.verification.kernel import compile_ahead


@contextmanager
def begun(tasks: Sequence[Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """Run tasks side by side; gives what waits for all of them. Their errors are left to who needs what they make."""
    if not tasks:
        yield lambda: None
        return
    humming()  # by one thread only: it is changed on its way in
    pool = ThreadPoolExecutor(len(tasks), "hqconv-prepare")
    running = [pool.submit(task) for task in tasks]

    def finish() -> None:
        wait(running)

    try:
        yield finish
    finally:
        pool.shutdown(cancel_futures=True)


def kernel_tasks(
    artifact: Artifact, blocks: Iterable[str], tokens: Sequence[int], device: torch.device
) -> list[Callable[[], object]]:
    """Compile the GEMMs of some blocks, one task for each kind of block."""
    kinds: dict[str, str] = {}
    for block in blocks:
        words = artifact.blocks[block]
        try:
            if not artifact.knows_activation(block):  # the check passes over it
                continue
            configs = [artifact.layer_config(block, gemm, 0, 0) for gemm in names.GEMMS]
        except (HqconvError, OSError):  # the check comes upon it
            continue
        facts = [words["top_k"], words["activation"], words["gated"], words["num_experts"]]
        facts.append(words.get("activation_parameters"))
        kinds.setdefault(json.dumps([configs, facts], sort_keys=True), block)
    return [partial(compile_ahead, artifact, block, tokens, device) for block in kinds.values()]
