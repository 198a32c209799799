"""The ways in which an engine can fail."""


class InsufficientMemoryError(RuntimeError):
    """The device had too little memory; its KV memory is as it was before."""


class DeviceError(RuntimeError):
    """The device failed, and nothing in its memory can be trusted any more."""


_MAX_MESSAGE_CHARS = 8_000


class ModelError(RuntimeError):
    """The model can't be loaded, and trying again won't help. The message says what to do. It is cut where it is too
    long for a reply: it names what files contain."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}...")


class ModelTooLargeError(ModelError):
    """There is too little memory for the model with these settings. The message says what would fit."""
