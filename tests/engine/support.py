"""What the engine tests share: how an engine is started beside an agent, and what is asked of it."""

from __future__ import annotations

import contextlib
import mmap
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.support import smaps
from tests.support.agent import Agent, eventually
from tests.support.engine import Engine
from tests.support.environments import NEWEST, environments
from weightcache.checkpoint import SAMPLE_BYTES, SAMPLES

PROMPTS = ("1, 2, 3, 4, 5, 6, 7, 8,", "The first ten letters of the alphabet are A, B, C,")
"""Continuations of which the model is sure: between any two best tokens lie at least 0.6.

Free text is no proof in bfloat16. Its logits have steps of 0.125, so that two tokens are often exactly equal, and two
plain engines from the same disk already answer differently.
"""
TOKENS = 32
ARGUMENTS = ("--sleep-on-idle",)
"""A scheduler that polls would take one of two cores from the next start."""
VARIABLES = {"OMP_NUM_THREADS": "1"}
"""Two engines with two threads each spend their time waiting for one another."""
READY_SECONDS = 300.0
DETERMINED_SECONDS = 120.0


class QuickEngine(Engine):
    """Ends at once: SGLang waits for requests that nobody sent. A launcher sees its server die, and tidies up."""

    def stop(self, grace: float = 5.0) -> None:
        """Kill the server's processes, then wait for the one that was started."""
        for process in self.family() if self._process else ():
            if process.pid != self.process.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        super().stop(grace=0)


def plain(model: Path, log: Path, version: str = NEWEST, arguments: Sequence[str] = ()) -> Engine:
    """SGLang itself, without weightcache."""
    return QuickEngine(model, log=log, version=version, arguments=(*ARGUMENTS, *arguments), environment=VARIABLES)


