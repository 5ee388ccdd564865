"""The only room that knows Humming's layouts and LayerConfig. Other rooms store the config as JSON and do not read it.

Interface to other rooms:
* Supported combinations, by Humming: `transform.why_not` and `nearest`.
* Without Humming and torch: `compatibility.why_overflow`, and `config_entries` of a stored layer config.
* Forms of a GEMM, by Humming: `transform.packed_form` and `kernel_form` give names, shapes, dtypes, the layer config
  and flags; `needs_cuda` tells whether they depend on the compiler.
* To the kernel format: `rank_slices.gemm_tensors` cuts a rank's packed tensors, `transform.to_kernel` transforms them;
  `transform.is_compatible` is Humming's own rule.
* Running the GEMM for `verify`: `fused_moe.load_gemm`, `compile_kernels` and `fused_moe`.
* Kernels ahead of time for `warm`: `kernel_sources`.
"""
