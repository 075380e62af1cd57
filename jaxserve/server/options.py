"""What an operator chooses about the HTTP server. Engine and model options live elsewhere."""

from dataclasses import dataclass

from jaxserve.errors import ConfigError

DEFAULT_MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Choices of one server, checked on construction.

    port: 0 takes any free port. api_keys: any of them opens every endpoint but /health and /metrics; empty: no key
    is asked for. served_model_names: the names clients may use, the first is what answers carry; empty: the
    frontend's model name. drain_timeout_seconds: how long running requests may go on after SIGTERM.
    root_path: path prefix that a proxy in front strips. allowed_origins: CORS origins ("*" for any); empty: no CORS.

    Raises ConfigError for values that cannot work.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    drain_timeout_seconds: float = 30.0
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if self.drain_timeout_seconds < 0:
            raise ConfigError(f"drain_timeout_seconds must be 0 or more, got {self.drain_timeout_seconds}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must start with / and not end with it, got {self.root_path!r}")
        if not all(self.api_keys) or not all(self.served_model_names):
            raise ConfigError("api keys and served model names must not be empty strings")
