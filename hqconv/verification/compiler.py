"""Whether the kernels that the CUDA compiler of this machine makes read the layout that the artifact has."""

from __future__ import annotations

from hqconv.artifact.opened import Artifact
from hqconv.backends.runtime import compiler_version
from hqconv.schemas.gpu_target import Target
from hqconv.schemas.layer import needs_cuda


def other_layout(artifact: Artifact) -> str:
    """Why a GPU of the artifact's target cannot run its kernels on this machine; nothing where it can.

    Where the layout depends on the compiler, Humming is asked what it is with the one here. Raises VerificationError
    for facts that cannot be true.
    """
    firsts = {artifact.kind_of(name): name for name in reversed(artifact.blocks)}
    for kind, name in firsts.items():
        if not needs_cuda(kind):
            continue
        try:
            here = Target(kind.target.sm_version, compiler_version())
        except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            return f"its layout depends on the CUDA compiler, and Humming finds none here ({error})"
        block = artifact.expert_block(name)
        own, found = (artifact.kernel_forms(block, target) for target in (None, here))
        for gemm, form in own.items():
            if (flags := form.flags) != found[gemm].flags:
                differing = ", ".join(flag for flag in flags if flags[flag] != found[gemm].flags[flag])
                return f"the artifact is for {kind.target}; CUDA {here.cuda_name} here has another layout ({differing})"
    return ""
