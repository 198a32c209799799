"""The async Python client of a Tokenbus system: `async for chunk in client.generate("demo", prompt="...")`."""

from client.client import Client
from client.stream import Stream

__all__ = ["Client", "Stream"]
