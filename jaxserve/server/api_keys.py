"""Checks the API key of a request. Routers that need one get it as a dependency in `app.py`."""

import hmac

from starlette.requests import Request

from jaxserve.server.error_responses import WrongApiKey
from jaxserve.server.serving import serving_of


async def require_api_key(request: Request) -> None:
    """Passes when the server has no keys or the request carries one of them as `Authorization: Bearer KEY`.

    Every key is compared, each in constant time, so that the answer's timing tells nothing about them.
    Raises WrongApiKey.
    """
    keys = serving_of(request).options.api_keys
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    given_bytes = given.strip().encode("latin-1")  # how header bytes were decoded
    matches = [hmac.compare_digest(given_bytes, key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise WrongApiKey("missing or wrong API key; send the header 'Authorization: Bearer KEY'")
