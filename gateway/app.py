"""The paths of the gateway, and how what is wrong with a path is answered."""

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.gateway.chat import Chat
from tokenbus.gateway.openai import failures
from tokenbus.gateway.openai.pages import Pages
from tokenbus.protocol.wire import errors


def make(chat: Chat, pages: Pages) -> Starlette:
    """The ASGI application."""
    application = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/chat/completions/", chat, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/livez", pages.livez),
            Route("/readyz", pages.readyz),
        ],
        exception_handlers={
            failures.FailedError: _failed,
            errors.RequestError: _refused,
            HTTPException: _no_such_path,
            Exception: _bug,
        },
    )
    application.router.redirect_slashes = False  # to a host that the client names, and not behind a proxy's TLS
    return application


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, failures.FailedError)
    return _response(error.failure)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.RequestError)
    return _response(failures.of_error(error.error))


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _response(failures.of_path(error.status_code, request.method, request.scope["path"]))


async def _bug(request: Request, error: Exception) -> Response:
    structlog.get_logger().error("request_failed", exc_info=error)
    return _response(failures.BUG)


def _response(failure: failures.Failure) -> Response:
    return Response(failure.body, failure.status, failure.headers, media_type="application/json")
