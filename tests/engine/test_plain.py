"""Plain SGLang on the CPU, without weightcache: what the other engine tests compare with."""

from pathlib import Path

from tests.support.engine import Engine


def test_plain_engine_answers(smollm2: Path, sglang_version: str, tmp_path: Path) -> None:
    with Engine(smollm2, log=tmp_path / "engine.log", version=sglang_version) as engine:
        assert engine.generate("The capital of France is", 8).startswith(" Paris")
        assert len(engine.tokens([1, 2, 3], 6)) == 6
        assert len(engine.schedulers()) == 1
    assert engine.family() == []
