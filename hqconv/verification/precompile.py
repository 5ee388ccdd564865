"""Background compilation of Humming's kernels for the GPU checks, during the checks before them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import torch

from hqconv.artifact.reader import Artifact
from hqconv.errors import HqconvError
from hqconv.kernel_layout.runtime import compiler_version, humming
from hqconv.kernel_layout.transform import needs_cuda
from hqconv.schemas import artifact_names as names
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.verification.kernel import compile_ahead

_TURNS_S = 2e-4  # of Python's threads


@contextmanager
def begun(tasks: Sequence[Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """Run tasks in parallel; yield a function that waits for all. Errors are left to the users of the kernels.

    Meanwhile Python's threads take shorter turns: tasks compute in Python for seconds, and a thread that reads or
    hashes would wait up to 5 ms for each of them whenever a system call ends.
    """
    if not tasks:
        yield lambda: None
        return
    humming()  # by one thread only: it is patched during the import
    pool = ThreadPoolExecutor(len(tasks) + 1, "hqconv-prepare")
    turns_s = sys.getswitchinterval()
    if turns_s > _TURNS_S:  # else another verification restores it
        sys.setswitchinterval(_TURNS_S)
    running = [pool.submit(task) for task in tasks]

    def finish() -> None:
        wait(running)

    def restore() -> None:
        finish()
        if turns_s > _TURNS_S:
            sys.setswitchinterval(turns_s)

    pool.submit(restore)
    try:
        yield finish
    finally:
        for task in running:
            task.cancel()
        pool.shutdown()


def kernel_tasks(
    artifact: Artifact, layers: Iterable[str], tokens: Sequence[int], device: torch.device
) -> list[Callable[[], object]]:
    """Compile the GEMMs of some layers, one task for each kind of layer."""
    kinds: dict[str, str] = {}
    for layer in layers:
        entry = artifact.layers[layer]
        try:
            if not artifact.knows_activation(layer):  # the check skips it
                continue
            configs = [artifact.rank_file(layer, 0, 0).configs[gemm] for gemm in names.GEMMS]
        except (HqconvError, OSError):  # the check reports it
            continue
        facts = [entry.top_k, entry.activation, entry.gated, entry.num_experts]
        facts.append(entry.activation_parameters)
        kinds.setdefault(json.dumps([configs, facts], sort_keys=True), layer)
    return [partial(compile_ahead, artifact, layer, tokens, device) for layer in kinds.values()]


def other_layout(artifact: Artifact) -> str:
    """Return why a GPU of the artifact's target cannot run its kernels on this machine; "" if it can.

    If the layout depends on the compiler, Humming computes it for the installed one. Raises VerificationError
    for invalid facts.
    """
    firsts = {artifact.kernel_spec_of(name): name for name in reversed(artifact.layers)}
    for spec, name in firsts.items():
        if not needs_cuda(spec):
            continue
        try:
            here = GpuTarget(spec.target.sm_version, compiler_version())
        except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            return f"its layout depends on the CUDA compiler, and Humming finds none here ({error})"
        layer = artifact.moe_layer(name)
        own, found = (artifact.kernel_forms(layer, target) for target in (None, here))
        for gemm, form in own.items():
            if (flags := form.flags) != found[gemm].flags:
                differing = ", ".join(flag for flag in flags if flags[flag] != found[gemm].flags[flag])
                return f"the artifact is for {spec.target}; CUDA {here.cuda_name} here has another layout ({differing})"
    return ""
