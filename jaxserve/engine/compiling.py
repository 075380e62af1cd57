"""From a function and its arguments to an executable: read from disk as early as possible, else compiled and kept."""

import logging
import secrets
import threading
from typing import Any

from jaxserve.engine.compile_watch import CompileWatch
from jaxserve.engine.program_cache import HeldProgram, ProgramCache
from jaxserve.engine.program_keys import Nameless, lowered_key, traced_key

LOG = logging.getLogger("jaxserve")
_NO_EFFECT_ON_CPUS = "xla_gpu_nccl_termination_timeout_seconds"


def executable(
    function: Any, name: str, made_of: Any, arguments: tuple[Any, ...], cache: ProgramCache | None
) -> tuple[Any, bool]:
    """The executable of a jitted function for these arguments, and whether it was on disk. made_of: see traced_key."""
    if cache is None:
        return _compiled(function.lower(*arguments))
    key = _traced_key(name, made_of, arguments)
    program = cache.load_traced(key, arguments) if key else None
    if program is not None:
        return program, True
    return _from_text(function.lower(*arguments), name, arguments, cache, key)


def held_program(name: str, made_of: Any, arguments: tuple[Any, ...], cache: ProgramCache) -> HeldProgram | None:
    """The executable of the same where it is on disk and needs no tracing, in memory but not loaded."""
    key = _traced_key(name, made_of, arguments)
    return cache.hold(key) if key else None


def _traced_key(name: str, made_of: Any, arguments: tuple[Any, ...]) -> str | None:
    try:
        return traced_key(name, made_of, arguments)
    except Nameless as reason:
        LOG.debug("%s has to be traced: %s", name, reason)
        return None


def _from_text(
    lowered: Any, name: str, arguments: tuple[Any, ...], cache: ProgramCache, key: str | None
) -> tuple[Any, bool]:
    try:
        text_key = lowered_key(name, lowered.as_text(), arguments)
    except Nameless as reason:
        LOG.debug("%s is not kept on disk: %s", name, reason)
        return _compiled(lowered)
    program = cache.load_lowered(text_key, arguments, lowered.out_tree)
    is_kept = from_cache = program is not None
    if program is None:
        program, from_cache = _compiled(lowered)
        if from_cache:
            program, from_cache = _compiled_anew(lowered)
        is_kept = not from_cache and cache.store(text_key, program)
    if key and is_kept:
        cache.link(key, text_key, program, lowered.out_tree)
    return program, from_cache


def _compiled(lowered: Any, options: dict[str, Any] | None = None) -> tuple[Any, bool]:
    """The executable, and whether XLA's persistent cache or jit's own had it."""
    with CompileWatch(threading.get_ident()) as watch:
        program = lowered.compile(compiler_options=options)
    return program, watch.compiled == 0


def _compiled_anew(lowered: Any) -> tuple[Any, bool]:
    """A program that can be kept: what XLA:CPU read from its own cache is written out again without its machine code
    (jaxlib 0.11.2 and 0.12) and fails when it runs. A value of its own for an option leads past that cache."""
    return _compiled(lowered, {_NO_EFFECT_ON_CPUS: secrets.randbelow(2**31)})
