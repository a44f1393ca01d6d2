"""One layout from its disk load to the death of all agents: python -m tests.gpu.story [OPTIONS] LAYOUT FOLDER.

FOLDER/result.json has what was measured and what was wrong. tests/gpu/ranks.py runs many of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.engine.support import samples
from tests.gpu import loading, rig
from tests.gpu.deployed import Deployed
from tests.gpu.layouts import LARGE, LAYOUTS
from tests.gpu.notes import Notes
from tests.gpu.serving import Serving
from tests.support import pagecache
from weightcache import gpus
from weightcache.checkpoint import weight_files

STEPS = ("warm", "disk", "load", "attach", "second", "turn", "kill", "restart")
DEFAULT = ("disk", "load", "attach", "kill", "restart")
ASKED = ("connect", "receive", "map", "private", "build", "bind")
"""The steps of an attach from the question on."""
SOON_MILLISECONDS = 1000.0


class Story:
    """The steps of one layout, in order; agents run and load in any case."""

    def __init__(self, options: argparse.Namespace, notes: Notes) -> None:
        self.folder: Path = options.folder
        self.layout = LAYOUTS[options.layout]
        self.steps: tuple[str, ...] = options.steps
        self.cold: bool = options.cold
        self.unproven: str = options.unproven
        self.cuda = rig.profile().backend == "cuda"
        self.alone: bool = options.alone and self.cuda
        self.notes = notes
        self.answers: dict[str, list[list[int]]] = {}
        self.unsteady: set[str] = set()

    def run(self) -> None:
        """Go through all steps that were asked for."""
        notes = self.notes
        notes.note("the driver lists GPUs in /proc", len(gpus.installed()))
        parts = [self._part(number, kind) for number, kind in enumerate(self.layout.models)]
        if "warm" in self.steps:
            for part in parts:
                self._warm(part)
            notes.finish("warm")
        if "disk" in self.steps:
            for part in parts:
                self._disk(part)
            notes.finish("disk")
        if self.alone:
            loading.settle(self.layout.gpus, notes)
        baseline = [rig.device_used(gpu) for gpu in range(self.layout.gpus)]
        with ExitStack() as stack:
            for agent in (agent for part in parts for agent in part.agents):
                stack.callback(agent.stop)
                agent.start()
            for part in parts:
                loading.load(part, notes, self.cold, self.alone)
            if self.alone:
                loading.beside(parts, notes, baseline)
            notes.finish("load")
            if "attach" in self.steps:
                self._attach(parts)
            if "restart" in self.steps:
                for part in parts:
                    self._restart(part)
                notes.finish("restart")

    def _part(self, number: int, kind: str) -> Deployed:
        """A model that no other layout uses, so that its pages may be dropped; the large one is everybody's."""
        model = rig.profile().model
        if kind != LARGE:
            model = self.folder / "models" / kind
            argv = [sys.executable, "-m", "tests.models.make_kind", kind, str(model)]
            subprocess.run(argv, check=True, timeout=self.notes.left(120))
        name = f"{kind}: " if len(self.layout.models) > 1 else ""
        self.notes.note(f"{name}checkpoint, bytes", sum(path.stat().st_size for path in weight_files(model)))
        return Deployed(name, self.folder / f"m{number}", self.layout, model, self.unproven)

    def _warm(self, part: Deployed) -> None:
        """Fill the compilers' caches, so that later starts compare."""
        with part.serving("warm", "--weight-cache-mode", "off", seconds=self.notes.left(400)) as engine:
            rig.answers(engine.first)
            self.notes.note(f"{part.name}warm: start to first token, s", engine.started.first_token)

    def _disk(self, part: Deployed) -> None:
        """What everything else is compared with. Asked twice: what differs here may differ anywhere."""
        with part.serving("disk", "--weight-cache-mode", "off", seconds=self.notes.left(400)) as engine:
            self.notes.note(f"{part.name}disk: start to first token, s", engine.started.first_token)
            self.answers[part.name] = rig.answers(engine.first)
            if rig.answers(engine.first) != self.answers[part.name]:
                self.unsteady.add(part.name)
                self.notes.note(f"{part.name}tokens", "not compared: the disk engine answers in two ways")

    def _attach(self, parts: list[Deployed]) -> None:
        with ExitStack() as stack:
            engines = []
            for part in parts:
                engine = stack.enter_context(part.serving("attached", seconds=self.notes.left(300)))
                engines.append((part, engine))
                self._look(part, engine, "attached")
            for part, engine in engines:
                self._same(part, engine, "of the attached engine")
                self._leased(part, [engine])
            self.notes.finish("attach")
            if "second" in self.steps:
                self._second(*engines[0])
            if "turn" in self.steps and self.cuda and self.layout.nodes == 1:
                self._turn(parts[0])
            if "kill" in self.steps:
                for part, engine in engines:
                    self._kill(part, engine)
                self.notes.finish("kill")

    def _second(self, part: Deployed, engine: Serving) -> None:
        with part.serving("second", seconds=self.notes.left(300)) as second:
            self._look(part, second, "second")
            self._same(part, second, "of a second engine")
            self._leased(part, [engine, second])
        self.notes.finish("second")

    def _turn(self, part: Deployed) -> None:
        """The engine's GPUs in the opposite order: however it gets its weights, its tokens are right."""
        turned = ",".join(str(gpu) for gpu in reversed(self.layout.gpus_of(0)))
        environment = {"CUDA_VISIBLE_DEVICES": turned}
        with part.serving("turned", seconds=self.notes.left(300), environment=environment) as engine:
            said = [line for line in engine.first.text().splitlines() if "weightcache: rank " in line]
            self.notes.note(f"CUDA_VISIBLE_DEVICES={turned}: the launcher says", said)
            self._same(part, engine, f"with CUDA_VISIBLE_DEVICES={turned}")
        self.notes.finish("turn")

    def _kill(self, part: Deployed, engine: Serving) -> None:
        """One rank's agent dies while the engine serves; a process with a warm device asks at once."""
        notes, files, agent = self.notes, weight_files(part.model), part.agents[-1]
        before = agent.report()
        pagecache.drop(files)
        found = agent.rescue()
        self._same(part, engine, "right after an agent's death")
        self._leased(part, [engine])
        after, read = agent.report(), pagecache.resident(files)
        notes.note(f"{part.name}rank {agent.rank} SIGKILLed: tensors again after, ms", found["answered_ms"])
        notes.note(f"{part.name}rank {agent.rank} SIGKILLed: bytes of the checkpoint read since", read)
        notes.check(after.pid != before.pid, f"{part.name}the agent of rank {agent.rank} was not killed")
        notes.check(found["intact"] and found["set_id"] == before.sets[0].id, f"{part.name}after a death: {found}")
        notes.check(after.sets[0].group == before.sets[0].group, f"{part.name}another group after a death")
        notes.check(read == 0, f"{part.name}{read} bytes of the checkpoint were read after an agent's death")
        soon = not self.cuda or found["answered_ms"] < SOON_MILLISECONDS
        notes.check(soon, f"{part.name}tensors only {found['answered_ms']} ms after an agent's death")
        self._same(part, engine, "after an agent's death")

    def _restart(self, part: Deployed) -> None:
        """All agents die with no engine there; the next engine attaches at once, and reads no weights."""
        notes, files, when = self.notes, weight_files(part.model), f"{part.name}all agents SIGKILLed"
        groups = [agent.report().sets[0].group for agent in part.agents]
        for agent in part.agents:
            os.kill(agent.pid, signal.SIGKILL)
        pagecache.drop(files)
        with part.serving("restart", seconds=notes.left(300)) as engine:
            read, allowed = pagecache.resident(files), sum(map(samples, files))
            self._look(part, engine, "all agents SIGKILLed")
            self._same(part, engine, "after the death of all agents")
            asked = [sum(row["milliseconds"].get(step, 0.0) for step in ASKED) for row in engine.decisions()]
        notes.note(f"{when}: asked to bound by rank, ms", [*map(round, asked)])
        notes.note(f"{when}: bytes of the checkpoint read (its identity's samples are at most {allowed})", read)
        notes.check(not self.cuda or max(asked, default=0) < SOON_MILLISECONDS, f"{when}: attached in {asked} ms")
        notes.check(read <= allowed, f"{when}: {read} bytes of the checkpoint were read")
        now = [agent.report().sets[0].group for agent in part.agents]
        notes.check(now == groups, f"{when}: groups {now}, not {groups}")

    def _look(self, part: Deployed, engine: Serving, name: str) -> None:
        """Whether all ranks attached, and how long each step took."""
        decisions = engine.decisions()
        outcomes = [(row["rank"], row["outcome"], row["code"]) for row in decisions]
        everyone = [row["outcome"] for row in decisions] == ["attached"] * self.layout.ranks
        self.notes.check(everyone, f"{part.name}{name}: {outcomes}")
        self.notes.note(f"{part.name}{name}: start to first token, s", engine.started.first_token)
        steps = [(row["rank"], row["milliseconds"]) for row in decisions if row["milliseconds"]]  # replicas: all rank 0
        self.notes.note(f"{part.name}{name}: steps by rank, ms", sorted(steps, key=lambda row: row[0]))

    def _same(self, part: Deployed, engine: Serving, whose: str) -> None:
        said = rig.answers(engine.first)
        wanted = self.answers.setdefault(part.name, said)  # without a disk engine, those of the first one attached
        self.notes.check(part.name in self.unsteady or said == wanted, f"{part.name}other tokens {whose}")

    def _leased(self, part: Deployed, engines: list[Serving]) -> None:
        """Every rank's set has a lease of each engine, held by the process of that rank."""
        wanted = set[int]().union(*(engine.schedulers() for engine in engines))

        def holders() -> list[int]:
            return [lease.pid for agent in part.agents for held in agent.report().sets for lease in held.leases]

        try:
            rig.wait_for(lambda: sorted(holders()) == sorted(wanted), self.notes.left(20), "leases")
        except AssertionError:
            self.notes.check(False, f"{part.name}leases of {holders()}, schedulers {sorted(wanted)}")
        self.notes.check(len(wanted) == self.layout.ranks * len(engines), f"{part.name}{len(wanted)} schedulers")


def main() -> int:
    """Run one layout; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=lambda text: tuple(text.split(",")), default=DEFAULT)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--cold", action="store_true", help="drop the checkpoint's pages before the load")
    parser.add_argument("--unproven", choices=("refuse", "check"), default="refuse", help="the policy of that name")
    parser.add_argument("--alone", action="store_true", help="nobody else is on these GPUs: measure their memory")
    options = parser.parse_args()
    # Where it is ignored (a job in the background), what is started here would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    notes = Notes(options.folder / "result.json", options.seconds)
    try:
        Story(options, notes).run()
    except (Exception, KeyboardInterrupt) as error:
        notes.failed = f"{type(error).__name__}: {error}"[-1500:]
    notes.write()
    return 1 if notes.broken or notes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
