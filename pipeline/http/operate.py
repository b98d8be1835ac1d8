"""Routes around the answers: which model is served, and how the server is."""

from __future__ import annotations

import time
from typing import Any

from quart import Response

from pipeline.http.contract import Runner
from pipeline.http.errors import as_json, refusal
from pipeline.http.gate import Gate

STATUS = {"starting": "loading", "ready": "ok"}
"""The engine's state as ``/health`` says it, where it is another word."""


class Operate:
    """Serves ``/v1/models``, ``/health`` and its names, ``/readyz`` and ``/``."""

    def __init__(self, runner: Runner, gate: Gate) -> None:
        self._runner, self._gate = runner, gate
        self._created = int(time.time())

    async def models(self) -> Response:
        """GET /v1/models: the served one; none while it is not known yet."""
        return as_json({"object": "list", "data": [self._model()] if self._runner.model else []})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{id}"""
        if not self._runner.model or name != self._runner.model:
            return refusal("model_not_found", param="model")
        return as_json(self._model())

    def _model(self) -> dict[str, Any]:
        window = self._runner.window
        # Agents decide by these when to compact: no figure is better than a wrong one.
        length = {"context_length": window, "max_model_len": window} if window else {}
        return {
            "id": self._runner.model, "object": "model", "created": self._created, "owned_by": "tandemllm", **length,
        }  # fmt: skip

    async def health(self) -> Response:
        """GET /health: the status for anyone, figures with the key or from the box."""
        status = self._status()
        figures = self._figures() if self._gate.sees_figures() else {}
        return as_json({"status": status, **figures}, 200 if status == "ok" else 503)

    async def ready(self) -> Response:
        """GET /readyz: whether a request would be served now."""
        status = self._status()
        return as_json({"status": status}, 200 if status == "ok" else 503)

    async def root(self) -> Response:
        """GET /: the Dev view from the box; a probe that would take any page for its own server gets none."""
        if not self._gate.on_box():
            return refusal("not_found")
        return Response("", 302, {"Location": "/dev"})

    def _status(self) -> str:
        state = self._runner.engine_state
        return "draining" if self._runner.draining else STATUS.get(state, state)

    def _figures(self) -> dict[str, Any]:
        runner, settings = self._runner, self._runner.settings
        view = runner.view()
        return {
            "model": runner.model,
            "uptime_s": view["uptime_s"],
            "engine_busy": view["counts"]["running"] > 0,
            "inflight": view["counts"],
            "max_queue": settings.max_queue,
            "queue_timeout_s": settings.queue_timeout,
            "request_timeout_s": settings.request_timeout,
            "max_len": runner.window,
            "default_max_tokens": settings.default_max_tokens,
            "engine": view["engine"],
            "parallel": view["parallel"],
            "cache": view["cache"],
            "memory": view["memory"],
            "lane": view["lane"],
            "lag_ms": view["lag_ms"],
        }
