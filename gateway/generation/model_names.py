"""Checks the names of models in requests."""

from tokenbus.protocol.wire import errors, subjects


def checked_model(model: str | None, default: str) -> str:
    """Returns the model's name, or the default if there is one and the request names none.

    Raises RequestError if there is no name, or an invalid one."""
    name = default or None if model is None else model
    if name is None:
        raise errors.invalid_field("model", "is required")
    try:
        subjects.encode_name(name)
    except ValueError as error:
        raise errors.invalid_field("model", str(error)) from error
    return name
