"""Latency as users see it: the first token, the next ones, whole requests, and where the time goes."""

from deploy.dashboards.promql import MODEL_FILTER, WORKER_FILTER, increase, mean, quantile, rate, share_below
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_P = "tokenbus_worker"
_TTFT = f"{_P}_time_to_first_token_seconds"
_ITL = f"{_P}_inter_token_latency_seconds"
_TPOT = f"{_P}_time_per_output_token_seconds"
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
        "Measured from the worker's accept, without the time in a router's queue (below). If only p95 rises, some "
        "prompts are long or not cached; if p50 rises too, workers are full.",
        "s",
        _quantiles(_TTFT),
    ),
    Panel(
        "Time per output token (TPOT)",
        "The mean time of a request's tokens after the first, over requests that have ended. If it rises, too many "
        "requests run at once: lower --max-num-seqs, or add workers.",
        "s",
        _quantiles(_TPOT),
    ),
    Panel(
        "Inter-token latency (ITL)",
        "The time between steps that gave a stream tokens, which shows how smooth streams are. If p99 rises, prompts "
        "of other requests make steps long: lower --step-target-ms; if p50 rises, too many requests run at once: lower "
        "--max-num-seqs.",
        "s",
        _quantiles(_ITL),
    ),
    Panel(
        "Time of whole requests",
        "From the worker's accept to the terminal. If it rises and the other two do not, generations have become "
        "longer.",
        "s",
        _quantiles(_E2E),
    ),
    Panel(
        "First tokens within 1 s and within 5 s",
        "The share of requests. If it falls below what you have promised, add workers, or find out what keeps them "
        "busy.",
        "percentunit",
        (
            Query(share_below(_TTFT, "1.0", WORKER_FILTER, "model"), "{{model}} in 1 s"),
            Query(share_below(_TTFT, "5.0", WORKER_FILTER, "model"), "{{model}} in 5 s"),
        ),
    ),
    Panel(
        "Tokens within 100 ms of the previous one",
        "The share of tokens. If it falls, users notice that streams are slow.",
        "percentunit",
        (Query(share_below(_ITL, "0.1", WORKER_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Time to the first token, by worker",
        "The 95th percentile. If one worker is much slower than the others, see its steps in the worker dashboard.",
        "s",
        (Query(quantile(0.95, _TTFT, WORKER_FILTER, "worker_id"), "{{worker_id}}"),),
    ),
)

_SPREAD = (
    Panel(
        "Distribution of times to first token",
        "If there are two bands, the upper one is prompts that were not cached, or requests that waited.",
        "s",
        (Query(increase(f"{_TTFT}_bucket", WORKER_FILTER, "le"), "{{le}}"),),
        "heatmap",
    ),
    Panel(
        "Distribution of times between tokens",
        "If a second band appears above the first, it comes from steps that also compute prompts of other requests.",
        "s",
        (Query(increase(f"{_ITL}_bucket", WORKER_FILTER, "le"), "{{le}}"),),
        "heatmap",
    ),
)

_WHERE = (
    Panel(
        "Average time of a request, by phase",
        "In its worker, a request waits for a lane, its prompt is computed, then its tokens are generated. If most of "
        "the time is waiting, add workers; if it is prefill, improve the cache hit rate.",
        "s",
        (
            Query(mean(f"{_P}_queue_time_seconds", WORKER_FILTER), "queue"),
            Query(mean(f"{_P}_prefill_time_seconds", WORKER_FILTER), "prefill"),
            Query(mean(f"{_P}_decode_time_seconds", WORKER_FILTER), "decode"),
        ),
        "stacked",
    ),
    Panel(
        "Time in a router's queue, if queued",
        "This time comes in addition to the time to the first token. If requests keep waiting, add workers.",
        "s",
        (
            Query(quantile(0.5, _WAIT, MODEL_FILTER, "model"), "{{model}} p50"),
            Query(quantile(0.95, _WAIT, MODEL_FILTER, "model"), "{{model}} p95"),
        ),
    ),
    Panel(
        "Requests queued in a router",
        "The share of requests. If it is above 0 outside of bursts, the fleet is too small for its load.",
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
        "Time to compute the prompt",
        "If it rises, prompts are longer or less of each is cached; --step-target-ms trades it against smooth streams.",
        "s",
        _quantiles(f"{_P}_prefill_time_seconds"),
    ),
    Panel(
        "Time to generate the tokens",
        "If it rises and the time between tokens does not, generations have become longer.",
        "s",
        _quantiles(f"{_P}_decode_time_seconds"),
    ),
)

DASHBOARD = Dashboard(
    "latency",
    "Tokenbus users' latency",
    "Latency as users see it, and where the time goes.",
    (MODEL, WORKER),
    (Row("What users feel", _FIRST), Row("Distributions", _SPREAD), Row("Where the time goes", _WHERE)),
)
