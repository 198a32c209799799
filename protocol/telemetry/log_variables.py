"""The environment variables of logs, which are read without what writes logs."""

LEVEL_VARIABLE = "TOKENBUS_LOG"
FORMAT_VARIABLE = "TOKENBUS_LOG_FORMAT"
