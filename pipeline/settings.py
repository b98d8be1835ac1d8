"""Every flag, once: its name, default, unit and feature row. Also ``TANDEM_<NAME>`` and a key of the settings file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the server was told. Written into a trace's header, without the keys."""

    model: str = ""
    chat_template: str = ""
    device: str = "auto"
    threads: int = 0
    speculate: str = "on"
    draft_shape: str = "learned"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: str = ""
    allow_no_key: bool = False
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    data_dir: str = ""
    trace: str = ""
    trace_level: str = "facts"
    strict_model: bool = False
    default_max_tokens: int = 32_768
    mid_system: str = "refuse"
    max_body_mb: int = 512
    bodies_mb: int = 1_024
    reasoning_format: str = "tags"
    reasoning_key: str = "reasoning_content"
    thinking: str = "auto"
    effort: str = "max"
    think_budget: int = 0
    effort_caps: str = ""
    budget_zero: str = "no-cap"
    answer_reserve: str = "auto"
    think_stall: str = "on"
    json_depth: int = 64
    usage_default: bool = True
    finish_words: str = "chapter"
    prefix_chunk: int = 1_024
    safe_rows: int = 0
    prefill_heartbeat_s: float = 5.0
    disk_cache_gb: float = 0.0
    max_queue: int = 8
    queue_timeout: float = 240.0
    request_timeout: float = 3_600.0
    max_len: int = 0
    drain_timeout: float = 60.0
    max_live: int = 64
    parallel: int = 1
    side_max_len: int = 65_536
    side_margin: int = -1
    side_slot0_wait: float = 3.0
    resident_guest_max: int = 2_048
    side_guests: str = "on"
    parallel_cut: str = "share"
    side_graphs: str = "on"
    parallel_floor_gb: float = -1.0
    side_lane: str = "on"
    side_lane_prompt: int = 2_048
    side_lane_tokens: int = 64
    side_lane_side_tokens: int = 192
    keepalive_chunk_s: float = 60.0
    early_headers_s: float = 200.0
    mem_ceiling_gib: float = 0.0
    mem_peak_gib: float = 0.0
    reserve_slack_gib: float = -1.0
    conductor: str = "on"
    client_reasoning: str = "*=reasoning_content,hermes=tags"
    progress_lines: str = "none"
    # The rest has no public flag: what tests and recordings turn to reach a rare row in seconds.
    line_every_s: float = 10.0
    quiet_s: float = 30.0
    give_up_s: float = 60.0
    retry_failed_s: float = 30.0
    park_gb: float = -1.0
    trace_rotate_mb: float = 64.0
    trace_note: str = ""
    script: str = ""
    failpoints: str = ""

    def public(self) -> dict[str, Any]:
        """The settings as plain values, without keys or paths: for the trace's header and the Dev view."""
        hidden = ("api_key", "api_key_file", "trace", "script", "model", "chat_template", "data_dir")
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in plain.items() if name not in hidden}


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings the core decides by: all act on facts. Times in seconds, sizes in bytes, lengths in tokens."""

    slots: int = 1
    side_max_len: int = 65_536
    side_margin: int = -1
    """Rows beside a planned request's answer in a side slot; -1: 8,192. Others need none."""
    side_slot0_wait: float = 3.0
    resident_guest_max: int = 2_048
    side_guests: bool = True
    prefix_chunk: int = 1_024
    parallel_floor: int = -1
    """-1: the smaller of 15 GB and 12 % of memory."""
    side_lane: str = "on"
    side_lane_prompt: int = 2_048
    side_lane_tokens: int = 64
    side_lane_side_tokens: int = 192
    keepalive_s: float = 60.0
    early_headers_s: float = 200.0
    max_queue: int = 8
    max_live: int = 64
    bodies: int = 1_024 << 20
    queue_timeout: float = 240.0
    request_timeout: float = 3_600.0
    drain_timeout: float = 60.0
    default_max_tokens: int = 32_768
    prefill_heartbeat_s: float = 5.0
    line_every_s: float = 10.0
    quiet_s: float = 30.0
    give_up_s: float = 60.0
    retry_failed_s: float = 30.0


