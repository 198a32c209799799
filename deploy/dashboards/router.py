"""The routers: how they place requests, what waits in them, and what they know about the workers' caches."""

from deploy.dashboards.promql import (
    MODEL_FILTER,
    MODEL_ROUTER_FILTER,
    ROUTER_FILTER,
    increase,
    max_of,
    quantile,
    rate,
    sum_of,
)
from deploy.dashboards.spec import MODEL, ROUTER, Dashboard, Panel, Query, Row

_P = "tokenbus_router"
_NAME = "{{instance}}"

_PLACING = (
    Panel(
        "Requests received, by router",
        "The broker distributes them evenly. If one router gets none, it has lost the broker or is draining.",
        "reqps",
        (Query(rate(f"{_P}_requests_total", MODEL_ROUTER_FILTER, "instance"), _NAME),),
        "stacked",
    ),
    Panel(
        "Placements, by policy",
        "If a policy appears that you have not configured, requests ask for it with `routing.policy`.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_total", MODEL_ROUTER_FILTER, "model, policy"), "{{model}} {{policy}}"),),
    ),
    Panel(
        "Time to place a request (p95), by phase",
        "If `tokenize` or `place` grow, the router lacks CPU: start another; if `accept` grows, workers or the broker "
        "answer late.",
        "s",
        (Query(quantile(0.95, f"{_P}_phase_seconds", ROUTER_FILTER, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Placements rejected by workers, by code",
        "The router then tries the next worker. If `overloaded` is common, workers are fuller than their events say.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_rejected_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests ended in an error by routers, by code",
        "If the code is `overloaded`, add workers; if `no_worker`, see why none is ready; others are mostly clients' "
        "mistakes.",
        "reqps",
        (Query(rate(f"{_P}_request_errors_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Embedding requests, by result",
        "If anything but `ok` grows, see `embed_finished` in the router's log.",
        "reqps",
        (Query(rate(f"{_P}_embeddings_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
)

_WAITING = (
    Panel(
        "Requests waiting, and their limit",
        "The queue of each model. If it approaches the limit, add workers: beyond the limit, the tenant with the most "
        "waiting requests is refused.",
        "short",
        (
            Query(sum_of(f"{_P}_queue_depth", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),
            Query(max_of(f"{_P}_queue_limit", ROUTER_FILTER, "instance"), f"{_NAME} limit"),
        ),
    ),
    Panel(
        "Waiting time of queued requests",
        "Median and 95th percentile of the requests that had to wait. If it is longer than clients are willing to "
        "wait, lower --max-queued-requests, or add workers.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p50"),
            Query(quantile(0.95, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p95"),
        ),
    ),
    Panel(
        "Requests in flight, by router",
        "Requests that a router has placed or is about to place. If the number keeps growing while workers are idle, "
        "the router misses terminals: see the gaps in events.",
        "short",
        (Query(sum_of(f"{_P}_requests_in_flight", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

_KNOWING = (
    Panel(
        "Workers known to a router, by state",
        "If routers disagree for more than a few seconds, one of them does not hear all workers.",
        "short",
        (Query(sum_of(f"{_P}_workers", MODEL_ROUTER_FILTER, "instance, state"), f"{_NAME} {{{{state}}}}"),),
    ),
    Panel(
        "Workers, by state of their event log",
        "If some stay `behind`, their snapshots do not arrive; if some are `silent`, they compute prompts without "
        "publishing their blocks: their versions differ.",
        "short",
        (Query(sum_of(f"{_P}_event_logs", MODEL_ROUTER_FILTER, "instance, events"), f"{_NAME} {{{{events}}}}"),),
        "stacked",
    ),
    Panel(
        "Prompt tokens cached, expected and actual",
        "If fewer are cached than expected, blocks are evicted before the request arrives, or events are lost; if "
        "more, several routers place similar prompts at the same time.",
        "percentunit",
        (
            Query(
                f"{rate(f'{_P}_predicted_overlap_tokens_total', MODEL_ROUTER_FILTER, 'model')}"
                f" / {rate(f'{_P}_prompt_tokens_total', MODEL_ROUTER_FILTER, 'model')}",
                "{{model}} expected",
            ),
            Query(
                f"{rate('tokenbus_worker_prefix_cache_hits_tokens_total', MODEL_FILTER, 'model')}"
                f" / {rate('tokenbus_worker_prefix_cache_queries_tokens_total', MODEL_FILTER, 'model')}",
                "{{model}} cached",
            ),
        ),
    ),
    Panel(
        "Blocks in the prefix index",
        "If the number exceeds what the workers can hold, report a bug: their cards limit it.",
        "short",
        (Query(sum_of(f"{_P}_index_blocks", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),),
    ),
    Panel(
        "Estimated memory of the index",
        "If it approaches the router's memory limit, raise the limit: it depends on what the workers hold.",
        "bytes",
        (Query(sum_of(f"{_P}_index_bytes", MODEL_ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Event log entries missed, and gaps closed",
        "If entries keep being missed, check the broker for slow consumers, and the router's CPU.",
        "short",
        (
            Query(increase(f"{_P}_events_lost_total", ROUTER_FILTER, "instance"), f"{_NAME} missed"),
            Query(increase(f"{_P}_snapshots_total", ROUTER_FILTER, "instance"), f"{_NAME} closed"),
        ),
    ),
    Panel(
        "Messages dropped without a reply",
        "Their reply subject is no inbox. If there are any, a client is broken or malicious: see "
        "`reply_subject_refused` in the log.",
        "suffix: /s",
        (Query(rate(f"{_P}_messages_dropped_total", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

DASHBOARD = Dashboard(
    "router",
    "Tokenbus router",
    "How routers place requests, what waits in them, and what they know about the workers' caches.",
    (MODEL, ROUTER),
    (Row("Placement", _PLACING), Row("Queue", _WAITING), Row("Knowledge", _KNOWING)),
)
