"""What a what-if may change of a recorded run (row R6): flags the core decides by, on facts alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
import msgspec

from pipeline.events import EngineReady, Event
from pipeline.modelled import Costs, Store
from pipeline.request import Engine, Memory, Slot
from pipeline.settings import FLAGS, Policy, Settings, policy, settings_options
from pipeline.states import SlotState
from pipeline.trace import Header

FLAGS_OF_FACTS: dict[str, str] = {
    # the queue
    "max_queue": "max_queue",
    "max_live": "max_live",
    "bodies_mb": "bodies",
    # time-outs
    "queue_timeout": "queue_timeout",
    "request_timeout": "request_timeout",
    "drain_timeout": "drain_timeout",
    # the lane
    "side_lane": "side_lane",
    "side_lane_prompt": "side_lane_prompt",
    "side_lane_tokens": "side_lane_tokens",
    "side_lane_side_tokens": "side_lane_side_tokens",
    # slots
    "parallel": "slots",
    "side_max_len": "side_max_len",
    "side_margin": "side_margin",
    "side_slot0_wait": "side_slot0_wait",
    "resident_guest_max": "resident_guest_max",
    "side_guests": "side_guests",
    # memory; of the rest see ``BOUNDS``
    "parallel_floor_gb": "parallel_floor",
    # beats
    "keepalive_chunk_s": "keepalive_s",
    "early_headers_s": "early_headers_s",
    "prefill_heartbeat_s": "prefill_heartbeat_s",
    "line_every_s": "line_every_s",
}
"""Flags a what-if may change, and the field of ``Policy`` each one sets."""
BOUNDS = {"mem_ceiling_gib": "ceiling", "mem_peak_gib": "peak_limit", "reserve_slack_gib": "slack"}
"""Flags that reach the core as a fact of ``EngineReady``."""

WHY_NOT: dict[str, tuple[str, ...]] = {
    "acts on text, which nothing here models: a trace at level facts holds none": (
        "argloop", "stop", "thinking", "effort", "think_budget", "effort_caps", "budget_zero", "answer_reserve",
        "think_stall", "reasoning_format", "reasoning_key", "json_depth", "mid_system", "chat_template",
        "default_max_tokens", "finish_words", "conductor", "client_reasoning", "progress_lines", "usage_default",
    ),
    "changes the engine's own work, whose costs were measured with the recorded one": (
        "model", "device", "threads", "speculate", "draft_shape", "prefix_chunk", "safe_rows", "disk_cache_gb",
        "park_gb", "max_len", "parallel_cut", "side_graphs", "script", "failpoints",
    ),
    "acts before the queue, on what the trace holds the verdict of alone": ("strict_model", "max_body_mb"),
    "is about an engine that is silent or lost, and a modelled one never is": (
        "quiet_s", "give_up_s", "retry_failed_s",
    ),
}  # fmt: skip
"""Why the others are refused."""


class Change(msgspec.Struct, frozen=True):
    """One flag, as it was recorded and as it is now."""

    flag: str
    was: Any
    now: Any

    def __str__(self) -> str:
        """As a person reads it."""
        return f"--{self.flag.replace('_', '-')} {self.now} in place of {self.was}"


class Changes(msgspec.Struct, frozen=True):
    """Every change, and what they come to: another policy, and other bounds of memory (in bytes)."""

    each: tuple[Change, ...]
    policy: Policy
    bounds: dict[str, int] = {}

    def bounded(self, event: Event) -> Event:
        """What an engine would have said with the changed bounds; what can never fit it would have measured."""
        if not self.bounds or not isinstance(event, EngineReady):
            return event
        return msgspec.structs.replace(event, **self._bounds(event))

    def applied(self, memory: Memory) -> None:
        """To a snapshot of the core, from which a rotated file goes on. Raises ``NoChange`` where that cannot be."""
        if self.bounds:
            for name, value in self._bounds(memory.engine).items():
                setattr(memory.engine, name, value)
        slots = self.policy.slots
        if any(slot.state is not SlotState.free for slot in memory.slots[slots:]):
            raise NoChange(
                f"--parallel {slots}: the file opens with more slots in use. Take the recording's first one."
            )
        memory.slots = [*memory.slots[:slots], *(Slot(id=i) for i in range(len(memory.slots), slots))]

    def costs(self, measured: Costs | None) -> Costs | None:
        """Measured costs with the changed bounds."""
        if measured is None or not self.bounds:
            return measured
        store = msgspec.structs.replace(measured.store, **self._bounds(measured.store))
        return msgspec.structs.replace(measured, store=store)

    def _bounds(self, ready: EngineReady | Engine | Store) -> dict[str, int]:
        """A peak that was not asked for stays as far above the ceiling as it was."""
        above = ready.peak_limit - ready.ceiling
        peak = {"peak_limit": self.bounds["ceiling"] + above} if "ceiling" in self.bounds and ready.peak_limit else {}
        return {"most_rows": 0, **peak, **self.bounds}


class NoChange(ValueError):
    """A sentence that says why a flag cannot be changed."""


def changed(header: Header, wanted: Iterable[str]) -> Changes:
    """What ``FLAG=VALUE``, … make of a recording's policy. Raises ``NoChange``."""
    new, bounds, each = header.policy, {}, []
    for text in wanted:
        flag, equals, value = text.partition("=")
        flag = flag.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise NoChange(f"{text}: write FLAG=VALUE.")
        if flag in BOUNDS:
            was, now = header.settings.get(flag, getattr(Settings(), flag)), _value(flag, value)
            if now != was and now <= 0:
                raise NoChange(f"--{flag.replace('_', '-')}: a trace does not tell what the device has. Say how much.")
            if now != was:
                bounds[BOUNDS[flag]] = int(now * (1 << 30))
            each.append(Change(flag, was, now))
            continue
        if flag not in FLAGS_OF_FACTS:
            raise NoChange(_refusal(flag))
        now, field = _value(flag, value), FLAGS_OF_FACTS[flag]
        each.append(Change(flag, header.settings.get(flag, getattr(header.policy, field)), now))
        asked = getattr(policy(msgspec.structs.replace(Settings(), **{flag: now})), field)
        new = msgspec.structs.replace(new, **{field: asked})
    return Changes(tuple(each), new, bounds)


def _refusal(flag: str) -> str:
    name = "--" + flag.replace("_", "-")
    why = next((why for why, flags in WHY_NOT.items() if flag in flags), "")
    if not why and flag not in [known.name for known in FLAGS]:
        return f"{name}: there is no such flag. `tandem serve --help` lists them."
    return f"{name} {why or 'changes no decision of the core'}."


@click.command(add_help_option=False)
@settings_options
def _serve(**_flags: Any) -> None:
    """Every flag as ``tandem serve`` reads it."""


def _value(flag: str, text: str) -> Any:
    """A flag's value as ``tandem serve`` would read it."""
    try:
        with _serve.make_context("serve", [f"--{flag.replace('_', '-')}={text}"]) as context:
            return context.params[flag]
    except click.UsageError as error:
        raise NoChange(error.format_message()) from None
