"""Every fixed bound of the wire, in one place. What an operator may change is a setting and lives elsewhere."""

MAX_ID_BYTES = 128
MAX_NAME_BYTES = 128
"""Model, tenant, worker and router names: together they must stay far below the broker's limit for a subject."""
MAX_EMBED_INPUTS = 2_048
"""Texts of one embed request."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1_024
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4_096
MAX_SALT_BYTES = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 4_096
MAX_LOGIT_BIAS = 1e6
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_NESTING = 64
"""Depth to which free-form parts of a request (template arguments, tools, schemas) may nest."""
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**32 - 1

PART_BYTES = 256 * 1024
"""Size of one part of a tokenizer bundle or snapshot; well below the smallest `max_payload` in use."""
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
RENDER_CPU_S = 2.0
"""What a chat template may compute for one conversation, or while it is compiled."""
RENDER_WALL_S = 10.0
"""And how long that may take where the machine is busy with other things."""
RENDER_BYTES = 1 << 30
"""Address space of the process that renders."""
RENDERED_GROWTH = 4
"""Characters that a chat template may make of each byte of a conversation, and as many more as it may have itself."""
MAX_CONTROL_LINE_BYTES = 4_000
"""Subject and reply subject of one message, with a little around them: the broker ends a connection at 4,096."""
MAX_INBOX_BYTES = 2_048
"""A reply subject; beside a chunk's own reply subject it must fit `MAX_CONTROL_LINE_BYTES`."""
MESSAGE_RESERVE_BYTES = 4 * 1024
"""What a message may need beyond its body: subject, reply subject and headers."""

TICK_S = 0.25
"""How often every process looks at its clock."""
STREAM_KEEPALIVE_S = 5.0
"""A stream with nothing to say sends an empty chunk this often."""
HEARTBEAT_S = 0.25
"""A worker's event log carries at least one message in this time."""
WORKER_SUSPECT_AFTER_S = 1.0
"""Silence after which a worker gets no new work."""
WORKER_LOST_AFTER_S = 2.0
"""Silence after which a worker counts as lost."""
DISCOVERY_WAIT_S = 0.5
"""How long a router collects cards before it takes requests."""
ACCEPT_TIMEOUT_S = 0.5
"""How long a router waits for a worker to accept a request."""
ENDED_STREAM_TTL_S = 60.0
"""How long the end of a stream can be had again."""
MAX_ENDED_STREAM_BYTES = 64 * 1024 * 1024
REPLAY_INTERVAL_S = 0.2
"""A stream is published again at most this often."""
WITHDRAWN_TTL_S = 10.0
"""How long a drop or cancel of an unknown request is remembered."""
MAX_WITHDRAWN = 10_000
MODEL_NOT_FOUND_AFTER_S = 60.0
"""A router younger than this says `no_worker` of a model it has not seen."""
