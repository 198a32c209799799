"""A fleet with prompts apart from streams: whatever dies, each request has one terminal and the tokens it would have."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.exact_client import ExactClient
from tests.support.system import System