def launched(
    agent: Agent | Path,
    model: Path,
    log: Path,
    version: str = NEWEST,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Engine:
    """SGLang through ``wcache-launch`` with ``options`` beside an agent (or in a runtime directory without one)."""
    folder = agent if isinstance(agent, Path) else agent.runtime_dir
    return QuickEngine(
        model,
        log=log,
        version=version,
        command=(environments().script("wcache-launch", version), "--wcache-runtime-dir", folder, *options),
        arguments=(*ARGUMENTS, *arguments),
        environment={**VARIABLES, **(environment or {})},
    )


def texts(engine: Engine) -> tuple[str, ...]:
    """The greedy continuations of all prompts."""
    return tuple(engine.generate(prompt, TOKENS, timeout=240) for prompt in PROMPTS)


def text(engine: Engine) -> str:
    """The greedy continuation of the first prompt: half of the time, where all were compared before."""
    return engine.generate(PROMPTS[0], TOKENS, timeout=240)


def checksums(engine: Engine) -> dict[str, str]:
    """SGLang's own checksum of every weight as the engine holds it, by name. 0.5.17 computes it on a GPU only."""
    status, answer = engine.post("/weights_checker", {"action": "checksum"})
    assert status == 200, answer
    (rank,) = answer["ranks"]
    return dict(rank["checksums"])


def lines(engine: Engine) -> list[str]:
    """What the launcher itself said."""
    return [
        line.removeprefix("weightcache: ") for line in engine.text().splitlines() if line.startswith("weightcache: ")
    ]


HOW = r"rank {rank}: (attached|loaded from disk|refused|attaching failed)"


def line_of(engine: Engine, rank: int = 0) -> str:
    """The launcher's one line that says how a rank got its weights."""
    (line,) = [line for line in lines(engine) if re.match(HOW.format(rank=rank), line)]
    return line


def table_of(engine: Engine) -> dict[str, tuple[str, str, str]]:
    """The launcher's table of differing fields: resident value, engine's value, consequence."""
    rows = [re.split(r" +\| ", line.strip()) for line in engine.text().splitlines() if line.startswith("  ")]
    wide = [row for row in rows if len(row) == 4 and not set(row[0]) <= {"-"} and row[0] != "field"]
    return {row[0]: (row[1], row[2], row[3]) for row in wide}


def await_line(engine: Engine, rank: int = 0, seconds: float = DETERMINED_SECONDS) -> str:
    """Wait for an engine that was started until the launcher says how a rank got its weights."""

    def said() -> bool:
        if engine.process.poll() is not None:
            raise AssertionError(f"the engine exited with {engine.process.returncode}\n{engine.tail()}")
        return any(re.match(HOW.format(rank=rank), line) for line in lines(engine))

    eventually(said, seconds, engine.tail)
    return line_of(engine, rank)


@contextmanager
def until_decided(engine: Engine, ranks: Sequence[int] = (0,)) -> Iterator[tuple[str, ...]]:
    """Start an engine, hand out the launcher's line about each rank, and end it before it serves."""
    try:
        engine.start()
        yield tuple(await_line(engine, rank) for rank in ranks)
    finally:
        engine.stop()


def run_to_end(engine: Engine, seconds: float = DETERMINED_SECONDS) -> int:
    """Start an engine that will not serve, wait for its end, and return its exit status."""
    try:
        return engine.start().process.wait(seconds)
    finally:
        engine.stop()


@dataclass(frozen=True, slots=True)
class Memory:
    """One scheduler's memory. ``arenas``: the mappings of weightcache's memory; ``anonymous``: bytes of its own."""

    arenas: tuple[smaps.Mapping, ...]
    anonymous: int

    @property
    def inodes(self) -> frozenset[int]:
        """The arenas that are mapped."""
        return frozenset(mapping.inode for mapping in self.arenas)


def memory_of(pid: int) -> Memory:
    """Look at a scheduler."""
    mappings = smaps.read(pid)
    arenas = tuple(m for m in smaps.memfds(mappings) if m.path.startswith("/memfd:weightcache"))
    return Memory(arenas, sum(m.anonymous for m in mappings if "s" not in m.permissions))


def scheduler(engine: Engine) -> int:
    """The process of an engine of one rank that holds the weights."""
    (process,) = engine.schedulers()
    return int(process.pid)


def assert_maps(engine: Engine, inodes: frozenset[int], size: int) -> None:
    """The engine maps exactly these arenas, read-only, and copied no page of them on write."""
    arenas = memory_of(scheduler(engine)).arenas
    assert frozenset(mapping.inode for mapping in arenas) == inodes
    assert {mapping.permissions for mapping in arenas} == {"r--p"}
    assert sum(mapping.length for mapping in arenas) == size
    assert sum(mapping.anonymous for mapping in arenas) == 0


def samples(file: Path) -> int:
    """Pages that the identity of one safetensors file touches: its header, and samples that need not be aligned."""
    with file.open("rb") as opened:
        header = 8 + int.from_bytes(opened.read(8), "little")
    pages = -(-header // mmap.PAGESIZE) + SAMPLES * (-(-SAMPLE_BYTES // mmap.PAGESIZE) + 1)
    return pages * mmap.PAGESIZE


class LoaderMemory:
    """Watches the memory of an agent's loader: anonymous memory, and arenas while it fills them (shared memory).

    ``peak`` is the most that it had beyond what it had when the first weight was read.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.samples: list[tuple[str, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        before = [size for phase, size in self.samples if phase == "importing"]
        return max(size for _, size in self.samples) - before[-1]

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            progress = self.agent.status().progress
            if progress is not None and (size := _allocated(self.agent.pid)):
                self.samples.append((progress.phase, size))


def _allocated(pid: int) -> int:
    """Anonymous and shared memory of the largest process below ``pid``."""
    found = [0]
    for process in psutil.Process(pid).children(recursive=True):
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except (OSError, psutil.Error):
            continue
        found.append(sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)))
    return max(found)
