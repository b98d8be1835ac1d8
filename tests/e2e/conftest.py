"""The plain servers of the tests that only talk to one: they load once for all files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.server import Server

OPENING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if leave is defined %}"
    "{% elif enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
"""Opens the block itself, unless thinking is turned off: then it closes it too. ``leave``: neither."""


@pytest.fixture(scope="session")
def served() -> Iterator[Server]:
    with Server("--max-queue", "16") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def client(served: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


@pytest.fixture(scope="session")
def opening_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(OPENING)
    return template


@pytest.fixture(scope="session")
def thinking(opening_template: Path) -> Iterator[Server]:
    """The embedded model behind a template that opens the block."""
    with Server("--chat-template", str(opening_template)) as server:
        yield server.ready()
