"""The ways in which an engine can fail."""


class InsufficientMemoryError(RuntimeError):
    """The device had too little memory; its KV memory is as it was before."""


class DeviceError(RuntimeError):
    """The device failed, and nothing in its memory can be trusted any more."""


class ModelError(RuntimeError):
    """The model can't be loaded, and trying again won't help. The message says what to do."""


class ModelTooLargeError(ModelError):
    """There is too little memory for the model with these settings. The message says what would fit."""
