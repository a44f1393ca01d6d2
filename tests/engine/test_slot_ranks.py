"""Real engines of two ranks in both slots: a rank is killed, and the other engine takes over with all of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.slots import START_SECONDS, RealSlots, asking
from tests.engine.test_ranks import variables
from tests.unit.launch.support import alive, eventually
from tests.unit.slots.support import OTHER, watching
from weightcache.standby import roster
from weightcache.standby.locks import is_taken

pytestmark = pytest.mark.timeout(900)

RANKS = 2


class TwoRanks(RealSlots):
    def arguments(self) -> list[str]:
        return [*super().arguments(), "--tp-size", str(RANKS)]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **variables()}


def test_a_rank_is_killed(
    tmp_path: Path, runtime_dir: Path, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as port:
        slots = TwoRanks(tmp_path, runtime_dir, port, model=tiny_model)
        try:
            slots.start("a", "b")
            active = slots.stand(START_SECONDS)
            with asking(slots) as client, watching(slots):
                before = slots.until(active, "active")
                assert len(before.ranks) == before.size == RANKS
                assert eventually(lambda: len(client.answered) > 3, 60), slots.say()
                killed, event = time.monotonic(), time.time()
                slots.kill(active, "rank")
                assert eventually(lambda: client.answered[-1][0] > killed, 60), slots.say()
                after = slots.until(OTHER[active], "active")
                assert not any(alive(rank.pid) for rank in before.ranks)
                assert all(is_taken(slots.paths.lock, 1 + rank) for rank in range(RANKS))
                assert not is_taken(slots.paths.lock, 1 + RANKS)
                assert len(after.ranks) == RANKS
                assert roster.read(slots.paths.roster(OTHER[active])).processes == after.ranks
                assert after.promotions[-1].cause == "death"
            assert len(client.failed) <= 1
            assert client.refused == []
            slots.check_promotions([event])
            took = next(ended for began, ended in client.answered if began > killed) - killed
            record_property("seconds", took)
            print(slots.say(), took)
            assert took < 5.0, slots.say()
        finally:
            slots.close()
