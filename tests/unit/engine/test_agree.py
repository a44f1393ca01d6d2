"""All ranks attach, or all donate, or none does: over a real process group."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightcache.engine import adapter
from weightcache.engine.agree import Agreement, Vote, agree

RANK = """
import json, sys
import torch.distributed as dist
from weightcache.engine import adapter
from weightcache.engine.agree import Vote, agree
rank, store, rounds = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
adapter.world = lambda: (rank, 2, dist.group.WORLD)
answers = []
for votes, groups in rounds:
    found = agree(Vote(votes[rank]), 1000 * (rank + 1), groups[rank])
    answers.append([int(found.vote), found.reluctant, found.resident_bytes, found.group, found.apart])
print(json.dumps(answers))
dist.barrier()
dist.destroy_process_group()
"""

Heard = dict[tuple[tuple[int, int], bool], list[Any]]

REFUSE, DISK, DONATE, ATTACH = (int(vote) for vote in Vote)
EXPECTED = {
    (ATTACH, ATTACH): (ATTACH, 0),
    (DONATE, DONATE): (DONATE, 0),
    (DISK, DISK): (DISK, 0),
    (REFUSE, REFUSE): (REFUSE, 0),
    (ATTACH, DISK): (DISK, 1),
    (DISK, ATTACH): (DISK, 0),
    (ATTACH, DONATE): (DISK, 1),
    (DONATE, ATTACH): (DISK, 0),
    (DONATE, DISK): (DISK, 1),
    (DISK, DONATE): (DISK, 0),
    (ATTACH, REFUSE): (REFUSE, 1),
    (REFUSE, ATTACH): (REFUSE, 0),
    (REFUSE, DONATE): (REFUSE, 0),
    (DISK, REFUSE): (REFUSE, 1),
}


@pytest.fixture(scope="module")
def agreements(tmp_path_factory: pytest.TempPathFactory) -> list[Heard]:
    """What each of two ranks heard, for every pair of votes, with one group and with two."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    rounds = json.dumps([(votes, ("g", "g")) for votes in EXPECTED] + [(votes, ("g", "h")) for votes in EXPECTED])
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(store), rounds], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    rows = [(votes, together) for together in (True, False) for votes in EXPECTED]
    return [dict(zip(rows, json.loads(output.splitlines()[-1]), strict=True)) for output in outputs]


@pytest.mark.parametrize("votes", EXPECTED, ids=lambda votes: "-".join(Vote(v).name.lower() for v in votes))
@pytest.mark.parametrize("together", [True, False])
def test_both_ranks_hear_the_same(agreements: list[Heard], votes: tuple[int, int], together: bool) -> None:
    vote, reluctant = EXPECTED[votes]
    first, second = (heard[votes, together] for heard in agreements)
    assert first == second
    apart = None if together or vote != ATTACH else 1
    assert first[:3] == [vote if apart is None else DISK, reluctant, 2000]
    assert first[4] == apart
    assert re.fullmatch("[0-9a-f]{16}", first[3]), "donors on all hosts have this name, whatever their own was"


@pytest.mark.parametrize("vote", list(Vote))
def test_one_rank_needs_no_group(vote: Vote, monkeypatch: pytest.MonkeyPatch) -> None:
    world: tuple[int, int, Any] = (0, 1, None)
    monkeypatch.setattr(adapter, "world", lambda: world)
    assert agree(vote, 5, "g") == Agreement(vote, 0, 5, "g")


def test_the_script_is_about_this_package() -> None:
    assert Path(adapter.__file__).parent.name == "engine"
