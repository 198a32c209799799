"""The paths of the gateway, and how what is wrong with a path is answered."""

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.gateway.chat import ChatCompletions
from tokenbus.gateway.openai import error_responses
from tokenbus.gateway.openai.routes import Routes
from tokenbus.protocol.wire import errors


def make(chat: ChatCompletions, routes: Routes) -> Starlette:
    """The ASGI application."""
    application = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/chat/completions/", chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/livez", routes.livez),
            Route("/readyz", routes.readyz),
        ],
        exception_handlers={
            error_responses.ApiError: _failed,
            errors.RequestError: _refused,
            HTTPException: _no_such_path,
            Exception: _bug,
        },
    )
    application.router.redirect_slashes = False  # to a host that the client names, and not behind a proxy's TLS
    return application


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, error_responses.ApiError)
    return _response(error.response)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.RequestError)
    return _response(error_responses.from_error(error.error))


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _response(error_responses.unknown_path(error.status_code, request.method, request.scope["path"]))


async def _bug(request: Request, error: Exception) -> Response:
    structlog.get_logger().error("request_failed", exc_info=error)
    return _response(error_responses.INTERNAL_ERROR)


def _response(response: error_responses.ErrorResponse) -> Response:
    return Response(response.body, response.status, response.headers, media_type="application/json")
