"""The fleet at a glance: workers, load, capacity and faults."""

from deploy.dashboards.promql import MODEL_FILTER, WORKER_FILTER, increase, max_of, quantile, rate, sum_of
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_HITS = rate("tokenbus_worker_prefix_cache_hits_tokens_total", WORKER_FILTER)
_QUERIED = rate("tokenbus_worker_prefix_cache_queries_tokens_total", WORKER_FILTER)

_GATEWAY = "tokenbus_gateway"
_LOST = f"tokenbus_router_workers_lost_total{{{MODEL_FILTER}}}"
_READY = max_of("tokenbus_router_workers", f'{MODEL_FILTER},state="ready"', "model")

_NOW = (
    Panel(
        "Workers ready for requests",
        "Ready workers of the selected models, as routers see them. If they are fewer than you run, the panel of "
        "states below shows what the others do, and `tokenbus models` which ones they are.",
        "short",
        (Query(f"sum ({_READY})"),),
        "stat",
    ),
    Panel(
        "Requests running now",
        "Requests that have a lane in a worker. If the number stays at the number of lanes, workers are full: see how "
        "many requests wait.",
        "short",
        (Query(sum_of("tokenbus_worker_requests_running", WORKER_FILTER)),),
        "stat",
    ),
    Panel(
        "Requests waiting for a worker",
        "Requests in the routers' queues. If the number does not fall back to 0 between bursts, add workers.",
        "short",
        (Query(sum_of("tokenbus_router_queue_depth", MODEL_FILTER)),),
        "stat",
    ),
    Panel(
        "Tokens generated per second",
        "Tokens of all workers together. If the rate falls while requests wait, look at step times in the worker "
        "dashboard.",
        "suffix: tok/s",
        (Query(rate("tokenbus_worker_generation_tokens_total", WORKER_FILTER)),),
        "stat",
    ),
    Panel(
        "Prompt tokens found cached",
        "The share of prompt tokens that were cached. If it falls, the router dashboard shows whether requests still "
        "reach the workers with their prefixes, and the worker dashboard shows evictions.",
        "percentunit",
        (Query(f"{_HITS} / {_QUERIED}"),),
        "stat",
    ),
    Panel(
        "Alerts firing now",
        "Alerts of deploy/prometheus/rules.yml. If there are any, each names its section of docs/operations.md.",
        "short",
        (Query('count(ALERTS{alertname=~"Tokenbus.*",alertstate="firing"}) or vector(0)'),),
        "stat",
    ),
)

