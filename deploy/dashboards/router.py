"""What a router does: how it places requests, who waits there, and what it knows of the workers' caches."""

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
        "Requests that come in, by router",
        "The broker deals them out evenly. If one router gets none, it has lost the broker or is drained.",
        "reqps",
        (Query(rate(f"{_P}_requests_total", MODEL_ROUTER_FILTER, "instance"), _NAME),),
        "stacked",
    ),
    Panel(
        "Placements, by policy",
        "If a policy shows that you have not chosen, requests ask for it themselves by `routing.policy`.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_total", MODEL_ROUTER_FILTER, "model, policy"), "{{model}} {{policy}}"),),
    ),
    Panel(
        "Time on the way to a worker, by part",
        "The slowest in twenty. If `tokenize` or `place` grow, the router lacks CPU: start another; if `accept` does, "
        "workers or the broker answer late.",
        "s",
        (Query(quantile(0.95, f"{_P}_phase_seconds", ROUTER_FILTER, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Placements that workers refused, by code",
        "The router tries the next worker. If `overloaded` is common, workers are fuller than their events say.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_rejected_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests that end here in an error, by code",
        "If it is `overloaded`, add workers; `no_worker`, see why none is ready; the rest is mostly clients' mistakes.",
        "reqps",
        (Query(rate(f"{_P}_request_errors_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests for embeddings, by how they end",
        "If anything but `ok` grows, `embed_finished` in the router's log has it.",
        "reqps",
        (Query(rate(f"{_P}_embeddings_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
)

_WAITING = (
    Panel(
        "Requests that wait here, and how many may",
        "For each model. If it nears the limit, add workers: beyond it the tenant with the most waiting is refused.",
        "short",
        (
            Query(sum_of(f"{_P}_queue_depth", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),
            Query(max_of(f"{_P}_queue_limit", ROUTER_FILTER, "instance"), f"{_NAME} limit"),
        ),
    ),
    Panel(
        "How long those that wait do so",
        "Median and the slowest in twenty of the requests that had to wait. If it is longer than clients have "
        "patience, lower --max-queued-requests, or add workers.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p50"),
            Query(quantile(0.95, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p95"),
        ),
    ),
    Panel(
        "Requests in flight",
        "Those that a router has placed or is about to. If it grows without end while workers are idle, terminals are "
        "not heard: see the gaps in events.",
        "short",
        (Query(sum_of(f"{_P}_requests_in_flight", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

_KNOWING = (
    Panel(
        "Workers that a router knows, by state",
        "If routers disagree for more than some seconds, one of them does not hear all workers.",
        "short",
        (Query(sum_of(f"{_P}_workers", MODEL_ROUTER_FILTER, "instance, state"), f"{_NAME} {{{{state}}}}"),),
    ),
    Panel(
        "Workers by whether their blocks are known",
        "If some stay `behind`, their snapshots do not come; if some are `silent`, they compute prompts and never say "
        "what they hold: their versions differ.",
        "short",
        (Query(sum_of(f"{_P}_event_logs", MODEL_ROUTER_FILTER, "instance, events"), f"{_NAME} {{{{events}}}}"),),
        "stacked",
    ),
    Panel(
        "Prompt tokens expected to be cached, and those that were",
        "If fewer were than expected, caches are evicted before the request comes, or events are lost; if more, "
        "several routers place alike prompts at once.",
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
        "If it keeps growing beyond what the workers can hold, report it: cards bound it.",
        "short",
        (Query(sum_of(f"{_P}_index_blocks", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),),
    ),
    Panel(
        "Memory that the index takes, about",
        "If it nears the router's limit, raise the limit: it follows from what the workers hold.",
        "bytes",
        (Query(sum_of(f"{_P}_index_bytes", MODEL_ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Entries of event logs missed, and gaps closed",
        "If entries go on being missed, see the broker for slow consumers, and the router's CPU.",
        "short",
        (
            Query(increase(f"{_P}_events_lost_total", ROUTER_FILTER, "instance"), f"{_NAME} missed"),
            Query(increase(f"{_P}_snapshots_total", ROUTER_FILTER, "instance"), f"{_NAME} closed"),
        ),
    ),
    Panel(
        "Messages that may not be answered",
        "Their reply subject is no inbox. If there are any, a client is wrong or means ill: `reply_subject_refused` in "
        "the log.",
        "suffix: /s",
        (Query(rate(f"{_P}_messages_dropped_total", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

DASHBOARD = Dashboard(
    "router",
    "Tokenbus router",
    "How routers place requests, who waits there, and what they know of the workers' caches.",
    (MODEL, ROUTER),
    (Row("Placing", _PLACING), Row("Waiting", _WAITING), Row("Knowing", _KNOWING)),
)