def policy(settings: Settings) -> Policy:
    """The part of the settings the core decides by."""
    return Policy(
        slots=settings.parallel,
        side_max_len=settings.side_max_len,
        side_margin=settings.side_margin,
        side_slot0_wait=settings.side_slot0_wait,
        resident_guest_max=settings.resident_guest_max,
        side_guests=settings.side_guests == "on",
        prefix_chunk=settings.prefix_chunk,
        parallel_floor=int(settings.parallel_floor_gb * 1e9) if settings.parallel_floor_gb >= 0 else -1,
        side_lane=settings.side_lane,
        side_lane_prompt=settings.side_lane_prompt,
        side_lane_tokens=settings.side_lane_tokens,
        side_lane_side_tokens=settings.side_lane_side_tokens,
        keepalive_s=settings.keepalive_chunk_s,
        early_headers_s=settings.early_headers_s,
        max_queue=settings.max_queue,
        max_live=settings.max_live,
        bodies=settings.bodies_mb << 20,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.request_timeout,
        drain_timeout=settings.drain_timeout,
        default_max_tokens=settings.default_max_tokens,
        prefill_heartbeat_s=settings.prefill_heartbeat_s,
        line_every_s=settings.line_every_s,
        quiet_s=settings.quiet_s,
        give_up_s=settings.give_up_s,
        retry_failed_s=settings.retry_failed_s,
    )


class Flag(msgspec.Struct, frozen=True):
    """One flag as the command line shows it."""

    name: str
    row: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: int | None = None
    hidden: bool = False


