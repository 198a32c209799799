"""What users wait for: the first token, the next ones, and the whole answer; and where that time goes."""

from deploy.dashboards.promql import MODEL_FILTER, WORKER_FILTER, increase, mean, quantile, rate, share_below
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_P = "tokenbus_worker"
_TTFT = f"{_P}_time_to_first_token_seconds"
_ITL = f"{_P}_inter_token_latency_seconds"
_E2E = f"{_P}_e2e_request_latency_seconds"
_WAIT = "tokenbus_router_queue_wait_seconds"


def _quantiles(metric: str) -> tuple[Query, ...]:
    shares = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    return tuple(
        Query(quantile(share, metric, WORKER_FILTER, "model"), f"{{{{model}}}} {name}") for name, share in shares
    )


_FIRST = (
    Panel(
        "Time to the first token",
        "From a worker's accept on; what was waited in a router comes on top, below. If p95 leaves p50 behind, some "
        "prompts are long or find no cache; if both rise, workers are full.",
        "s",
        _quantiles(_TTFT),
    ),
    Panel(
        "Time from one token to the next",
        "What makes a stream smooth. If p99 rises, prompts of others take long steps: lower --step-target-ms; if p50 "
        "does, too many run at once: lower --max-num-seqs.",
        "s",
        _quantiles(_ITL),
    ),
    Panel(
        "Time of whole requests",
        "From the accept to the terminal. If it rises and the two beside it do not, answers have become longer.",
        "s",
        _quantiles(_E2E),
    ),
    Panel(
        "Requests whose first token came within 1 s and within 5 s",
        "Their share. If it falls under what you have promised, add workers, or look for what fills them.",
        "percentunit",
        (
            Query(share_below(_TTFT, "1.0", WORKER_FILTER, "model"), "{{model}} in 1 s"),
            Query(share_below(_TTFT, "5.0", WORKER_FILTER, "model"), "{{model}} in 5 s"),
        ),
    ),
    Panel(
        "Tokens that came within 100 ms of the one before",
        "Their share. If it falls, streams are read faster than they come.",
        "percentunit",
        (Query(share_below(_ITL, "0.1", WORKER_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Time to the first token, by worker",
        "The slowest in twenty. If one worker is much slower than the others, see its steps in the worker dashboard.",
        "s",
        (Query(quantile(0.95, _TTFT, WORKER_FILTER, "worker_id"), "{{worker_id}}"),),
    ),
)

_SPREAD = (
    Panel(
        "How many first tokens came how fast",
        "If there are two bands, the upper one is of prompts that found no cache, or of requests that waited.",
        "s",
        (Query(increase(f"{_TTFT}_bucket", WORKER_FILTER, "le"), "{{le}}"),),
        "heatmap",
    ),
    Panel(
        "How many tokens came how fast after the one before",
        "If a second band appears above the first, those are steps that carry prompts of others.",
        "s",
        (Query(increase(f"{_ITL}_bucket", WORKER_FILTER, "le"), "{{le}}"),),
        "heatmap",
    ),
)

_WHERE = (
    Panel(
        "Where the time of a request goes, on average",
        "In its worker: it waits for a lane, its prompt is computed, its answer is. If waiting is most of it, add "
        "workers; if prompts are, look for better cache hits.",
        "s",
        (
            Query(mean(f"{_P}_queue_time_seconds", WORKER_FILTER), "waits"),
            Query(mean(f"{_P}_prefill_time_seconds", WORKER_FILTER), "prompt"),
            Query(mean(f"{_P}_decode_time_seconds", WORKER_FILTER), "answer"),
        ),
        "stacked",
    ),
    Panel(
        "Time in a router's queue, of those that wait",
        "Comes on top of the time to the first token. If it is not empty for long, add workers.",
        "s",
        (
            Query(quantile(0.5, _WAIT, MODEL_FILTER, "model"), "{{model}} p50"),
            Query(quantile(0.95, _WAIT, MODEL_FILTER, "model"), "{{model}} p95"),
        ),
    ),
    Panel(
        "Requests that have to wait in a router",
        "Their share. If it is above 0 outside of bursts, the fleet is too small for its load.",
        "percentunit",
        (
            Query(
                f"{rate(f'{_WAIT}_count', MODEL_FILTER, 'model')}"
                f" / {rate('tokenbus_router_requests_total', MODEL_FILTER, 'model')}",
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Time in a worker until the first step",
        "If it rises while routers' queues are empty, requests are pinned to full workers.",
        "s",
        _quantiles(f"{_P}_queue_time_seconds"),
    ),
    Panel(
        "Time in which prompts are computed",
        "If it rises, prompts are longer or find less in the cache; --step-target-ms trades it against smooth streams.",
        "s",
        _quantiles(f"{_P}_prefill_time_seconds"),
    ),
    Panel(
        "Time in which answers are computed",
        "If it rises and the time from token to token does not, answers have become longer.",
        "s",
        _quantiles(f"{_P}_decode_time_seconds"),
    ),
)

DASHBOARD = Dashboard(
    "latency",
    "Tokenbus users' latency",
    "What users wait for, and where that time goes.",
    (MODEL, WORKER),
    (Row("What users feel", _FIRST), Row("How it is spread", _SPREAD), Row("Where the time goes", _WHERE)),
)
