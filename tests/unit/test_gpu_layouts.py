"""The layouts of the GPU run are what they say they are; the run itself needs GPUs (tests/gpu/test_ranks.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.layouts import LAYOUTS, chosen
from weightcache.deployment import Deployment
from weightcache.launch.layout import deployment
from weightcache.sglang_options import given


@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_and_agents_are_told_the_same(name: str) -> None:
    """What the run then shows: SGLang's arguments and [deployment] mean the same ranks."""
    layout = LAYOUTS[name]
    nodes = tuple(f"node-{number}" for number in range(layout.nodes))
    held = Deployment(**layout.deployment, nodes=nodes if layout.nodes > 1 else ())
    held.check()
    asked = deployment(given((*layout.engine, "--nnodes", str(layout.nodes))))
    assert replace(asked, nodes=()) == replace(held, nodes=())
    assert len(held.ranks) == layout.ranks
    assert len({held.launch_of(rank) for rank in held.ranks}) == layout.launches
    assert [held.replica_of(rank) for rank in held.ranks] == [layout.replica_of(rank) for rank in held.ranks]
    assert [held.of_node(node) for node in range(layout.nodes)] == [*map(layout.of_node, range(layout.nodes))]


def test_layouts_are_chosen_by_the_number_of_gpus() -> None:
    assert set(chosen([], 8, "cuda")) == {name for name, layout in LAYOUTS.items() if layout.gpus == 8}
    assert chosen(["tp4", "tp2"], 2, "cuda") == {"tp4": "needs 4 GPUs, and there are 2", "tp2": ""}
    assert "hosts8" in chosen([], 1, "cuda")
    assert chosen(["hosts8"], 1, "cuda") == {"hosts8": ""}
    assert all(chosen([name], 0, "host")[name] == "" for name in chosen([], 0, "host"))
