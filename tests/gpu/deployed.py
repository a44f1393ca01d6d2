"""One model in one layout: on every node a runtime directory, a configuration, agents, and a part of each engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import rig
from tests.gpu.layouts import Layout
from tests.gpu.rig import Agent, Started
from tests.gpu.serving import Serving
from tests.support.engine import Engine, free_port
from weightcache import gpus

ADDRESSES = tuple(f"127.0.0.{number}" for number in range(1, 9))
MEET_SECONDS = 120
SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "16")
"""Several engines at once: none may take the memory that another one has just measured as free."""
PLAIN = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
"""Sums of all ranks by NCCL alone: the other ways compile kernels, and may use NVLink multicast."""
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
}
"""No NVLink multicast: on a host whose GPUs others share, it can disturb those."""

_READY = re.compile(r"rank (\d+): ready, set")


class Node:
    """A host's part of a model."""

    def __init__(self, folder: Path, number: int, layout: Layout, model: Path, port: int, unproven: str) -> None:
        self.number = number
        self.layout = layout
        self.model = model
        folder.mkdir(parents=True)
        self.config = folder / "weightcache.toml"
        self.config.write_text(self._configuration(folder, port, unproven))
        environment = self.variables()
        self.agents = [Agent(folder, rank=rank, environment=environment) for rank in layout.of_node(number)]

    def arguments(self) -> tuple[str, ...]:
        """SGLang's arguments beside the model, the port and the layout."""
        profile = rig.profile()
        return (*profile.base, *profile.fast, *SMALL, *(PLAIN if profile.backend == "cuda" else ()))

    def variables(self) -> dict[str, str]:
        """The environment of this node's agents, and of its engines but for ``engine``."""
        found = rig.variables() | QUIET
        if self.layout.apart:
            # NCCL takes no two ranks of one host on one GPU, and for hosts what has another name.
            found |= {"NCCL_HOSTID": f"host-{self.number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
        if rig.profile().backend == "host":
            cores = sorted(os.sched_getaffinity(0))
            bound = "|".join(str(cores[rank % len(cores)]) for rank in range(self.layout.ranks))
            found |= {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": "/nonexistent/nccl"}
        return found

    def _configuration(self, folder: Path, port: int, unproven: str) -> str:
        profile, layout = rig.profile(), self.layout
        deployment: dict[str, Any] = dict(layout.deployment)
        if layout.nodes > 1:
            deployment |= {"nodes": ADDRESSES[: layout.nodes], "port": port, "meet_seconds": MEET_SECONDS}
        tables: dict[str, dict[str, Any]] = {
            "agent": {"runtime_dir": str(folder)},
            "loader": {"command": [sys.executable, "-m", "weightcache.loader"]},
            "model": {"arguments": ["--model-path", str(self.model), *self.arguments()]},
            "memory": {"backend": profile.backend},
            "policy": {"unproven": unproven},
            "deployment": deployment,
        }
        lines = [f"[{name}]\n" + _rows(table) for name, table in tables.items()]
        unlisted = profile.backend == "cuda" and not gpus.installed()
        if layout.nodes > 1 or layout.turned or unlisted:  # otherwise GPUs follow from the layout
            for rank, gpu in zip(layout.of_node(self.number), layout.gpus_of(self.number), strict=True):
                named = {"gpu": rig.gpu_uuid(gpu)} if profile.backend == "cuda" else {}
                lines.append("[[rank]]\n" + _rows({"rank": rank, **named}))
        return "".join(lines)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``wcache`` on this node."""
        env = self.variables() | ({"WEIGHTCACHE_NODE_RANK": str(self.number)} if self.layout.nodes > 1 else {})
        argv = [sys.executable, "-m", "weightcache.cli", "--config", str(self.config), *arguments]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )

    def engine(self, log: Path, options: tuple[str, ...], meet: int, environment: Mapping[str, str]) -> Engine:
        """This node's part of an engine, under ``wcache-launch``."""
        # Tokens of different engines are compared: all of them have to capture the same graphs before they answer.
        command = [sys.executable, "-m", "weightcache.launch", "--wcache-without", "graphs", *options]
        command += ["--wcache-config", str(self.config)]
        arguments, own = list(self.layout.engine), self.variables()
        if self.layout.nodes > 1:
            arguments += ["--nnodes", str(self.layout.nodes), "--node-rank", str(self.number)]
            arguments += ["--dist-init-addr", f"{ADDRESSES[0]}:{meet}"]
            own["GLOO_SOCKET_IFNAME"] = "lo"
        if rig.profile().backend == "cuda" and (self.layout.nodes > 1 or self.layout.turned):
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.layout.gpus_of(self.number)))
        made = Engine(self.model, log=log, command=command, base=self.arguments(), arguments=arguments)
        made.environment = own | environment
        return made


@dataclass(slots=True)
class Deployed:
    """One model on all nodes. ``unproven`` is the policy of that name."""

    name: str
    folder: Path
    layout: Layout
    model: Path
    unproven: str = "refuse"
    nodes: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        port = free_port()
        self.nodes = [
            Node(self.folder / str(number), number, self.layout, self.model, port, self.unproven)
            for number in range(self.layout.nodes)
        ]

    @property
    def agents(self) -> list[Agent]:
        """All of them, by rank."""
        return [agent for node in self.nodes for agent in node.agents]

    def load(self, seconds: float) -> dict[int, float]:
        """``wcache load`` on every node at once: seconds until each rank was ready. Raises AssertionError."""
        begin, ready, said = time.monotonic(), {}, list[str]()
        commands = [node.command("load", "--wait", f"{seconds:.0f}") for node in self.nodes]

        def follow(command: subprocess.Popen[str]) -> None:
            for line in command.stdout or ():
                said.append(line.rstrip())
                if match := _READY.search(line):
                    ready[int(match[1])] = round(time.monotonic() - begin, 2)

        readers = [threading.Thread(target=follow, args=(command,), daemon=True) for command in commands]
        try:
            for reader in readers:
                reader.start()
            deadline = begin + seconds + 20
            codes = [command.wait(max(deadline - time.monotonic(), 0.1)) for command in commands]
            for reader in readers:
                reader.join(5)
        finally:
            for command in commands:
                command.kill()
                command.wait()
        assert not any(codes), f"wcache load: {'; '.join(said[-6:])}"
        return dict(sorted(ready.items()))

    @contextlib.contextmanager
    def serving(
        self, name: str, *options: str, seconds: float, environment: Mapping[str, str] | None = None
    ) -> Iterator[Serving]:
        """Start an engine, wait for its first token, stop it afterwards."""
        begin, meet = time.monotonic(), free_port()
        parts = [
            node.engine(self.folder / f"{name}-{node.number}.log", options, meet, environment or {})
            for node in self.nodes
        ]
        try:
            for part in parts:
                part.start()
            parts[0].wait_ready(seconds)
            ready = time.monotonic() - begin
            parts[0].tokens([5, 17, 99], 1)
            yield Serving(parts, Started(round(ready, 2), round(time.monotonic() - begin, 2)))
        finally:
            with contextlib.ExitStack() as stack:
                for part in reversed(parts):  # the first node ends first: the others wait for its word
                    stack.callback(part.stop)


def _rows(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
