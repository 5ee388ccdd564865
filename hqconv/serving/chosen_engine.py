"""Serving engine of plans, reports and messages. Another engine would be chosen here, and only here."""

from __future__ import annotations

from hqconv.schemas.engine import Engine
from hqconv.serving.vllm.limits import VllmEngine

ENGINE: Engine = VllmEngine()
