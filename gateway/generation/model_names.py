"""Checks the names of models in requests; pure."""

from tokenbus.protocol.wire import errors, subjects


def checked_model(model: str | None) -> str:
    """Returns the name of the model. Raises RequestError if it is missing, or none that a model can have."""
    if model is None:
        raise errors.invalid_field("model", "is required")
    try:
        subjects.encode_name(model)
    except ValueError as error:
        raise errors.invalid_field("model", str(error)) from error
    return model
