"""One plain server for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.server import Server


@pytest.fixture(scope="session")
def served() -> Iterator[Server]:
    with Server("--max-queue", "16") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def client(served: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai
