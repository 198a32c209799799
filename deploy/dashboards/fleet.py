"""The fleet at a glance: who serves, how much is asked, how full it is, and what goes wrong."""

from deploy.dashboards.promql import MODEL_FILTER, WORKER_FILTER, increase, max_of, quantile, rate, sum_of
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_HITS = rate("tokenbus_worker_prefix_cache_hits_tokens_total", WORKER_FILTER)
_LOOKED_UP = rate("tokenbus_worker_prefix_cache_queries_tokens_total", WORKER_FILTER)

_GATEWAY = "tokenbus_gateway"
_LOST = f"tokenbus_router_workers_lost_total{{{MODEL_FILTER}}}"
_READY = max_of("tokenbus_router_workers", f'{MODEL_FILTER},state="ready"', "model")

_NOW = (
    Panel(
        "Workers that take requests",
        "Of the chosen models, as routers see them. If it is fewer than you run, the panel of states below says what "
        "the others do, and `tokenbus models` which they are.",
        "short",
        (Query(f"sum ({_READY})"),),
        "stat",
    ),
    Panel(
        "Requests that run",
        "Requests that have a lane in a worker. If it stays at the number of lanes, workers are full: see what waits.",
        "short",
        (Query(sum_of("tokenbus_worker_requests_running", WORKER_FILTER)),),
        "stat",
    ),
    Panel(
        "Requests that wait for a worker",
        "In the routers' queues. If it does not fall back to 0 between bursts, add workers.",
        "short",
        (Query(sum_of("tokenbus_router_queue_depth", MODEL_FILTER)),),
        "stat",
    ),
    Panel(
        "Tokens that are generated",
        "By all workers together. If it falls while requests wait, look at step times in the worker dashboard.",
        "suffix: tok/s",
        (Query(rate("tokenbus_worker_generation_tokens_total", WORKER_FILTER)),),
        "stat",
    ),
    Panel(
        "Prompt tokens that were cached",
        "Their share of all prompt tokens. If it falls, see the router dashboard for whether requests still find their "
        "caches, and the worker dashboard for evictions.",
        "percentunit",
        (Query(f"{_HITS} / {_LOOKED_UP}"),),
        "stat",
    ),
    Panel(
        "Alerts that fire",
        "Of deploy/prometheus/rules.yml. If it is not 0, each alert names its heading in docs/operations.md.",
        "short",
        (Query('count(ALERTS{alertname=~"Tokenbus.*",alertstate="firing"}) or vector(0)'),),
        "stat",
    ),
)

