"""The client for requests of any size that docs/wire.md shows."""

import json
import re
from pathlib import Path
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from tests.support.raw_client import Answer

_PAGE = Path(__file__).parents[2] / "docs/wire.md"


async def submit(connection: Nats, subject: str, request: dict[str, Any]) -> Answer:
    """Sends a request the way the page does, and collects its chunks."""
    (code,) = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    defined: dict[str, Any] = {"json": json}
    exec(code, defined)
    answer, inbox = Answer(), connection.new_inbox()

    async def take(message: Msg) -> None:
        answer.take(message, msgpack=False)

    await connection.subscribe(inbox, cb=take)
    await defined["submit"](connection, subject, request, inbox)
    return answer
