"""Builds the ASGI app: routes, keys, CORS, error answers. Knows no engine and starts nothing."""

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxserve.server.api_keys import require_api_key
from jaxserve.server.error_responses import install_error_answers
from jaxserve.server.metrics import CountHttpRequests
from jaxserve.server.options import ServerOptions
from jaxserve.server.routes import about, chat, completions, embeddings, experts, health, models, tokenize
from jaxserve.server.serving import ServedFrontend, Serving

OPEN_ROUTERS = (health.router,)
KEYED_ROUTERS = (
    chat.router,
    completions.router,
    embeddings.router,
    experts.router,
    models.router,
    tokenize.router,
    about.router,
)


def create_app(frontend: ServedFrontend, options: ServerOptions) -> FastAPI:
    """The app that serves `frontend`; its shared state is `app.state.serving`.

    Pages about the API (docs, openapi.json) are off: bodies are validated by our own reader, so that they would
    show no fields.
    """
    serving = Serving(frontend, options)
    app = FastAPI(
        title="jaxserve",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.serving = serving
    for router in OPEN_ROUTERS:
        app.include_router(router)
    for router in KEYED_ROUTERS:
        app.include_router(router, dependencies=[Depends(require_api_key)])
    install_error_answers(app)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(CountHttpRequests, counter=serving.metrics.http_requests)
    return app
