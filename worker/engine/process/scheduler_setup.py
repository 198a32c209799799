"""Makes a replica's block pool and scheduler from its runner's capabilities and the settings."""

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.kv.retention import CacheHint, RetentionLimits
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.lanes import LaneShare
from tokenbus.worker.engine.scheduling.next_turns import TurnAhead
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

_CACHED_TOKENS = 256
"""Cached tokens that stay on the device where there is host memory for the rest. Held cells slow every step of every
stream: 4,096 tokens by 11 % and 16,384 by 35 %, with four streams of a 0.5B shape. They slow a prompt of 1,000 tokens
too: 1,000 by 13 % and 2,000 by 20 % (decision 0020). Copying 1,000 back takes a few milliseconds."""

_FEW_STATES = 128
_SHORT_TOKENS = 128
"""If fewer than `_FEW_STATES` states fit in host memory, prefixes shorter than this are not worth one: long
conversations would lose theirs (decision 0061)."""


def check(config: contract.EngineConfig, settings: SchedulerSettings) -> None:
    """Raises ModelError for settings that can't be met."""
    least = settings.min_prefix_tokens
    if not -1 <= least <= config.context_length:
        raise ModelError(
            f"--min-prefix-tokens must be -1, or 0 to the context length ({config.context_length}), got {least}"
        )


def make_pool(runner: Runner, settings: SchedulerSettings) -> BlockPool:
    """Returns an empty pool of the runner's KV memory, in which clients may keep as much as the settings allow."""
    config = runner.config
    return BlockPool(
        config.total_kv_blocks,
        config.kv_block_size,
        runner.num_lanes,
        fingerprint=config.fingerprint,
        can_share=config.prefix_cache,
        host_blocks=config.host_kv_blocks,
        writes_through=config.writes_through,
        checkpoint_sizes=config.checkpoint_sizes,
        limits=RetentionLimits(settings.kept_share, settings.max_kept_s),
        min_prefix_tokens=_min_prefix_tokens(config, settings),
    )


def _min_prefix_tokens(config: contract.EngineConfig, settings: SchedulerSettings) -> int:
    if settings.min_prefix_tokens >= 0:
        return settings.min_prefix_tokens
    sizes = config.checkpoint_sizes
    has_few = sizes is not None and sizes.budget_bytes < _FEW_STATES * sizes.state_bytes
    return min(_SHORT_TOKENS, config.context_length // 4) if has_few else 0


def make_scheduler(
    runner: Runner, pool: BlockPool, settings: SchedulerSettings, lane_share: LaneShare | None
) -> Scheduler:
    """Returns a scheduler over a pool of the runner's KV memory, of which it has only `lane_share` if given."""
    config = runner.config
    is_limited = config.host_kv_blocks and config.idle_blocks_cost
    return Scheduler(
        pool,
        config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        priority_s=settings.priority_s,
        max_cached_blocks=_CACHED_TOKENS // config.kv_block_size if is_limited else None,
        expected_tokens=settings.expected_tokens,
        lane_share=lane_share,
        row_tiles=runner.row_tiles,
    )


def make_turn(command: ipc.ExpectTurn) -> TurnAhead:
    """Returns a turn that is expected, with the sequence that computes it."""
    turn, sampling = command.turn, engine_request.Sampling(max_tokens=1)
    domain = Domain(turn.tenant, turn.cache_salt, turn.adapters)
    hint = CacheHint((turn.tenant, turn.session_id) if turn.session_id else None, turn.cache_ttl_s)
    token_ids = block_hash.unpack_token_ids(turn.token_ids)
    sequence = Sequence(
        command.seq_no, token_ids, sampling, (), adapters=turn.adapters, domain=domain, hint=hint, is_ahead=True
    )
    return TurnAhead(sequence.token_ids, domain, turn.num_known, sequence)
