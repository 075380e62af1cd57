"""Text in, text out over one engine thread: the one path that LLM, the server and batch jobs share."""

from jaxserve.frontend.frontend import EngineStats, Frontend, ServedModel
from jaxserve.frontend.generation import Generation

__all__ = ["EngineStats", "Frontend", "Generation", "ServedModel"]
