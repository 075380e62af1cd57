"""Counts XLA compilations through JAX's own monitoring events, so that nothing compiles unseen."""

import threading

import jax.monitoring

_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"
_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts since `start`, for one thread or for all: programs asked for, and those the persistent cache had."""

    def __init__(self, thread: int | None = None) -> None:
        self.requests = 0
        self.hits = 0
        self._thread = thread

    @property
    def compiled(self) -> int:
        """Programs XLA really compiled."""
        return self.requests - self.hits

    def start(self) -> "CompileWatch":
        """Begins to count. Listeners are global to the process in JAX: call `stop`."""
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def watch_this_thread(self) -> "CompileWatch":
        """Begins to count, programs of the calling thread only."""
        self._thread = threading.get_ident()
        return self.start()

    def stop(self) -> None:
        """Ends counting; the numbers stay."""
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)

    def _is_ours(self) -> bool:
        return self._thread is None or self._thread == threading.get_ident()

    def _on_event(self, event: str, **_: object) -> None:
        if event == _HIT and self._is_ours():
            self.hits += 1

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILE and self._is_ours():
            self.requests += 1

    def __enter__(self) -> "CompileWatch":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
