"""The APIs that the gateway serves. Each endpoint is declared in a file of its own, and listed here."""

from collections.abc import Mapping

from tokenbus.gateway import refused_paths, rerank, usage, vllm
from tokenbus.gateway.anthropic import error_bodies as anthropic_errors
from tokenbus.gateway.anthropic import messages, model_list
from tokenbus.gateway.anthropic.schemas import AnthropicErrorBody
from tokenbus.gateway.http import rate_limit_headers
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.ollama import embeddings as ollama_embeddings
from tokenbus.gateway.ollama import generation
from tokenbus.gateway.ollama import models as ollama
from tokenbus.gateway.openai import chat, completions, embeddings, error_bodies, models, schemas
from tokenbus.gateway.openai.responses import endpoints as responses
from tokenbus.gateway.openai.responses import stored
from tokenbus.gateway.serving.dialect import Dialect, ErrorForm
from tokenbus.protocol.http.refusals import Headers, HttpRefusal

_RETRY_REFUSED_AFTER_MS = 1_000.0

OPENAI = Dialect(
    errors=ErrorForm(error_bodies.encode, schemas.ErrorBody),
    endpoints=(
        chat.ENDPOINT,
        chat.INPUT_TOKENS,
        completions.ENDPOINT,
        responses.ENDPOINT,
        responses.INPUT_TOKENS,
        embeddings.ENDPOINT,
        *rerank.RERANKS,
        rerank.SCORE,
        vllm.TOKENIZE,
        vllm.DETOKENIZE,
        vllm.TOKENIZER_INFO,
    ),
    resources=models.RESOURCES,
    records=stored.RESOURCES,
    reports=usage.REPORTS,
    refused=(*usage.REFUSED, *stored.REFUSED, *rerank.REFUSED, *refused_paths.REFUSED),
    has_bare_paths=True,
)
"""OpenAI's API, with the endpoints of others whose errors have its form."""
ANTHROPIC = Dialect(
    errors=ErrorForm(
        anthropic_errors.encode, AnthropicErrorBody, anthropic_errors.status_of, rate_limit_headers.to_anthropic
    ),
    endpoints=(messages.ENDPOINT, messages.COUNT_TOKENS),
    resources=model_list.RESOURCES,
    prefixes=("/v1/messages/",),
    header="anthropic-version",
)
OLLAMA = Dialect(
    errors=ErrorForm(ollama.encode_error, ollama.OllamaError),
    endpoints=(generation.CHAT, generation.GENERATE, ollama_embeddings.EMBED, ollama_embeddings.EMBEDDINGS),
    resources=ollama.RESOURCES,
    refused=ollama.REFUSED,
    prefixes=("/api/",),
    takes_any_type=True,
)
DIALECTS = (OPENAI, OLLAMA, ANTHROPIC)
"""Where several have one path, the first one is served unless a header asks for another."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Returns the dialect to which a path belongs, or else the one that a header asks for; OpenAI's by default."""
    for one in DIALECTS:
        if f"{path}/".startswith(one.prefixes):
            return one
    return next((one for one in DIALECTS if one.header and one.header in headers), OPENAI)


def refusal_response(refusal: HttpRefusal, path: str) -> tuple[int, Headers, bytes]:
    """Returns the status, headers and body of a refusal by the server itself; the path is empty if unknown."""
    is_full = refusal.status in (429, 503)
    response = ErrorResponse(
        refusal.status,
        refusal.code,
        refusal.message,
        retryable=is_full or refusal.status == 408,
        retry_after_ms=_RETRY_REFUSED_AFTER_MS if is_full else None,
    )
    form = dialect_of(path, {}).errors
    headers = {"content-type": "application/json"} | response.headers
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return form.status_of(response), pairs, form.encode(response)