_LOAD = (
    Panel(
        "Workers by state",
        "If some stay `loading`, their logs show the progress; `silent` ones are lost, and disappear within seconds; "
        "if none is `ready`, requests are refused.",
        "short",
        (Query(max_of("tokenbus_router_workers", MODEL_FILTER, "model, state"), "{{model}} {{state}}"),),
        "stacked",
    ),
    Panel(
        "Requests received, by model",
        "All requests, before any are refused. If the rate drops to 0 while clients run, they can't reach the routers "
        "or the broker.",
        "reqps",
        (Query(rate("tokenbus_router_requests_total", MODEL_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Requests finished, by reason",
        "If `error` grows, `request_finished` in the workers' logs has the codes; if many are `cancelled`, clients "
        "give up: see what they wait for.",
        "reqps",
        (Query(rate("tokenbus_worker_requests_total", WORKER_FILTER, "finish_reason"), "{{finish_reason}}"),),
        "stacked",
    ),
    Panel(
        "Prompt and generated tokens",
        "Prompt tokens of finished requests, and tokens as they are sampled. If generation falls while prompts grow, "
        "long prompts slow down the streams: see --step-target-ms.",
        "suffix: tok/s",
        (
            Query(rate("tokenbus_worker_prompt_tokens_total", WORKER_FILTER), "prompt"),
            Query(rate("tokenbus_worker_generation_tokens_total", WORKER_FILTER), "generated"),
        ),
    ),
    Panel(
        "Requests waiting in routers and workers",
        "A worker gets an eighth more than it can run; the rest waits in routers. If many wait in workers and none in "
        "routers, requests are pinned to workers, or several routers fill them at once.",
        "short",
        (
            Query(sum_of("tokenbus_router_queue_depth", MODEL_FILTER, "model"), "{{model}} in routers"),
            Query(sum_of("tokenbus_worker_requests_waiting", WORKER_FILTER, "model"), "{{model}} in workers"),
        ),
    ),
    Panel(
        "KV memory used by running requests",
        "The share of each worker's KV blocks. If one worker is full and others are not, see whether requests are "
        "pinned to it; if all are full, add workers or raise --kv-tokens.",
        "percentunit",
        (Query(max_of("tokenbus_worker_kv_usage_ratio", WORKER_FILTER, "worker_id"), "{{worker_id}}"),),
    ),
)

_FAULTS = (
    Panel(
        "Requests refused by routers, by code",
        "If the code is `overloaded`, add workers; if `no_worker`, see why none is ready; `invalid_request` and "
        "similar codes are clients' mistakes, which the error messages explain.",
        "reqps",
        (Query(rate("tokenbus_router_request_errors_total", "", "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Workers lost and engines restarted",
        "If this happens repeatedly, `engine_died` in the log says why an engine died; a lost worker was killed or "
        "cut off from the broker.",
        "short",
        (
            Query(
                f"max by (model, reason) (increase({_LOST}[$__rate_interval]))", "{{model}} workers lost, {{reason}}"
            ),
            Query(
                increase("tokenbus_worker_engine_restarts_total", WORKER_FILTER, "model"), "{{model}} engines restarted"
            ),
        ),
    ),
    Panel(
        "Event log entries missed by routers",
        "A snapshot closes each gap. If gaps keep occurring, check the broker for slow consumers, and the routers' "
        "CPU.",
        "short",
        (Query(increase("tokenbus_router_events_lost_total", "", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Workers and their engines",
        "If workers of one model differ in version or source, a release is half done.",
        "none",
        (Query(max_of("tokenbus_worker_info", WORKER_FILTER, "model, worker_id, engine, engine_version, source")),),
        "table",
    ),
)

_HTTP = (
    Panel(
        "HTTP requests, by path and status",
        "If there are 503s, gateways or the fleet are full: the code in the gateways' logs says which; 401 is a "
        "client without a valid key; other 4xx are clients' mistakes. A client that is gone did not wait for the end; "
        "a slow one read nothing for --write-deadline-s. Resubmitted requests are those that a gateway continued or "
        "restarted because their worker was lost and no router did so.",
        "reqps",
        (
            Query(rate(f"{_GATEWAY}_requests_total", "", "endpoint, status"), "{{endpoint}} {{status}}"),
            Query(rate(f"{_GATEWAY}_client_disconnects_total", "", "reason"), "client {{reason}}"),
            Query(rate(f"{_GATEWAY}_requests_resubmitted_total", ""), "resubmitted"),
        ),
    ),
    Panel(
        "Requests refused for their API key",
        "`invalid` is a client with a wrong key, or somebody who guesses; `not_valid_now` one whose key was revoked or "
        "has expired: `keys_refused` in the gateways' log has its id. If some are `unavailable`, the bucket of keys "
        "can't be read: known keys last for --keys-stale-s from then on.",
        "reqps",
        (Query(rate(f"{_GATEWAY}_keys_refused_total", "", "reason"), "{{reason}}"),),
    ),
    Panel(
        "NATS connects by key, and connections closed",
        "If `invalid` grows, a client has a wrong key, or somebody guesses: `connect_refused` in the log of `tokenbus "
        "auth` has the key's id. If nothing is `allowed` while clients try, no instance runs. Closed as `changed`: "
        "keys were revoked, rotated or given other rights; `renewal` is usual.",
        "suffix: /s",
        (
            Query(rate("tokenbus_auth_connects_total", "", "outcome"), "{{outcome}}"),
            Query(rate("tokenbus_auth_kicks_total", "", "reason"), "closed: {{reason}}"),
        ),
    ),
    Panel(
        "Time to answer a broker about a key",
        "99th percentile. If it nears a second, an instance of `tokenbus auth` lacks CPU: start another one.",
        "s",
        (Query(quantile(0.99, "tokenbus_auth_answer_seconds", ""), "p99"),),
    ),
    Panel(
        "Copies of buckets that the cluster of brokers does not keep",
        "If any are missing, see that three brokers with JetStream are there, and what `tokenbus doctor` says.",
        "short",
        (
            Query(max_of("tokenbus_router_bucket_copies_missing", "", "bucket"), "{{bucket}}"),
            Query(max_of(f"{_GATEWAY}_bucket_copies_missing", "", "bucket"), "{{bucket}} (gateways)"),
        ),
    ),
    Panel(
        "API keys, and seconds since their store was read",
        "If the seconds grow, the broker's JetStream or the file of keys does not answer (`keys_unreachable` in the "
        "log). If processes know different numbers of keys, one of them reads another store.",
        "short",
        (
            Query(max_of(f"{_GATEWAY}_keys", "", "instance"), "{{instance}}: keys"),
            Query(max_of(f"{_GATEWAY}_keys_silent_seconds", "", "instance"), "{{instance}}: seconds"),
            Query(max_of("tokenbus_auth_known_keys", "", "instance"), "{{instance}}: keys"),
            Query(max_of("tokenbus_auth_keys_silent_seconds", "", "instance"), "{{instance}}: seconds"),
        ),
    ),
    Panel(
        "Open pages of the console, by gateway",
        "If there are 128, the most that a gateway serves, close some, or open the console of another gateway.",
        "short",
        (Query(sum_of(f"{_GATEWAY}_console_viewers", "", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Open HTTP requests, by gateway",
        "If a gateway reaches --max-requests, it refuses more: start another gateway.",
        "short",
        (Query(sum_of(f"{_GATEWAY}_requests_open", "", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Latency of HTTP requests (p95)",
        "Times as HTTP clients see them. If the first token takes much longer than in the latency dashboard, requests "
        "wait in routers, or gateways lack CPU.",
        "s",
        (
            Query(quantile(0.95, f"{_GATEWAY}_time_to_first_token_seconds", ""), "first token"),
            Query(quantile(0.95, f"{_GATEWAY}_e2e_request_latency_seconds", "", "endpoint"), "{{endpoint}}"),
        ),
    ),
    Panel(
        "Tokens of HTTP requests",
        "If the rate is far below the workers', the other requests come over NATS.",
        "suffix: tok/s",
        (
            Query(rate(f"{_GATEWAY}_prompt_tokens_total", ""), "prompt"),
            Query(rate(f"{_GATEWAY}_completion_tokens_total", ""), "generated"),
        ),
    ),
    Panel(
        "HTTP connections, open and closed by gateways",
        "Busy connections have a request, idle ones have none. If many are closed as `evicted` or `slow_head`, a "
        "client opens connections without using them: `connections_closed` in the log has an address. If they are "
        "closed as `too_many_per_address` and the address is that of your proxy, see --max-connections-per-address.",
        "short",
        (
            Query(sum_of(f"{_GATEWAY}_connections", "", "state"), "{{state}}"),
            Query(increase(f"{_GATEWAY}_connections_closed_total", "", "reason"), "{{reason}}"),
        ),
    ),
    Panel(
        "Stored responses written, read and deleted",
        "If some have `failed`, the broker's JetStream does not answer: `response_store_failed` in the log has the "
        "error, and answers say `store: false`. If many are `missing`, clients continue responses that have expired or "
        "made room: see --stored-responses-s and --stored-responses-bytes.",
        "short",
        (
            Query(
                increase(f"{_GATEWAY}_stored_responses_total", "", "operation, outcome"), "{{operation}}: {{outcome}}"
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    "fleet",
    "Tokenbus fleet",
    "Workers, load, capacity and faults.",
    (MODEL, WORKER),
    (Row("Now", _NOW), Row("Load", _LOAD), Row("Faults", _FAULTS), Row("Gateways", _HTTP)),
)
