"""What an engine process is started with: the flags that concern it, in its own terms."""

from __future__ import annotations

from engine.protocol import Config
from pipeline.data_dir import folder
from pipeline.settings import Settings, failpoints

GB, GIB = 1_000_000_000, 1 << 30


def engine_config(settings: Settings, epoch: int, model: str) -> Config:
    """The configuration of the engine's start number ``epoch``; ``model`` is where its checkpoint lies."""
    return Config(
        epoch=epoch,
        model=model,
        device=settings.device,
        threads=settings.threads,
        max_len=settings.max_len,
        safe_rows=settings.safe_rows,
        prefix_chunk=settings.prefix_chunk,
        parallel=settings.parallel,
        side_max_len=settings.side_max_len,
        script=settings.script,
        failpoints=failpoints(settings.failpoints),
        speculate=settings.speculate == "on",
        draft_shape=settings.draft_shape,
        park_bytes=int(settings.park_gb * GB) if settings.park_gb >= 0 else -1,
        disk_cache_bytes=int(settings.disk_cache_gb * GB),
        data_dir=str(folder(settings)) if settings.disk_cache_gb else "",
        parallel_cut=settings.parallel_cut,
        mem_ceiling=int(settings.mem_ceiling_gib * GIB),
        mem_peak=int(settings.mem_peak_gib * GIB),
        slack=int(settings.reserve_slack_gib * GIB) if settings.reserve_slack_gib >= 0 else -1,
        side_graphs=settings.side_graphs == "on",
    )
