"""The dashboard of the routers: placements, waiting requests, and what is known of the workers' caches."""

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

_PLACEMENT = (
    Panel(
        "Requests received, by router",
        "The broker spreads them evenly. If a router receives none, it has lost the broker or is draining.",
        "reqps",
        (Query(rate(f"{_P}_requests_total", MODEL_ROUTER_FILTER, "instance"), _NAME),),
        "stacked",
    ),
    Panel(
        "Placements, by policy",
        "If you see a policy that you have not configured, requests name it in `routing.policy`.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_total", MODEL_ROUTER_FILTER, "model, policy"), "{{model}} {{policy}}"),),
    ),
    Panel(
        "Time to a worker's accept, by phase",
        "95th percentile. If `tokenize` or `place` grows, the router lacks CPU: start another one. If `accept` does, "
        "workers or the broker are slow to reply.",
        "s",
        (Query(quantile(0.95, f"{_P}_phase_seconds", ROUTER_FILTER, "phase"), "{{phase}}"),),
    ),
    Panel(
        "Placements refused by workers, by code",
        "The router tries the next worker. If `overloaded` is frequent, workers are busier than their events say.",
        "suffix: /s",
        (Query(rate(f"{_P}_placements_rejected_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests that the router ended with an error, by code",
        "If it is `overloaded`, add workers; if `no_worker`, see why none is ready. Others are clients' mistakes.",
        "reqps",
        (Query(rate(f"{_P}_request_errors_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests in parts, by outcome",
        "Requests too large for one message of the broker. If `expired` or `failed` grows, clients or their network "
        "are slow, or a client does not follow the wire.",
        "reqps",
        (Query(rate(f"{_P}_uploads_total", ROUTER_FILTER, "outcome"), "{{outcome}}"),),
        "stacked",
    ),
    Panel(
        "Memory for requests in parts",
        "Parts of requests that are not complete. If it stays high, lower --tenant-upload-bytes.",
        "bytes",
        (Query(sum_of(f"{_P}_upload_bytes", ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Embedding requests, by result",
        "If anything but `ok` grows, look for `call_finished` with `op: embed` in the router's log.",
        "reqps",
        (Query(rate(f"{_P}_embeddings_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
    Panel(
        "Requests to tokenize or detokenize, by result",
        "If anything but `ok` grows, look for `call_finished` with that `op` in the router's log.",
        "reqps",
        (Query(rate(f"{_P}_tokenizations_total", ROUTER_FILTER, "op, code"), "{{op}}: {{code}}"),),
        "stacked",
    ),
    Panel(
        "Hints about sessions' caches",
        "`keep`: keep a session's prefix; `end`: the session has ended. Hints in requests are not counted. If there "
        "are many more than requests, a tenant needs a limit: --tenant-limit-for.",
        "reqps",
        (Query(rate(f"{_P}_cache_hints_total", ROUTER_FILTER, "kind"), "{{kind}}"),),
        "stacked",
    ),
    Panel(
        "Characters of conversations, by whether their token ids were cached",
        "If few are cached despite long conversations, raise --tokenization-cache-mib.",
        "short",
        (Query(rate(f"{_P}_tokenized_chars_total", ROUTER_FILTER, "source"), "{{source}}"),),
        "stacked",
    ),
    Panel(
        "Memory for token ids of conversations",
        "If it stays at --tokenization-cache-mib, the tenant that uses the most loses its oldest texts.",
        "bytes",
        (Query(sum_of(f"{_P}_tokenization_cache_bytes", ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Requests to rank documents, by result",
        "If anything but `ok` grows, look for `call_finished` with `op: rerank` in the router's log.",
        "reqps",
        (Query(rate(f"{_P}_reranks_total", ROUTER_FILTER, "code"), "{{code}}"),),
        "stacked",
    ),
)

_QUEUE = (
    Panel(
        "Requests held for a model that is not loaded",
        "A worker is loading it, or there is no worker and --hold-s lets requests wait. If the number stays, the "
        "worker's log says why (`model_not_loaded`), or no worker has been started.",
        "short",
        (Query(sum_of(f"{_P}_requests_held", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),),
    ),
    Panel(
        "Waiting requests, and their limit",
        "By model. If it nears the limit, add workers: beyond it the tenant with the most waiting is refused.",
        "short",
        (
            Query(sum_of(f"{_P}_queue_depth", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),
            Query(max_of(f"{_P}_queue_limit", ROUTER_FILTER, "instance"), f"{_NAME} limit"),
        ),
    ),
    Panel(
        "Time that requests wait",
        "Median and 95th percentile of the requests that had to wait. If clients give up earlier than that, lower "
        "--max-queued-requests or add workers.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p50"),
            Query(quantile(0.95, f"{_P}_queue_wait_seconds", MODEL_ROUTER_FILTER, "model"), "{{model}} p95"),
        ),
    ),
    Panel(
        "Requests in flight",
        "Requests that wait in a router or that it has placed. If the number only grows while workers are idle, the "
        "router misses the events that end them: see the gaps in event logs.",
        "short",
        (Query(sum_of(f"{_P}_requests_in_flight", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

_USAGE = (
    Panel(
        "Requests that have ended, by tenant",
        "Where routers keep usage. If a tenant has far more than the others, it may need a limit; `tokenbus usage` "
        "tells its keys apart.",
        "reqps",
        (Query(rate(f"{_P}_tenant_requests_total", ROUTER_FILTER, "tenant"), "{{tenant}}"),),
        "stacked",
    ),
    Panel(
        "Tokens used, by tenant and kind",
        "Those of prompts that were computed or cached, and of completions. If hardly any are `cached`, a tenant's "
        "prompts have no common beginning.",
        "suffix: tokens/s",
        (Query(rate(f"{_P}_tenant_tokens_total", ROUTER_FILTER, "tenant, kind"), "{{tenant}} {{kind}}"),),
        "stacked",
    ),
    Panel(
        "Age of usage that is not saved",
        "If it exceeds a few seconds, the bucket is out of reach or full: the counts are in the router's memory only.",
        "s",
        (Query(max_of(f"{_P}_usage_unsaved_seconds", ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Sums of usage in memory, and failures to save them",
        "If the sums near 65,536, what is new is counted as `(other)`.",
        "short",
        (
            Query(sum_of(f"{_P}_usage_counters", ROUTER_FILTER, "instance"), _NAME),
            Query(increase(f"{_P}_usage_failures_total", ROUTER_FILTER, "instance"), f"{_NAME} failures"),
        ),
    ),
    Panel(
        "Records for the audit log",
        "Of processes with `--audit`. If any are `lost`, the broker's JetStream was out of reach until 16,384 of them "
        "waited in a process, or until it stopped.",
        "suffix: /s",
        (
            Query(rate(f"{_P}_audit_records_total", ROUTER_FILTER, "outcome"), "routers: {{outcome}}"),
            Query(rate("tokenbus_worker_audit_records_total", "", "outcome"), "workers: {{outcome}}"),
            Query(rate("tokenbus_auth_audit_records_total", "", "outcome"), "auth: {{outcome}}"),
            Query(rate("tokenbus_gateway_audit_records_total", "", "outcome"), "gateways: {{outcome}}"),
        ),
    ),
)

_FLEET = (
    Panel(
        "Workers known to each router, by state",
        "If routers disagree for more than a few seconds, one of them does not receive all events.",
        "short",
        (Query(sum_of(f"{_P}_workers", MODEL_ROUTER_FILTER, "instance, state"), f"{_NAME} {{{{state}}}}"),),
    ),
    Panel(
        "Workers, by whether their cached blocks are known",
        "If workers stay `behind`, they send no snapshots. If they are `silent`, they compute prompts and never "
        "publish their blocks: they run another version.",
        "short",
        (Query(sum_of(f"{_P}_event_logs", MODEL_ROUTER_FILTER, "instance, events"), f"{_NAME} {{{{events}}}}"),),
        "stacked",
    ),
    Panel(
        "Share of prompt tokens expected to be cached, and found cached",
        "If fewer were cached than expected, blocks are evicted before the request arrives, or events are lost. If "
        "more were, several routers place similar prompts at the same time.",
        "percentunit",
        (
            Query(
                f"{rate(f'{_P}_predicted_overlap_tokens_total', MODEL_ROUTER_FILTER, 'model')}"
                f" / {rate(f'{_P}_prompt_tokens_total', MODEL_ROUTER_FILTER, 'model')}",
                "{{model}} expected",
            ),
            Query(
                f"{rate(f'{_P}_predicted_fetch_tokens_total', MODEL_ROUTER_FILTER, 'model')}"
                f" / {rate(f'{_P}_prompt_tokens_total', MODEL_ROUTER_FILTER, 'model')}",
                "{{model}} to be fetched",
            ),
            Query(
                f"{rate('tokenbus_worker_prefix_cache_hits_tokens_total', MODEL_FILTER, 'model')}"
                f" / {rate('tokenbus_worker_prefix_cache_queries_tokens_total', MODEL_FILTER, 'model')}",
                "{{model}} cached",
            ),
        ),
    ),
    Panel(
        "Prompts that another worker computes",
        "Placements per second whose prompt goes to a worker of the role `prefill`. If there are none although there "
        "are such workers, these are busy, prompts are short, or blocks can't move: `kv_identity` in the cards.",
        "ops",
        (Query(rate(f"{_P}_remote_prefills_total", MODEL_ROUTER_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Requests for workers of other sites",
        "Placements per second at a worker whose `--site` is not the router's. If there are many, the workers "
        "here are busier than the way to another site is long (`--site-cost-s`), or there are none for the model.",
        "ops",
        (Query(rate(f"{_P}_distant_placements_total", MODEL_ROUTER_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "How fast KV blocks move between workers",
        "Measured by fetches, 60 MB/s before the first. If it falls so low that computing is about as fast, routers "
        "let workers compute instead, and try one fetch per minute.",
        "MBs",
        (
            Query(
                sum_of(f"{_P}_transfer_megabytes_per_second", MODEL_ROUTER_FILTER, "instance, model"),
                f"{_NAME} {{{{model}}}}",
            ),
        ),
    ),
    Panel(
        "Blocks in the prefix index",
        "Limited by the capacity in the workers' cards. If it grows beyond that, report a bug.",
        "short",
        (Query(sum_of(f"{_P}_index_blocks", MODEL_ROUTER_FILTER, "instance, model"), f"{_NAME} {{{{model}}}}"),),
    ),
    Panel(
        "Estimated memory of the prefix index",
        "Follows from the number of blocks that workers hold. If it nears the container's memory limit, raise that "
        "limit.",
        "bytes",
        (Query(sum_of(f"{_P}_index_bytes", MODEL_ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Event log entries missed, and gaps closed by snapshots",
        "If entries keep being missed, check the broker for slow consumers, and the router's CPU.",
        "short",
        (
            Query(increase(f"{_P}_events_lost_total", ROUTER_FILTER, "instance"), f"{_NAME} missed"),
            Query(increase(f"{_P}_snapshots_total", ROUTER_FILTER, "instance"), f"{_NAME} closed"),
        ),
    ),
    Panel(
        "Beats of worker processes",
        "Signs of life of worker processes, each for all its idle workers. If there are none although workers are "
        "idle, the broker's permissions forbid them.",
        "short",
        (Query(rate(f"{_P}_beats_total", ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Cancels and resyncs passed on",
        "What clients have sent about streams that workers hold. If there are many resyncs, chunks are lost: look for "
        "slow consumers at the broker, and for links between brokers that fail.",
        "short",
        (Query(rate(f"{_P}_passed_on_total", ROUTER_FILTER, "instance, op"), f"{_NAME} {{{{op}}}}"),),
    ),
    Panel(
        "Requests whose worker was lost or left",
        "If `stale` grows, live workers are mistaken for lost: look for a slow network or frozen machines. If "
        "`forgotten` does, prompts take more memory than routers have: add routers.",
        "short",
        (
            Query(
                increase(f"{_P}_requests_continued_total", MODEL_ROUTER_FILTER, "instance, model"),
                "{{model}} continued",
            ),
            Query(increase(f"{_P}_stale_attempts_total", ROUTER_FILTER, "instance"), f"{_NAME} stale"),
            Query(increase(f"{_P}_prompts_forgotten_total", ROUTER_FILTER, "instance"), f"{_NAME} forgotten"),
        ),
    ),
    Panel(
        "Requests taken over from other routers",
        "Requests of a router that has stopped or died. If this keeps happening, routers restart, or lose their "
        "connection to the broker.",
        "short",
        (
            Query(
                increase(f"{_P}_requests_adopted_total", MODEL_ROUTER_FILTER, "instance, model"),
                f"{_NAME} {{{{model}}}}",
            ),
        ),
    ),
    Panel(
        "Viewers of the fleet",
        "Consoles and `tokenbus top` to which the router sends digests; without any, none are made. If there are 64, "
        "the most there may be, look for clients that ask and never leave.",
        "short",
        (Query(sum_of(f"{_P}_fleet_viewers", ROUTER_FILTER, "instance"), _NAME),),
    ),
    Panel(
        "Messages with a forbidden reply subject",
        "The reply subject is not an inbox of the client's tenant. If there are any, a client is broken or malicious: "
        "see `reply_subject_refused` in the log.",
        "suffix: /s",
        (Query(rate(f"{_P}_messages_dropped_total", ROUTER_FILTER, "instance"), _NAME),),
    ),
)

_LIMITS = (
    Panel(
        "Requests beyond a limit, by unit",
        "They are refused as `overloaded`. If there are many, a key or tenant asks for more than it may have, or its "
        "client does not heed `retry_after_ms`.",
        "reqps",
        (Query(rate(f"{_P}_throttled_total", ROUTER_FILTER, "unit"), "{{unit}}"),),
        "stacked",
    ),
    Panel(
        "Leases and conflicts",
        "Parts of limits that routers take from the bucket that they share. If conflicts near the leases, many routers "
        "share one busy limit: fewer routers would do.",
        "suffix: /s",
        (
            Query(rate(f"{_P}_quota_leases_total", ROUTER_FILTER, "unit"), "{{unit}}"),
            Query(rate(f"{_P}_quota_conflicts_total", ROUTER_FILTER), "conflicts"),
        ),
    ),
    Panel(
        "Limits that hold across routers, and fallbacks to shares",
        "If it is 0 where clients have limits, the bucket is out of reach: each router takes an even share.",
        "short",
        (
            Query(max_of(f"{_P}_quota_leasing", ROUTER_FILTER, "instance"), _NAME),
            Query(increase(f"{_P}_quota_fallbacks_total", ROUTER_FILTER, "instance"), f"{_NAME} fallbacks"),
        ),
    ),
)

DASHBOARD = Dashboard(
    "router",
    "Tokenbus router",
    "Placements, waiting requests, what routers know of the workers' caches, limits, and usage.",
    (MODEL, ROUTER),
    (
        Row("Placement", _PLACEMENT),
        Row("Queue", _QUEUE),
        Row("Fleet", _FLEET),
        Row("Limits", _LIMITS),
        Row("Usage", _USAGE),
    ),
)
