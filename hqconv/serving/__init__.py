"""Serving an artifact with vLLM: its plugin, and kernels that are compiled before a server starts."""
