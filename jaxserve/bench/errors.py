"""What a benchmark raises when its figures would not mean what they say."""

from jaxserve.errors import JaxserveError


class BenchmarkFailed(JaxserveError):
    """The measured thing failed or did something else than what is measured; no figure is reported."""