FLAGS: tuple[Flag, ...] = (
    Flag("model", "N1", "GGUF file or safetensors folder; default: the embedded model."),
    Flag("chat_template", "D1", "Jinja file to use in place of the checkpoint's own chat template."),
    Flag("device", "N3", "Where the model runs.", ("auto", "cpu", "cuda")),
    Flag("threads", "N5", "CPU threads of the engine; 0: all cores.", low=0),
    Flag("speculate", "F8", "Draft tokens and verify several in one step; the text is the same.", ("on", "off")),
    Flag("draft_shape", "K4", "How long drafts are: learned from what rounds cost, or fixed.", ("learned", "fixed")),
    Flag("host", "P4", "Address to bind."),
    Flag("port", "P4", "Port to bind; 0: any free one.", low=0, high=65_535),
    Flag("api_key", "P4", "Key a client must send; may be given several times."),
    Flag("api_key_file", "P4", "File with one key a line."),
    Flag("allow_no_key", "P4", "Bind beyond loopback without a key."),
    Flag("cors_origin", "A11", "Origin of a web page that may call the server; may be given several times."),
    Flag("allowed_host", "P5", "Host name the server answers to besides localhost; may be given several times."),
    Flag("data_dir", "P2", "Folder for what outlives the server; default: the user's data folder."),
    Flag("trace", "R5", "Folder to record traces in."),
    Flag("trace_level", "R5", "facts: counts, kinds, indices; full: bodies and tokens too.", ("facts", "full")),
    Flag("strict_model", "A9", "404 for a model name that is not the served one."),
    Flag("default_max_tokens", "A8", "Answer tokens when the client sets no limit.", low=1),
    Flag("mid_system", "A12", "System messages after the conversation began.", ("refuse", "fold")),
    Flag("max_body_mb", "A14", "Largest request body (MB).", low=1),
    Flag("bodies_mb", "A14", "Bodies in flight on the whole server (MB).", low=1),
    Flag("reasoning_format", "B1", "Where thinking goes.", ("tags", "reasoning_content", "both")),
    Flag("reasoning_key", "B4", "both: the thinking under the name reasoning too.", ("reasoning_content", "both")),
    Flag("thinking", "C0", "Whether to think when a request does not say.", ("auto", "on", "off")),
    Flag("effort", "C0", "The effort word when a request gives none."),
    Flag("think_budget", "C0", "Thinking tokens when a request gives no cap; 0: no cap.", low=0),
    Flag("effort_caps", "C1", "Caps of the effort words: WORD=N,WORD=N; 0: no cap."),
    Flag("budget_zero", "C7", "A budget of 0: no cap, or as its own server has it.", ("no-cap", "as-documented")),
    Flag("answer_reserve", "C4", "Tokens kept for the answer when thinking is bounded: auto, or a number."),
    Flag("think_stall", "C8", "Close thinking that only repeats itself.", ("on", "off")),
    Flag("json_depth", "E5", "Levels a json_object answer may nest.", low=1, high=1_000),
    Flag("usage_default", "F1", "Send usage on a stream's finish chunk when the client does not say."),
    Flag("finish_words", "F5", "openai: only OpenAI's finish words.", ("chapter", "openai")),
    Flag("prefix_chunk", "G1", "The prefill grid (rows).", low=1),
    Flag("safe_rows", "G1", "Rows a prefill step; 0: chosen so that a step takes at most 0.5 s.", low=0),
    Flag("prefill_heartbeat_s", "G3", "Age of a prefill before its lines start (s); 0: never.", low=0),
    Flag("disk_cache_gb", "G2", "Prompts' prefixes kept in files across restarts (GB); 0: none.", low=0),
    Flag("max_queue", "I1", "Requests that may wait for a slot.", low=0),
    Flag("queue_timeout", "I2", "Longest wait of a request without a stream (s).", low=0.001),
    Flag("request_timeout", "I3", "Longest run, and longest wait of a stream (s); 0: none.", low=0),
    Flag("max_len", "I4", "Window (rows); 0: the checkpoint's, cut to memory.", low=0),
    Flag("drain_timeout", "I5", "Time for those inside when the server is stopped (s).", low=0),
    Flag("max_live", "I9", "Requests before the queue.", low=1),
    Flag("parallel", "M1", "Requests that run at once: slot 0 and so many side slots less one.", low=1, high=64),
    Flag("side_max_len", "M1", "Window of a side slot (rows), at most that of slot 0.", low=1),
    Flag("side_margin", "M2", "Rows kept beside an answer under a plan in a side slot; -1: 8192.", low=-1),
    Flag("side_slot0_wait", "M4", "Longest wait of a conversation for slot 0 before a side slot (s).", low=0),
    Flag("resident_guest_max", "M5", "Longest prompt that leaves a free slot 0 its conversation.", low=0),
    Flag("side_guests", "M5", "Short requests to an idle side slot though slot 0 is free.", ("on", "off")),
    Flag("parallel_cut", "M6", "Drafts of a joint step: an equal share each, or where it pays.", ("share", "joint")),
    Flag("side_graphs", "M6", "Recorded verify rounds in side slots too (CUDA).", ("on", "off")),
    Flag("parallel_floor_gb", "M7", "Memory kept free beside others (GB); -1: 15 or 12 % of it.", low=-1),
    Flag(
        "side_lane",
        "K2",
        "Short requests inside a long one; decode: not inside its prefill.",
        ("on", "decode", "off"),
    ),
    Flag("side_lane_prompt", "K1", "Longest prompt of the side lane.", low=1),
    Flag("side_lane_tokens", "K1", "Most output tokens of a raw request in the side lane.", low=1),
    Flag("side_lane_side_tokens", "K1", "Output tokens after which a side request has outgrown the lane.", low=1),
    Flag("keepalive_chunk_s", "L1", "Empty chunks on a stream that waits (s); 0: none.", low=0),
    Flag("early_headers_s", "I6b", "Age at which a whole answer's headers leave (s); 0: with its end.", low=0),
    Flag("mem_ceiling_gib", "J1", "Memory between requests (GiB); 0: 0.8 of the device's.", low=0),
    Flag("mem_peak_gib", "J1", "Memory during a prefill (GiB); 0: the ceiling and a whole window's prefill.", low=0),
    Flag("reserve_slack_gib", "J1", "Free blocks kept between requests (GiB); -1: from the device.", low=-1),
    Flag("conductor", "Q1", "off: prompt and answer as sent, token for token.", ("on", "off")),
    Flag("client_reasoning", "Q2", "Where thinking goes, by kind of client: KIND=FORMAT,…"),
    Flag("progress_lines", "Q6", "Kinds of client that see waiting lines as thinking: KIND,…"),
    Flag("line_every_s", "L1", "Waiting lines (s).", low=0.01, hidden=True),
    Flag("quiet_s", "L9", "No message for so long: the engine is silent (s).", low=0.01, hidden=True),
    Flag("give_up_s", "L9", "Silent for so long: the engine is lost (s).", low=0.01, hidden=True),
    Flag("retry_failed_s", "I11", "A failed engine is tried again at most so often (s).", low=0.01, hidden=True),
    Flag("park_gb", "G2", "Memory for conversations put aside (GB); -1: from what is free.", low=-1, hidden=True),
    Flag("trace_rotate_mb", "R5", "A trace file's size before the next begins (MB).", low=0.001, hidden=True),
    Flag("trace_note", "R5", "Goes into the trace's header: what records it again.", hidden=True),
    Flag("script", "R4", "Answers for the scripted engine (JSON file).", hidden=True),
    Flag("failpoints", "I11", "Places where the engine fails: name=n,name=n.", hidden=True),
)


