"""What runs before traffic leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from mneme.cachetier.cache_config import CacheConfig
from mneme.cachetier.disk_interface import DiskTierConfig
from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.replicas.config import EngineConfig
from mneme.replicas.load import load_engine
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.replicas.test_engine_policy import run


def test_a_new_engine_has_no_trace_of_what_warmed_it(tmp_path: Path) -> None:
    disk = DiskTierConfig(folder=str(tmp_path), capacity_bytes=1 << 24)
    engine = load_engine("mneme-tiny", EngineConfig(num_pages=64, dtype="float32"), cache=CacheConfig(disk=disk))
    try:
        stats = engine.stats()
        assert (engine.num_steps, dict(engine.num_tokens), dict(engine.num_finished)) == (0, {}, {})
        assert (engine.forest.num_in_use, engine.forest.num_cached) == (0, 0)
        assert stats["cache"]["plans"] == {}
        assert "lookups" not in stats["cache"]
        assert bool((engine._runner.pool.slot_position == FREE_SLOT_POSITION).all())  # what nobody is told
        assert engine._runner.num_shared_segments == 0
        sampling = SamplingParams(temperature=0, max_tokens=1)
        ids = tuple(range(64))  # as it was warmed with
        engine.submit(GenerationRequest(request_id="first", prompt_token_ids=ids, sampling=sampling))
        events = run(engine)
        usage = next(event.usage for event in events if event.usage is not None)
        assert usage.cached_tokens == 0
    finally:
        engine.close()
