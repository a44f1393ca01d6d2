"""A loader for tests: the real protocol and real sealed memory, but random bytes and no torch.

It takes the command line of ``weightcache.loader`` (roles load, lookout and check; hosts meet and look out as real ones
do, but what their ranks hold they do not tell each other) and runs on any Python with weightcache on
its path. What it does is chosen by its environment, that is by ``[loader] environment``:

    WCTEST_GATES        a folder: where it holds a FIFO named after a gate, the loader writes NAME.reached (its pid) and
                        blocks until somebody writes to the FIFO. Gates in order: started, begun, loading, staged (once
                        a set), complete (all sets handed over, no commit yet), agreed (so have all ranks), committed;
                        checking (role check). With several ranks those from begun on are NAME-RANK
    WCTEST_MODE         one thing to do wrong, see MODES
    WCTEST_RANK         the rank that does it, where there are several
    WCTEST_ROLES        the sets to publish, default target
    WCTEST_ARENAS       sizes of each set's arenas in bytes, default 65536,65536
    WCTEST_FINGERPRINT  a JSON object of fields that differ from ``fingerprint()``
    WCTEST_SEED         another number makes other bytes; so does one in the file ``seed`` of WCTEST_GATES, where it is

At a gate, too, the loader ends when the agent does.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from weightcache import manifest, protocol, transport
from weightcache.client import Conversation
from weightcache.content import content_of
from weightcache.errors import WeightcacheError
from weightcache.fingerprint import Fingerprint
from weightcache.loader import facts, gathering, lookout, standing
from weightcache.loader.meeting import Meeting
from weightcache.loader.standing import Loaded, Plan, Standing
from weightcache.loader.wire import Hello
from weightcache.memory import memfd
from weightcache.paths import RankPaths
from weightcache.protocol import ArenaInfo, LoadProgress, SetInfo

MODES = {
    "exit": "say something and exit with status 3 before connecting",
    "abort": "send Abort with code checkpoint at half of the load",
    "close": "close the connection at half of the load and live on",
    "hang": "stop for ever at half of the load",
    "deaf": "the same, and ignore SIGTERM",
    "flood": "write a lot of output, then go on",
    "linger": "stay for ever after the commit",
    "leave-child": "leave a child in the background when ending",
    "bad-token": "begin with a wrong token",
    "unsealed": "publish an arena that can still change",
    "wrong-size": "publish an arena that is smaller than announced",
    "unsealed-manifest": "publish a manifest that can still change",
    "bad-manifest": "publish a manifest that is no JSON",
    "large-manifest": "publish a manifest that describes more bytes than the arenas use",
    "missing-fd": "publish one descriptor too few",
    "wrong-count": "commit more sets than were published",
    "wrong-digest": "announce digests that do not fit the bytes, as memory that went bad would look",
    "check-crash": "role check: die by SIGKILL",
    "check-fault": "role check: die by SIGSEGV, as memory that kills its readers would have it",
    "check-hang": "role check: stop for ever",
}
ARENAS = (65536, 65536)
SUFFIX = ""
"""What the gates of this process end with."""


def fingerprint(**changes: Any) -> Fingerprint:
    """A fingerprint of this loader's sets; ``changes`` are fields that differ."""
    kinds = {f.name: f.type for f in dataclasses.fields(Fingerprint)}
    numbers = {"schema", "tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "ep_size", "ep_rank", "attention_dp"}
    numbers |= {"attention_cp_size", "moe_dp_size"}
    values: dict[str, Any] = {name: 1 if name in numbers else f"a-{name}" for name in kinds}
    return Fingerprint(**(values | {"role": "target", "schema": manifest.SCHEMA} | changes))


def content(sizes: Sequence[int]) -> manifest.Manifest:
    """A manifest of one tensor that fills all arenas."""
    total = sum(sizes)
    return manifest.Manifest(
        bytes=total,
        storages=(manifest.Storage(0, total, True),),
        inline=(),
        tensors=(manifest.Tensor(0, 0, (total,), (1,), "uint8", "parameter", "torch.nn.Parameter", False, ()),),
        modules=(manifest.Module(("",), "test.Model"),),
        slots=(manifest.Slot(0, manifest.PARAMETER, (("attr", "weight"),), 0),),
        removed=(),
        scalars=(),
    )


def arena_bytes(seed: int, number: int, size: int) -> bytes:
    """The bytes of one arena."""
    return random.Random(seed * 1000 + number).randbytes(size)


def digest(data: bytes) -> str:
    """The digest that this loader announces and checks."""
    return hashlib.sha256(data).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class Made:
    """One set, ready to be published. The descriptors are the caller's."""

    info: SetInfo
    fds: tuple[int, ...]


def make(print_: Fingerprint, sizes: Sequence[int] = ARENAS, seed: int = 0, mode: str = "") -> Made:
    """Make a set, as wrong as ``mode`` says."""
    data = [arena_bytes(seed, number, size) for number, size in enumerate(sizes)]
    body = content([*sizes, 512] if mode == "large-manifest" else sizes)
    text = b"no JSON" if mode == "bad-manifest" else manifest.encode(body)
    fds = [_unsealed(text) if mode == "unsealed-manifest" else memfd.sealed("test-manifest", text)]
    for number, part in enumerate(data):
        wrong = number == len(data) - 1
        if wrong and mode == "missing-fd":
            continue
        if wrong and mode == "unsealed":
            fds.append(_unsealed(part))
        else:
            fds.append(memfd.sealed("test-arena", part[:-512] if wrong and mode == "wrong-size" else part))
    info = SetInfo(
        role=print_.role,
        model="a-model",
        revision="a-revision",
        fingerprint=print_,
        arenas=tuple(
            ArenaInfo(len(part), len(part), digest(b"bad" if mode == "wrong-digest" else part)) for part in data
        ),
        tensors=1,
        load_seconds=0.1,
        bytes_read=sum(sizes),
    )
    return Made(info, tuple(fds))


def publish(conversation: Conversation, made: Made, contents: tuple[str, ...] = ()) -> str:
    """Publish one set and close its descriptors; returns its id."""
    try:
        conversation.send(protocol.Publish(made.info, contents), made.fds)
        answer, _ = conversation.receive()
    finally:
        transport.close_all(made.fds)
    if not isinstance(answer, protocol.Published):
        raise TypeError(f"unexpected {answer}")
    return answer.set_id


def _unsealed(data: bytes) -> int:
    fd = memfd.create("test-unsealed")
    os.write(fd, data)
    return fd


def reach(name: str, conversation: Conversation | None = None) -> None:
    """Pass a gate, or wait at it; end when the agent ends."""
    folder = os.environ.get("WCTEST_GATES")
    name += SUFFIX
    if not folder or not (Path(folder) / name).is_fifo():
        return
    fifo = os.open(Path(folder) / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    temporary = Path(folder) / f".{name}.{os.getpid()}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(Path(folder) / f"{name}.reached")
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    if conversation is not None:
        poll.register(conversation.sock, select.POLLIN)
    for fd, _ in poll.poll():
        if fd != fifo:
            sys.exit(4)
    os.close(fifo)


def stop_for_ever(deaf: bool = False) -> NoReturn:
    """Do nothing at all; not even end on SIGTERM, if ``deaf``."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def load(args: argparse.Namespace) -> int:
    """Role load: publish to the rank's agent, or in one process for each rank to the agents of all of them."""
    mode = os.environ.get("WCTEST_MODE", "")
    sizes = [int(size) for size in os.environ.get("WCTEST_ARENAS", "65536,65536").split(",")]
    reach("started")
    print("test loader starts", *args.arguments, flush=True)
    if mode == "exit":
        print("cannot find the weights", file=sys.stderr, flush=True)
        return 3
    if mode == "flood":
        for number in range(5000):
            print(f"line {number} " + "x" * 100)
    agents = [int(entry.rpartition(":")[2]) for entry in args.ranks.split(",")]
    token = os.environ["WEIGHTCACHE_TOKEN"]
    with _meeting(args) as meeting:
        args.group = meeting.group
        status = _load(args, agents, token, mode, sizes)
        if status == 0:
            meeting.finish()
    return status


def _meeting(args: argparse.Namespace) -> Meeting:
    nodes = tuple((args.nodes or "").split(","))
    if len(nodes) < 2:
        return Meeting(0, (), args.group, {})
    ranks = tuple(int(entry.partition(":")[0]) for entry in args.ranks.split(","))
    me = Hello(int(args.node), nodes, ranks, args.group, facts.gather(args.arguments))
    return gathering.meet(me, int(args.meet_port), float(args.meet_seconds))


def _load(args: argparse.Namespace, agents: list[int], token: str, mode: str, sizes: list[int]) -> int:
    if len(agents) > 1:
        return _together(args, agents, dict(entry.split("=") for entry in token.split(",")), mode, sizes)
    _load_rank(args, agents[0], "0" * 32 if mode == "bad-token" else token, mode, sizes, Ranks(1))
    if mode == "linger":
        stop_for_ever()
    if mode == "leave-child" and os.fork() == 0:
        stop_for_ever()
    return 0


def _together(
    args: argparse.Namespace, agents: Sequence[int], tokens: dict[str, str], mode: str, sizes: list[int]
) -> int:
    """One process a rank; nobody commits before all can; one that fails ends the others."""
    import multiprocessing.connection

    apart = multiprocessing.get_context("fork")
    ranks = Ranks(len(agents))

    def run(agent: int) -> None:
        global SUFFIX
        SUFFIX = f"-{agent}"
        wrong = mode if os.environ.get("WCTEST_RANK", str(agent)) == str(agent) else ""
        ranks.own = agents.index(agent)
        _load_rank(args, agent, tokens[str(agent)], wrong, sizes, ranks)

    running = [apart.Process(target=run, args=(agent,), daemon=True) for agent in agents]
    for process in running:
        process.start()
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process not in ended]
        if any(process.exitcode for process in ended):
            for process in running:
                process.kill()
            return 1
    return 0


class Ranks:
    """The ranks of a launch, and how they talk to each other: a place in shared memory for each."""

    PLACE = 8192

    def __init__(self, count: int) -> None:
        apart = multiprocessing.get_context("fork")
        self.count = count
        self.own = 0
        self.wait = apart.Barrier(count).wait
        self._memory = mmap.mmap(-1, count * self.PLACE)

    def exchange(self, said: bytes) -> list[bytes]:
        """What every rank says, in their order."""
        start = self.own * self.PLACE
        self._memory[start : start + 4 + len(said)] = len(said).to_bytes(4, "big") + said
        self.wait()
        places = [self._memory[rank * self.PLACE : (rank + 1) * self.PLACE] for rank in range(self.count)]
        self.wait()
        return [place[4 : 4 + int.from_bytes(place[:4], "big")] for place in places]


def _stand(conversation: Conversation, anew: bool, print_: Fingerprint) -> Standing:
    """Where this rank stands, after it has looked at what its agent lends."""
    if anew:
        return Standing("anew", why="everything is to be loaded again")
    try:
        conversation.send(protocol.Borrow(print_.role, print_))
        lent, fds = conversation.receive(max_fds=transport.MAX_FDS)
    except WeightcacheError as error:
        return Standing("anew", why=error.message)
    transport.close_all(fds)
    if not isinstance(lent, protocol.Lent) or len(fds) != 1 + len(lent.arenas):
        raise TypeError(f"unexpected {lent}")
    return Standing("holds", lent.group, lent.contents)


def _retained(conversation: Conversation, ranks: Ranks, plan: Plan) -> bool:
    """Whether all ranks have what they lost, and this one goes on with what it holds."""
    mine = Loaded(plan.contents[ranks.own])
    if why := standing.misfit(plan, standing.contents(ranks.exchange(standing.encode(mine)))):
        _anew(conversation, plan, why)
        return False
    ranks.wait()
    conversation.request(protocol.Retain(plan.group), protocol.Committed)
    return True


def _contents(conversation: Conversation, ranks: Ranks, plan: Plan, made: Sequence[Made]) -> list[tuple[str, ...]]:
    """What all ranks have, for each set: if it is what was lost, or after all have loaded anew."""
    own = [content_of(each.info, os.pread(each.fds[0], manifest.MAX_BYTES, 0)) for each in made]
    if plan.group:
        mine = Loaded(own[0])
        if not (why := standing.misfit(plan, standing.contents(ranks.exchange(standing.encode(mine))))):
            return [plan.contents]
        _anew(conversation, plan, why)
    heard = [ranks.exchange(standing.encode(Loaded(content))) for content in own]
    return [tuple(loaded.content for loaded in standing.contents(each)) for each in heard]


def _anew(conversation: Conversation, plan: Plan, why: str) -> None:
    try:
        plan.require_room(why)
    except WeightcacheError as error:
        conversation.send(protocol.Abort(error.code, error.message))
        sys.exit(1)
    conversation.request(protocol.Anew(), protocol.Accepted, 30.0)


def _seed() -> int:
    folder = os.environ.get("WCTEST_GATES")
    if folder and (Path(folder) / "seed").exists():
        return int((Path(folder) / "seed").read_text())
    return int(os.environ.get("WCTEST_SEED", "0"))


def _load_rank(args: argparse.Namespace, agent: int, token: str, mode: str, sizes: list[int], ranks: Ranks) -> None:
    conversation = Conversation(RankPaths(args.socket_dir, agent).publish)
    begun = conversation.request(protocol.Begin("loader", args.group, token), protocol.Accepted, 30.0)
    reach("begun", conversation)
    roles = os.environ.get("WCTEST_ROLES", "target").split(",")
    changes = json.loads(os.environ.get("WCTEST_FINGERPRINT", "{}"))
    seed = _seed()
    plan = Plan()
    if ranks.count > 1:
        mine = _stand(conversation, args.anew, fingerprint(**changes)) if begun.holds or args.anew else Standing("lost")
        mine = dataclasses.replace(mine, in_use=begun.in_use)
        try:
            plan = standing.decide(standing.standings(ranks.exchange(standing.encode(mine))))
        except WeightcacheError as error:
            conversation.send(protocol.Abort(error.code, error.message))
            sys.exit(1)
        if plan.group and mine.kind == "holds":
            reach("waiting", conversation)
            if _retained(conversation, ranks, plan):
                return
            plan = Plan()
        elif plan.group:
            rejoin = protocol.Rejoin(plan.group, "target", plan.contents[ranks.own])
            conversation.request(rejoin, protocol.Accepted, 30.0)
        elif begun.holds:
            conversation.request(protocol.Anew(), protocol.Accepted, 30.0)
        os.write(1, f"rank {agent} loads, {'alone' if plan.group else 'with all'}\n".encode())  # in one piece
    total = len(roles) * sum(sizes)
    conversation.send(protocol.Progress(LoadProgress("loading", 0, total, 0.0)))
    conversation.send(protocol.Progress(LoadProgress("loading", total // 2, total, 0.1)))
    reach("loading", conversation)
    if mode == "abort":
        conversation.send(protocol.Abort("checkpoint", "the checkpoint /models/none is missing"))
        sys.exit(1)
    if mode == "close":
        conversation.close()
        stop_for_ever()
    if mode in ("hang", "deaf"):
        stop_for_ever(deaf=mode == "deaf")
    sets = [
        make(fingerprint(**(changes | {"role": role})), sizes, seed + number, mode) for number, role in enumerate(roles)
    ]
    contents: list[tuple[str, ...]] = [()] * len(sets)
    if ranks.count > 1:
        contents = _contents(conversation, ranks, plan, sets)
    for number, made in enumerate(sets):
        publish(conversation, made, contents[number])
        conversation.send(protocol.Progress(LoadProgress("publishing", (number + 1) * sum(sizes), total, 0.2)))
        reach("staged", conversation)
    reach("complete", conversation)
    ranks.wait()
    reach("agreed", conversation)
    conversation.request(protocol.Commit(len(roles) + (mode == "wrong-count")), protocol.Committed)
    reach("committed", conversation)


def check(args: argparse.Namespace) -> int:
    """Role check: compare the digests of one set."""
    mode = os.environ.get("WCTEST_MODE", "")
    reach("checking")
    print(json.dumps({"code": "armed"}), flush=True)
    if mode == "check-fault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "check-crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "check-hang":
        stop_for_ever()
    with Conversation(args.socket) as conversation:
        conversation.send(protocol.Inspect(args.set))
        message, fds = conversation.receive(max_fds=transport.MAX_FDS)
        if not isinstance(message, protocol.Attached):
            raise TypeError(f"unexpected {message}")
        started = time.monotonic()
        wrong = [
            number
            for number, (arena, fd) in enumerate(zip(message.arenas, fds[1:], strict=True))
            if digest(os.pread(fd, arena.used, 0)) != arena.digest
        ]
    if wrong:
        print(json.dumps({"code": "damaged", "message": f"arenas {wrong} differ from their digests"}))
        return 1
    print(json.dumps({"code": "ok", "seconds": time.monotonic() - started}))
    return 0


def main() -> int:
    """Run one role."""
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    loading = roles.add_parser("load")
    loading.add_argument("--backend", required=True)
    loading.add_argument("--socket-dir", type=Path, required=True)
    loading.add_argument("--ranks", required=True)
    loading.add_argument("--group", required=True)
    loading.add_argument("--arena-bytes", type=int, required=True)
    loading.add_argument("--unproven", default="refuse")
    loading.add_argument("--anew", action="store_true")
    for option in ("--node", "--nodes", "--meet-port", "--meet-seconds"):
        loading.add_argument(option)
    loading.add_argument("arguments", nargs="*")
    loading.set_defaults(run=load)
    looking = roles.add_parser("lookout")
    lookout.add_arguments(looking)
    looking.set_defaults(run=lookout.run)
    checking = roles.add_parser("check")
    checking.add_argument("--socket", type=Path, required=True)
    checking.add_argument("--set", required=True)
    checking.add_argument("--backend", required=True)
    checking.add_argument("--json", action="store_true")
    checking.add_argument("--announce", action="store_true")
    checking.set_defaults(run=check)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
