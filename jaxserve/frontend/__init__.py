"""Text in, text out over one engine thread: the one path that LLM, the server and batch jobs share."""

from jaxserve.frontend.facts import EngineStats, ServedModel
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.generation import Generation
from jaxserve.frontend.generation_defaults import generation_defaults

__all__ = ["EngineStats", "Frontend", "Generation", "ServedModel", "generation_defaults"]