def _file_defaults(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Read the TOML settings file into click's defaults; an unknown key is an error that names it."""
    if not value:
        return value
    try:
        table = tomllib.loads(Path(value).read_text())
    except (OSError, ValueError):
        raise click.BadParameter(f"{value} is not a TOML file.") from None
    known = {flag.name.replace("_", "-") for flag in FLAGS} | {flag.name for flag in FLAGS}
    unknown = [key for key in table if key not in known]
    if unknown:
        raise click.BadParameter(f"{value}: unknown setting {unknown[0]!r}. `tandem serve --help` lists them.")
    ctx.default_map = {**(ctx.default_map or {}), **{key.replace("-", "_"): val for key, val in table.items()}}
    return value


def _option(flag: Flag, default: Any, kind: type) -> Any:
    """One click option for one flag."""
    dashed = "--" + flag.name.replace("_", "-")
    common: dict[str, Any] = {
        "default": default,
        "help": f"{flag.help} [{flag.row}]",
        "hidden": flag.hidden,
        "envvar": f"TANDEM_{flag.name.upper()}",
        "show_default": default not in ("", (), 0),
    }
    if isinstance(default, tuple):
        return click.option(dashed, flag.name, multiple=True, **common)
    if flag.name == "usage_default":
        return click.option(dashed, flag.name, type=click.BOOL, **common)
    if isinstance(default, bool):
        return click.option(dashed, flag.name, is_flag=True, **common)
    if flag.choices:
        return click.option(dashed, flag.name, type=click.Choice(flag.choices), **common)
    if kind is int:
        return click.option(dashed, flag.name, type=click.IntRange(min=int(flag.low or 0), max=flag.high), **common)
    if kind is float:
        return click.option(dashed, flag.name, type=click.FloatRange(min=flag.low), **common)
    return click.option(dashed, flag.name, **common)


def settings_options(command: Any) -> Any:
    """Decorate a click command with every flag and ``--settings FILE``."""
    defaults = Settings()
    for flag in reversed(FLAGS):
        default = getattr(defaults, flag.name)
        command = _option(flag, default, type(default))(command)
    return click.option(
        "--settings", type=click.Path(exists=True, dir_okay=False), is_eager=True, expose_value=False,
        callback=_file_defaults, envvar="TANDEM_SETTINGS", help="TOML file with any of these settings.",
    )(command)  # fmt: skip


def failpoints(text: str) -> dict[str, int]:
    """``name=n,name=n`` as a mapping. Raises ValueError on anything else."""
    pairs = (part.split("=", 1) for part in text.split(",") if part)
    return {name.strip(): int(count) for name, count in pairs}
