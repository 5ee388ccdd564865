"""hqconv: offline conversion of Mixture-of-Experts checkpoints for the Humming GPU kernels."""

__version__ = "0.1.0"
