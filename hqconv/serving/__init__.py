"""Serving an artifact with vLLM: its plugin, and the parts of one that know no engine."""
