"""`hqconv warm` for a checkpoint that vLLM itself serves with Humming: kernels into Humming's own cache here.

Humming finds a kernel by its source, its compiler and the places and times of its headers, so the cache is that of the
installation which serves: the same machine, or an image that is built with this command. Imports no vLLM: a process of
its own builds vLLM's model (`stock_kernels`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hqconv.errors import OutputError, RequestError
from hqconv.schemas.engine import ENGINE
from hqconv.serving.warm.gpus import Gpu
from hqconv.serving.warm.kernel_store import (
    CACHE_VARIABLE,
    UnusableError,
    check_private,
    kernel_cache,
)

_LONGEST = 500  # of what another process said


def warm_checkpoint(
    model: str, gpu: Gpu, server: Mapping[str, Any], jobs: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    """Compile what vLLM asks of Humming for a checkpoint into Humming's cache; see `compile_kernels.warm`.

    server: its `tp`, `ep`, `quantization` and `moe_backend`.

    Raises RequestError without vLLM, for a checkpoint that it does not serve or serves without Humming, and where a
    kernel cannot be compiled; OutputError for a cache that others can write.
    """
    started = time.monotonic()
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(
            f"There is no {ENGINE.name} here, which knows the kernels of this checkpoint.",
            where=model,
            expected=f"{ENGINE.release}, or an artifact of `hqconv convert` in the kernel layout",
            remedy=f"Run the command in the server's environment. {ENGINE.install_command} installs it.",
        )
    folder = private_cache()
    job = {"model": model, **server, "jobs": jobs, "gpu": gpu.to_dict()}
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        CACHE_VARIABLE: str(folder),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "hqconv.serving.vllm.stock_kernels", json.dumps(job)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as asked:
        said: list[str] = []
        for line in asked.stdout or ():
            said.append(line.rstrip())
            if line.startswith("Compiling "):
                announce(line.rstrip())
    if asked.returncode != 0:
        raise RequestError(
            f"The classes of {ENGINE.name} could not be asked for the kernels of this checkpoint.",
            where=model,
            found=_error_of(said) or f"exit code {asked.returncode}",
            remedy="Serve it once without this command; kernels are compiled at the first start then.",
        )
    document = json.loads(said[-1])
    if not document["layers"]:
        raise RequestError(
            f"There is no layer of this checkpoint that {ENGINE.name} serves with Humming on this GPU.",
            where=model,
            found=next(iter(document["left_out"].values()), f"{gpu.name}; nothing to compile"),
            remedy="Where it is to use Humming, give the server's --quantization or --moe-backend.",
        )
    told = {"folder": str(folder), "gpu": gpu.to_dict(), "seconds": time.monotonic() - started}
    return {"kind": "warm_checkpoint", **told, "num_kernels": len(document["kernels"]), **document}


def _error_of(said: list[str]) -> str:
    """Return the last exception that a process told, on one line."""
    last = max(
        (place for place, line in enumerate(said) if re.search(r"\w(Error|Exception)\b", line)),
        default=len(said),
    )
    return " ".join(" ".join(said[last:]).replace("[rank0]:", "").split())[:_LONGEST]


def private_cache() -> Path:
    """Humming's cache of this user, made if it is not there.

    Raises OutputError for one that cannot be made, or that another user can write.
    """
    what, remedy = (
        "Humming's cache of kernels cannot be made.",
        f"Set {CACHE_VARIABLE} to a folder of this user's own.",
    )
    try:
        folder = kernel_cache()
    except OSError as error:
        raise OutputError(
            what, where=str(error.filename), found=error.strerror or error, remedy=remedy
        ) from error
    except RuntimeError as error:
        raise OutputError(
            what, where="~", found="a user without a home folder", remedy=remedy
        ) from error
    try:
        check_private(folder)
    except UnusableError as error:
        what, remedy = (
            "Humming's cache of kernels is not this user's alone. Kernels are programs.",
            str(error),
        )
        raise OutputError(what, where=str(folder), remedy=remedy) from error
    return folder
