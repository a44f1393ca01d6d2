"""What the ranks of a launch decide, from what each says of itself."""

from __future__ import annotations

import pytest

from weightcache.errors import InUse, LoadFailed
from weightcache.loader import standing
from weightcache.loader.standing import Loaded, Plan, Standing, decide, misfit

CONTENTS = ("a", "b", "c")
HOLDS = Standing("holds", "g", CONTENTS)
LOST = Standing("lost")
BUSY = "2 engines use its weights"


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1), ()], ids=str)
def test_those_who_lost_theirs_rejoin_the_others(lost: tuple[int, ...]) -> None:
    assert decide([LOST if rank in lost else HOLDS for rank in range(3)]) == Plan("g", CONTENTS)


@pytest.mark.parametrize(
    ("standings", "why"),
    [
        ([LOST, LOST], "no rank holds weights of a load"),
        ([HOLDS, Standing("anew", why="another dtype")], "rank 1: another dtype"),
        ([HOLDS, LOST, Standing("holds", "h", CONTENTS)], "ranks 0 and 2 hold weights of different loads"),
        ([HOLDS, LOST, Standing("holds", "g", ("a", "b", "d"))], "ranks 0 and 2 hold weights of different loads"),
        ([HOLDS, LOST], "rank 0 holds weights of a load of 3 ranks"),
    ],
)
def test_otherwise_all_load(standings: list[Standing], why: str) -> None:
    assert decide(standings) == Plan(why=why)
    standings[0] = Standing("holds", "i", CONTENTS, in_use=BUSY)
    with pytest.raises(InUse, match=f"rank 0: {BUSY} "):
        decide([*standings[:1], Standing("anew", why=why)])


def test_what_is_in_use_may_be_gone_on_with() -> None:
    plan = decide([HOLDS, LOST, Standing("holds", "g", CONTENTS, in_use=BUSY)])
    assert plan.group == "g"
    with pytest.raises(InUse, match=rf"rank 2: {BUSY} \(rank 1: it is ill\)"):
        plan.require_room("rank 1: it is ill")


def test_what_was_loaded_has_to_be_what_was_lost() -> None:
    plan = Plan("g", CONTENTS)
    assert misfit(plan, [Loaded(content) for content in CONTENTS]) == ""
    assert misfit(plan, [Loaded("a"), Loaded("x"), Loaded("c")]) == "rank 1: what it loaded is not what it had lost"
    assert misfit(plan, [Loaded("a"), Loaded("", "it needs the others"), Loaded("c")]) == "rank 1: it needs the others"


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[" * 10000, standing.encode(Loaded("a")), b'{"type": "Standing"}'])
def test_what_is_not_understood_ends_the_load(wrong: bytes) -> None:
    assert standing.standings([standing.encode(HOLDS)]) == [HOLDS]
    with pytest.raises(LoadFailed, match="rank 1 of the launch said something else than Standing"):
        standing.standings([standing.encode(HOLDS), wrong])
    with pytest.raises(LoadFailed, match="rank 0 of the launch said something else than Loaded"):
        standing.contents([standing.encode(HOLDS)])
