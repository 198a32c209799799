"""Who can be asked for a model now, or why nobody can."""

from tokenbus.protocol.wire import errors
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker


def workers_of(fleet: Fleet, model: str, now: float) -> list[Worker]:
    """Some workers of the model, such as can work now if any can. Raises RequestError where there is none."""
    workers = fleet.sample_workers(model, now)
    if workers:
        return workers
    if fleet.is_unknown(model, now):
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {model!r}")
    raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {model!r} now")
