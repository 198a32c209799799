"""What a worker does: its requests, its steps, its memory and its cache."""

from deploy.dashboards.promql import WORKER_FILTER, increase, max_of, quantile, rate, sum_of
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_P = "tokenbus_worker"
_NAME = "{{worker_id}}"


def _rate(metric: str, by: str = "worker_id") -> str:
    return rate(f"{_P}_{metric}_total", WORKER_FILTER, by)


_REQUESTS = (
    Panel(
        "Requests that run, and how many can",
        "If they stay at the limit with others waiting, add workers; if they stay below it with others waiting, KV "
        "memory is what is missing.",
        "short",
        (
            Query(sum_of(f"{_P}_requests_running", WORKER_FILTER, "worker_id"), f"{_NAME} runs"),
            Query(sum_of(f"{_P}_max_num_seqs", WORKER_FILTER, "worker_id"), f"{_NAME} can run"),
        ),
    ),
    Panel(
        "Requests that wait for a lane",
        "If a worker always has some, it is full: the routers' queue grows next.",
        "short",
        (Query(sum_of(f"{_P}_requests_waiting", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Prompt tokens that are still to be computed",
        "If it grows on one worker only, its requests find their prefixes there and nowhere else: see the routers' "
        "policy; if on all, prompts come faster than they are computed.",
        "suffix: tok",
        (Query(sum_of(f"{_P}_queued_prefill_tokens", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Requests that end, by how",
        "If `error` grows, `request_finished` in this worker's log has the codes.",
        "reqps",
        (Query(_rate("requests", "worker_id, finish_reason"), f"{_NAME} {{{{finish_reason}}}}"),),
        "stacked",
    ),
    Panel(
        "Requests that are refused, by code",
        "Routers go elsewhere with what may be retried. If `overloaded` goes on, routers believe in room that there is "
        "not: see the gaps in their events.",
        "reqps",
        (Query(_rate("refusals", "worker_id, code"), f"{_NAME} {{{{code}}}}"),),
        "stacked",
    ),
    Panel(
        "Texts that become embeddings",
        "If it stays 0 though clients ask, the router dashboard shows how those requests end.",
        "suffix: /s",
        (Query(_rate("embeddings"), _NAME),),
    ),
)

_STEPS = (
    Panel(
        "How long steps take",
        "Median and the slowest in twenty. If steps with prompts exceed --step-target-ms by much, streams stutter; if "
        "steps of decodes grow, so do the contexts, or the cores are shared with somebody.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_step_seconds", WORKER_FILTER, "kind"), "{{kind}} p50"),
            Query(quantile(0.95, f"{_P}_step_seconds", WORKER_FILTER, "kind"), "{{kind}} p95"),
        ),
    ),
    Panel(
        "Tokens that steps compute, and tokens that are sampled",
        "If much is computed and little sampled, the device is busy with prompts: more cache hits help most.",
        "suffix: tok/s",
        (
            Query(_rate("computed_tokens"), f"{_NAME} computed"),
            Query(_rate("generation_tokens"), f"{_NAME} sampled"),
        ),
    ),
    Panel(
        "Time that the device computes, and stands idle with work to do",
        "Of each second. If idle time is more than a few percent, the worker's process lacks CPU: give it more, or "
        "fewer --threads to the engine.",
        "percentunit",
        (
            Query(_rate("inference_seconds"), f"{_NAME} computes"),
            Query(_rate("device_gap_seconds"), f"{_NAME} idle"),
        ),
    ),
    Panel(
        "Age of the step in progress",
        "If it climbs without falling, the step hangs: after --step-timeout-s the engine is ended and its streams go "
        "on in a new one.",
        "s",
        (Query(max_of(f"{_P}_step_age_seconds", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Engines that were restarted",
        "If it grows, `engine_died` in the worker's log says why: a request that ends engines, a device that hangs, or "
        "too little memory.",
        "short",
        (Query(increase(f"{_P}_engine_restarts_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Workers that take requests",
        "1 or 0. If a worker stays at 0, its /readyz and its log say why.",
        "short",
        (Query(max_of(f"{_P}_ready", WORKER_FILTER, "worker_id"), _NAME),),
    ),
)

_MEMORY = (
    Panel(
        "KV blocks by what they hold",
        "Used by running requests, cached for the next ones, or free. If nearly all are used, requests wait: raise "
        "--kv-tokens or halve the size of a token with --cache-type-k q8_0.",
        "short",
        (Query(sum_of(f"{_P}_kv_blocks", WORKER_FILTER, "worker_id, state"), f"{_NAME} {{{{state}}}}"),),
        "stacked",
    ),
    Panel(
        "Device memory for keys and values",
        "0 where it is not known. If it differs between workers of one model, so do their settings.",
        "bytes",
        (Query(sum_of(f"{_P}_kv_bytes", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Prompt tokens that were cached",
        "Their share. If one worker has much less than the others, it has just started, or routers do not hear its "
        "events.",
        "percentunit",
        (
            Query(
                f"{_rate('prefix_cache_hits_tokens')} / {_rate('prefix_cache_queries_tokens')}",
                _NAME,
            ),
        ),
    ),
    Panel(
        "Cached blocks that had to leave the device",
        "If many leave and hits fall, the working set is larger than the memory: raise --host-cache-mib.",
        "suffix: blocks/s",
        (Query(_rate("evicted_blocks"), _NAME),),
    ),
    Panel(
        "Sequences that lost their place",
        "Preempted for want of room, to go on later. If it is more than now and then, lower --kv-overcommit.",
        "short",
        (Query(increase(f"{_P}_preemptions_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
)

DASHBOARD = Dashboard(
    "worker",
    "Tokenbus worker",
    "What workers do: their requests, steps, memory and cache.",
    (MODEL, WORKER),
    (Row("Requests", _REQUESTS), Row("Steps", _STEPS), Row("Memory and cache", _MEMORY)),
)
