"""llama-server's paths that are known and not served."""

from tokenbus.gateway.serving.dialect import RefusedPath

_OTHERS = "this is an endpoint of llama-server's"
_OPERATORS = "operators decide which models and adapters are loaded, and GET /v1/models lists them"
REFUSED = (
    RefusedPath("/completion", ("POST",), f"{_OTHERS} own API: use /v1/completions"),
    RefusedPath("/infill", ("POST",), f"{_OTHERS} own API: use /v1/completions with a suffix"),
    RefusedPath("/embedding", ("POST",), f"{_OTHERS} own API: use /v1/embeddings"),
    RefusedPath("/apply-template", ("POST",), f"{_OTHERS}: prompts are not returned as texts, use /tokenize"),
    RefusedPath("/props", ("GET", "POST"), f"{_OTHERS}: use GET /v1/models and GET /tokenizer_info"),
    RefusedPath("/slots", ("GET",), f"{_OTHERS}: there are no slots, and tokenbus top shows what runs"),
    RefusedPath("/metrics", ("GET",), f"{_OTHERS}: metrics are on a port of their own (--metrics-port)"),
    RefusedPath("/lora-adapters", ("GET", "POST"), f"{_OTHERS}: {_OPERATORS}"),
    *(RefusedPath(f"/models/{action}", ("POST",), f"{_OTHERS}: {_OPERATORS}") for action in ("load", "unload")),
)
