"""A second model of a process gets rotary embeddings of its own; the first one's stay where SGLang looks for them."""

from __future__ import annotations

import contextlib

from weightcache.engine import adapter


def test_models_are_apart() -> None:
    from sglang.srt.layers.rotary_embedding import factory

    before = dict(factory._ROPE_DICT)
    factory._ROPE_DICT["first"] = object()  # type: ignore[index]
    try:
        kept = dict(factory._ROPE_DICT)
        with contextlib.suppress(RuntimeError), adapter.apart():
            assert not factory._ROPE_DICT
            factory._ROPE_DICT["second"] = object()
            raise RuntimeError
        assert kept == factory._ROPE_DICT
    finally:
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(before)