_LOAD = (
    Panel(
        "Workers by state",
        "If some stay `loading`, their logs say how far the model is; `silent` ones have been lost, and go within "
        "seconds; none `ready` means that requests are refused.",
        "short",
        (Query(max_of("tokenbus_router_workers", MODEL_FILTER, "model, state"), "{{model}} {{state}}"),),
        "stacked",
    ),
    Panel(
        "Requests that come in",
        "By model, before anything is refused. If it stops while clients run, routers or the broker can't be reached.",
        "reqps",
        (Query(rate("tokenbus_router_requests_total", MODEL_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Requests that end, by how",
        "If `error` grows, `request_finished` in the workers' logs has the codes; many `cancelled` mean clients that "
        "give up: see what they wait for.",
        "reqps",
        (Query(rate("tokenbus_worker_requests_total", WORKER_FILTER, "finish_reason"), "{{finish_reason}}"),),
        "stacked",
    ),
    Panel(
        "Tokens of prompts and of answers",
        "Of requests that have ended, and as they are sampled. If answers fall while prompts grow, long prompts slow "
        "the streams: see --step-target-ms.",
        "suffix: tok/s",
        (
            Query(rate("tokenbus_worker_prompt_tokens_total", WORKER_FILTER), "prompts"),
            Query(rate("tokenbus_worker_generation_tokens_total", WORKER_FILTER), "answers"),
        ),
    ),
    Panel(
        "Requests that wait, in routers and in workers",
        "A worker gets an eighth more than it can run; the rest waits in routers. If workers have many waiting and "
        "routers none, requests are pinned to workers, or several routers fill them at once.",
        "short",
        (
            Query(sum_of("tokenbus_router_queue_depth", MODEL_FILTER, "model"), "{{model}} in routers"),
            Query(sum_of("tokenbus_worker_requests_waiting", WORKER_FILTER, "model"), "{{model}} in workers"),
        ),
    ),
    Panel(
        "KV memory that running requests hold",
        "By worker. If one is full and others are not, see whether requests are pinned; if all are, add workers or "
        "--kv-tokens.",
        "percentunit",
        (Query(max_of("tokenbus_worker_kv_usage_ratio", WORKER_FILTER, "worker_id"), "{{worker_id}}"),),
    ),
)

_FAULTS = (
    Panel(
        "Requests that routers refuse, by code",
        "If it is `overloaded`, add workers; `no_worker`, see why none is ready; `invalid_request` and the like are "
        "clients' mistakes, which the answers explain.",
        "reqps",
        (Query(rate("tokenbus_router_request_errors_total", "", "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Workers lost and engines restarted",
        "If it happens again and again, `engine_died` in the log says why an engine died; a worker that is lost was "
        "killed or cut off.",
        "short",
        (
            Query(f"max by (model) (increase({_LOST}[$__rate_interval]))", "{{model}} workers lost"),
            Query(increase("tokenbus_worker_engine_restarts_total", WORKER_FILTER, "model"), "{{model}} engines ended"),
        ),
    ),
    Panel(
        "Entries of event logs that routers missed",
        "A snapshot closes each gap. If they go on, see the broker for slow consumers and the routers' CPU.",
        "short",
        (Query(increase("tokenbus_router_events_lost_total", "", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Workers, and what they run",
        "If two of one model differ in version or source, a release is half done.",
        "none",
        (Query(max_of("tokenbus_worker_info", WORKER_FILTER, "model, worker_id, engine, engine_version, source")),),
        "table",
    ),
)

_HTTP = (
    Panel(
        "Completions over HTTP, by status",
        "If it is 503, gateways or the fleet are full: the code in their logs says which; 401 is somebody without a "
        "key; others from 400 to 499 are clients' mistakes. Those that clients left are counted beside them.",
        "reqps",
        (
            Query(rate(f"{_GATEWAY}_requests_total", "", "status"), "{{status}}"),
            Query(rate(f"{_GATEWAY}_client_disconnects_total", ""), "client gone"),
        ),
    ),
    Panel(
        "Completions over HTTP that are open",
        "By gateway. If one comes to --max-requests the next are refused: start another gateway.",
        "short",
        (Query(sum_of(f"{_GATEWAY}_requests_open", "", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Times that HTTP clients see",
        "The slowest in twenty. If the first token takes much longer than in the dashboard of latency, requests wait "
        "in routers, or gateways have too little CPU.",
        "s",
        (
            Query(quantile(0.95, f"{_GATEWAY}_time_to_first_token_seconds", ""), "first token"),
            Query(quantile(0.95, f"{_GATEWAY}_e2e_request_latency_seconds", ""), "whole request"),
        ),
    ),
    Panel(
        "Tokens of completions over HTTP",
        "If it is far below what workers compute, the rest is asked over NATS.",
        "suffix: tok/s",
        (
            Query(rate(f"{_GATEWAY}_prompt_tokens_total", ""), "prompts"),
            Query(rate(f"{_GATEWAY}_completion_tokens_total", ""), "answers"),
        ),
    ),
    Panel(
        "Connections of gateways, and those they have ended",
        "Connections that work have a request, those that wait have none. If many are ended as `evicted` or "
        "`slow_head`, somebody opens connections for nothing: `connections_closed` in the log has an address. If it is "
        "`too_many_per_address` and that is a proxy of yours, see --max-connections-per-address.",
        "short",
        (
            Query(sum_of(f"{_GATEWAY}_connections", "", "state"), "{{state}}"),
            Query(increase(f"{_GATEWAY}_connections_closed_total", "", "reason"), "{{reason}}"),
        ),
    ),
)

DASHBOARD = Dashboard(
    "fleet",
    "Tokenbus fleet",
    "Who serves, how much is asked, how full it is, and what goes wrong.",
    (MODEL, WORKER),
    (Row("Now", _NOW), Row("Load", _LOAD), Row("Faults", _FAULTS), Row("Gateways", _HTTP)),
)
