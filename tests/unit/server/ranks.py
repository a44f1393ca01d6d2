"""Several agents of one host, as processes, which load in one launch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server.harness import SECONDS, Agent, eventually
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.errors import WeightcacheError

RANKS = 3


class Ranks:
    """The agents of one host, which is all of the deployment."""

    def __init__(self, folder: Path, named: Path) -> None:
        self.agents = [Agent(folder, named, rank) for rank in range(RANKS)]
        self.pool = ThreadPoolExecutor(2 * RANKS)

    def configure(self, environment: dict[str, str] | None = None, **more: Any) -> None:
        self.agents[0].configure(environment, deployment={"tp_size": RANKS}, **more)

    def start(self, *arguments: str) -> None:
        for agent in self.agents:
            agent.start(*arguments, wait=False)
        for agent in self.agents:
            eventually(agent._answers)

    def load(self, rank: int) -> Future[str]:
        return self.pool.submit(self.agents[rank].load)

    def groups(self) -> list[list[str]]:
        """The loads that each rank's sets came from."""
        return [[resident.group for resident in agent.status().sets] for agent in self.agents]

    def launches(self) -> int:
        """How often a loader was started, by whomever."""
        return sum(agent.text().count("test loader starts") for agent in self.agents)

    def seed(self, number: int) -> None:
        """From now on loaders make other bytes."""
        (self.agents[0].gates / "seed").write_text(str(number))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.pool.shutdown()


def failure(future: Future[str]) -> WeightcacheError:
    with pytest.raises(WeightcacheError) as caught:
        future.result(SECONDS)
    return caught.value


def one_group(ranks: Ranks) -> str:
    """The group of the only set of each rank, once all have committed."""
    eventually(lambda: all(len(sets) == 1 for sets in ranks.groups()), what=f"never one set each: {ranks.groups()}")
    (group,) = {sets[0] for sets in ranks.groups()}
    return group


def load_again(agent: Agent) -> str:
    with Conversation(agent.paths.public) as conversation:
        return str(conversation.request(protocol.Load(SECONDS, again=True), protocol.Loaded, SECONDS).set_id)
