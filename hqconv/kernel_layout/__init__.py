"""The only room that knows Humming and its LayerConfig. Other rooms store the layer config as JSON and do not read it.

Interface to other rooms:
* Forms of a GEMM, without Humming and torch: `gemm_forms.planned_packed_form` and `planned_kernel_form` give names,
  shapes, dtypes, the layer config and flags; `gemm_forms.layout_entries` and `layer_config.activation_entries` what a
  stored layer config must say; `layer_config.needs_cuda` and `fuses_exponents` what a layout depends on and changes.
* Supported combinations, likewise: `compatibility.why_not`, `why_overflow` and `nearest`.
* To the kernel format: `rank_slices.gemm_tensors` cuts a rank's packed tensors, `transform.to_kernel` transforms them;
  `transform.is_compatible`, `is_as_planned` and `packed_form` hold the plan to Humming itself.
* Running the GEMM for `verify`: `fused_moe.load_gemm`, `compile_kernels`, `compile_input_kernels` and `fused_moe`.
* Kernels ahead of time for `warm`: `kernel_sources`, `compiler`.
* Humming's weight ops for quantization, on CPU and CUDA: `runtime.humming`, `runtime.resident`, `cpu_ops`.
"""
