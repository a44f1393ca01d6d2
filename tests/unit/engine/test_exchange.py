"""Ranks tell each other things, and one of them can be kept from waiting for the others: over a real process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK = """
import contextlib, json, sys, types
import torch
import torch.distributed as dist
from weightcache.engine import adapter, adapter_together
from weightcache.engine.agree import exchange
rank, store, rounds = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
adapter.world = lambda: (rank, 2, dist.group.WORLD)
heard = [[text.decode() for text in exchange(round_[rank].encode())] for round_ in rounds]
own = [dist.new_group([0]), dist.new_group([1])][rank]

class GroupCoordinator:
    def __init__(self, world_size):
        self.world_size = world_size
    def all_reduce(self, tensor):
        return tensor

state = types.ModuleType("sglang.srt.distributed.parallel_state")
state.GroupCoordinator = GroupCoordinator
state.in_the_same_node_as = lambda group, source_rank=0: dist.barrier()
package = types.ModuleType("sglang.srt.distributed")
package.parallel_state = state
sys.modules |= {"sglang.srt.distributed": package, "sglang.srt.distributed.parallel_state": state}
one = torch.ones(1)
tried = {
    "barrier": lambda: dist.barrier(),
    "reduce": lambda: dist.all_reduce(one),
    "named": lambda: dist.all_reduce(one, group=dist.group.WORLD),
    "coordinator": lambda: GroupCoordinator(2).all_reduce(one),
    "own": lambda: dist.all_reduce(one, group=own),
    "own coordinator": lambda: GroupCoordinator(1).all_reduce(one),
}
said = {}
if rank == 0:
    with adapter_together.alone((True, False)):
        said["known"] = state.in_the_same_node_as(dist.group.WORLD, source_rank=0)
        tried["not known"] = lambda: state.in_the_same_node_as(own)
        tried["another"] = lambda: state.in_the_same_node_as(dist.group.WORLD, source_rank=1)
        for name, attempt in tried.items():
            try:
                attempt()
                said[name] = ""
            except adapter_together.NeedsOthers as error:
                said[name] = str(error)
print(json.dumps([heard, said]))
dist.barrier()
dist.destroy_process_group()
"""
ROUNDS = [("a", "b"), ("", "some more"), ("x" * 5000, "\u00e9"), ("", "")]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks heard, and what the first one could not do alone."""
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store), json.dumps(ROUNDS)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in texts]


def test_all_ranks_hear_all(outputs: list[Any]) -> None:
    assert outputs[0][0] == outputs[1][0] == [list(round_) for round_ in ROUNDS]


def test_a_rank_that_is_alone_waits_for_nobody(outputs: list[Any]) -> None:
    """Both ranks meet again afterwards, or this would not have ended."""
    assert outputs[0][1] == {
        "known": [True, False],
        "not known": "loading needs the other ranks (in_the_same_node_as)",
        "another": "loading needs the other ranks (in_the_same_node_as)",
        "barrier": "loading needs the other ranks (barrier)",
        "reduce": "loading needs the other ranks (all_reduce)",
        "named": "loading needs the other ranks (all_reduce)",
        "coordinator": "loading needs the other ranks (all_reduce)",
        "own": "",
        "own coordinator": "",
    }
