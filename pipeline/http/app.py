"""The Quart application: routes, and what stands before and after them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from quart import Quart, Response
from werkzeug.exceptions import HTTPException

from pipeline.http.contract import Runner
from pipeline.http.dev import Dev, Live
from pipeline.http.errors import from_exception, from_http
from pipeline.http.gate import Gate
from pipeline.http.openai import Answers
from pipeline.http.operate import Operate
from pipeline.http.wire import Connections

View = Callable[..., Awaitable[Response]]
ANSWER_S = 600.0
"""Longest time a client may take to read an answer that is no stream."""


class App(Quart):
    """Quart, with what the server below it needs: the open connections and the live view's readers."""

    connections: Connections
    live: Live

    def log_exception(self, exception_info: Any) -> None:
        """Nothing: an exception's text could hold a prompt. Its class is posted as a fault."""


def create_app(runner: Runner) -> App:
    """The application in front of a runner. Raises OSError when the key file cannot be read."""
    app = App(__name__, static_folder=None)
    # Bodies are bounded by our own reader, which can say so; a stream has no time limit but the request's own.
    app.config.update(
        MAX_CONTENT_LENGTH=None, BODY_TIMEOUT=None, RESPONSE_TIMEOUT=ANSWER_S, PROVIDE_AUTOMATIC_OPTIONS=False,
        PROPAGATE_EXCEPTIONS=False,
    )  # fmt: skip
    app.url_map.merge_slashes = False
    app.connections, app.live = Connections(), Live(runner)
    gate = Gate(runner)
    app.before_request(gate.before)
    app.after_request(gate.after)
    app.register_error_handler(HTTPException, from_http)
    app.register_error_handler(Exception, from_exception)
    _routes(app, Answers(runner, app.connections), Operate(runner, gate), Dev(runner, app.live, app.connections))
    return app


def _routes(app: App, answers: Answers, operate: Operate, dev: Dev) -> None:
    """Every route there is. A GET takes HEAD as well."""
    posts: dict[str, View] = {"/v1/chat/completions": answers.chat, "/v1/completions": answers.completions}
    for path, post in posts.items():
        app.add_url_rule(path, path, post, methods=["POST"])
    gets: dict[str, View] = {
        "/v1/models": operate.models,
        "/v1/models/<path:name>": operate.model,
        "/health": operate.health,
        "/healthz": operate.health,
        "/v1/health": operate.health,
        "/readyz": operate.ready,
        "/": operate.root,
        "/dev": dev.page,
        "/dev/state": dev.state,
        "/dev/events": dev.events,
        "/dev/<name>": dev.file,
    }
    for path, get in gets.items():
        app.add_url_rule(path, path, get, methods=["GET"])
