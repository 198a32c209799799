"""Paths of other servers that are known and not served."""

from tokenbus.gateway.serving.dialect import RefusedPath

_OPERATORS = "operators decide which models and adapters are loaded, and GET /v1/models lists them"
_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_OF_OPENAI = (
    ("/v1/audio/speech", _POST, "only text is served"),
    ("/v1/audio/transcriptions", _POST, "only text is served"),
    ("/v1/audio/translations", _POST, "only text is served"),
    ("/v1/images/edits", _POST, "only text is served"),
    ("/v1/images/generations", _POST, "only text is served"),
    ("/v1/moderations", _POST, "there are no classifiers"),
    ("/v1/files", _BOTH, "no files are stored"),
    ("/v1/batches", _BOTH, "there are no batches: send the requests themselves, with service_tier: flex"),
    ("/v1/conversations", _POST, "there are no conversations: use previous_response_id"),
    ("/v1/conversations/{id}", _BOTH, "there are no conversations: use previous_response_id"),
    ("/v1/conversations/{id}/items", _BOTH, "there are no conversations: use previous_response_id"),
    ("/v1/realtime", _GET, "there are no WebSockets: use stream"),
)
_OF_VLLM = (
    ("/pooling", _POST, "use /v1/embeddings, /v1/rerank or /v1/score"),
    ("/v1/load_lora_adapter", _POST, _OPERATORS),
    ("/v1/unload_lora_adapter", _POST, _OPERATORS),
    ("/sleep", _POST, _OPERATORS),
    ("/wake_up", _POST, _OPERATORS),
    ("/reset_prefix_cache", _POST, "cache_salt keeps caches apart, and cache_prompt: false reuses nothing"),
    ("/version", _GET, "GET / says what this server is"),
    ("/load", _GET, "tokenbus top shows what runs"),
)
_OF_LLAMA_SERVER = (
    ("/completion", _POST, "use /v1/completions"),
    ("/infill", _POST, "use /v1/completions with a suffix"),
    ("/embedding", _POST, "use /v1/embeddings"),
    ("/apply-template", _POST, "prompts are not returned as texts, use /tokenize"),
    ("/props", _BOTH, "use GET /v1/models and GET /tokenizer_info"),
    ("/slots", _GET, "there are no slots, and tokenbus top shows what runs"),
    ("/metrics", _GET, "metrics are on a port of their own (--metrics-port)"),
    ("/lora-adapters", _BOTH, _OPERATORS),
    ("/models/load", _POST, _OPERATORS),
    ("/models/unload", _POST, _OPERATORS),
)
_OF_SGLANG = (
    ("/generate", _POST, "use /v1/completions"),
    ("/flush_cache", _BOTH, "cache_salt keeps caches apart, and cache_prompt: false reuses nothing"),
    ("/get_model_info", _GET, "use GET /v1/models"),
    ("/get_server_info", _GET, "GET / says what this server is"),
)
_OF_TGI = (
    ("/generate_stream", _POST, "use /v1/completions with stream: true"),
    ("/info", _GET, "use GET /v1/models"),
    ("/", _POST, "use /v1/completions or /v1/embeddings"),
)
_OF_MISTRAL = (
    ("/v1/fim/completions", _POST, "use /v1/completions with a suffix"),
    ("/v1/agents/completions", _POST, "there are no agents: use /v1/chat/completions"),
    ("/v1/ocr", _POST, "only text is served"),
)
_ALL = {
    "OpenAI": _OF_OPENAI,
    "vLLM": _OF_VLLM,
    "llama-server": _OF_LLAMA_SERVER,
    "SGLang": _OF_SGLANG,
    "TGI": _OF_TGI,
    "Mistral": _OF_MISTRAL,
}
REFUSED = tuple(
    RefusedPath(path, methods, f"this is an endpoint of {server}'s that is not served: {problem}")
    for server, paths in _ALL.items()
    for path, methods, problem in paths
)
