"""What every request passes before its route, and every answer after it: the fence, the keys, CORS, HEAD."""

from __future__ import annotations

from quart import Response, g, request

from pipeline.http.auth import Attempts, Keys, fence_passes, from_box, key_of, origin_listed, own_names, read_keys
from pipeline.http.contract import Runner
from pipeline.http.errors import drop_body, refusal

OPEN = ("/health", "/healthz", "/v1/health", "/readyz")
"""Routes whose status is open to anyone; their figures are not."""
PREFLIGHT_S = 600
WRONG = "invalid_api_key"
KEYLESS = (
    "This server has no API key, so the Dev view opens on its own machine only. Start it with --api-key to open it."
)


class Gate:
    """The server's keys and fence, asked once a request."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._keys, self._attempts = Keys(read_keys(runner.settings)), Attempts()
        self._names = own_names(runner.settings)

    async def before(self) -> Response | None:
        """Refuse, answer a preflight, or let pass."""
        settings = self._runner.settings
        if not fence_passes(request.headers.get, settings, self._names):
            await drop_body()
            return refusal("origin_not_allowed")
        if request.method == "OPTIONS" and self._allowed_origin():
            return self._preflight()
        code = self._wrong_key(request.path)
        if code:
            await drop_body()
            challenge = 'Basic realm="TandemLLM: the API key is the password"' if _is_dev(request.path) else "Bearer"
            return refusal(
                code, "" if self._keys else KEYLESS, headers={"WWW-Authenticate": challenge} if code == WRONG else None
            )
        return None

    def sees_figures(self) -> bool:
        """Whether this request comes with a key of ours or from the box."""
        return self.on_box() or (bool(self._keys) and not self._judge())

    @staticmethod
    def on_box() -> bool:
        """Whether this request comes from the box itself."""
        return from_box(address(), request.headers.get)

    def _wrong_key(self, path: str) -> str:
        if path in OPEN:
            return ""
        if _is_dev(path):
            return "" if self.on_box() else self._judge() if self._keys else WRONG
        return self._judge() if path.startswith("/v1/") else ""

    def _judge(self) -> str:
        key = key_of(request.headers.get("Authorization", ""), basic=_is_dev(request.path))
        return self._attempts.judge(self._keys, address(), key, self._runner.now())

    # -- CORS --------------------------------------------------------------------------------------------------------

    def _allowed_origin(self) -> str:
        """The request's origin when ``--cors-origin`` names it; "" otherwise, and without the flag always."""
        origin = request.headers.get("Origin", "")
        return origin if origin and origin_listed(origin, self._runner.settings) else ""

    @staticmethod
    def _preflight() -> Response:
        wanted = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return Response("", 204, headers)

    async def after(self, response: Response) -> Response:
        """Cross-origin headers for a listed origin; a HEAD keeps the headers of its GET and loses the body.

        A connection with an unread rest of a body is of no use to its client: it is told not to use it again.
        """
        if g.get("unread", False) and request.http_version.startswith("1"):
            response.headers["Connection"] = "close"
        if origin := self._allowed_origin():
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
            response.headers.add("Vary", "Origin")
        if request.method == "HEAD":
            length = response.headers.get("Content-Length")
            response.set_data(b"")
            if length is not None:
                response.headers["Content-Length"] = length
        return response


def address() -> str:
    """The peer's address. What a forwarding header says is nobody's word."""
    client = request.scope.get("client")
    return str(client[0]) if client else ""


def _is_dev(path: str) -> bool:
    return path == "/dev" or path.startswith("/dev/")
