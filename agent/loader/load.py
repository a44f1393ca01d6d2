"""The ``load`` role: a tiny parent without SGLang, and below it one SGLang launch that publishes and ends.

One launch builds all of this host's ranks, each of which publishes to its own agent. With several nodes the parents
meet first (gathering.py), and a load that fails on one node fails on all (meeting.py).

A failing SGLang scheduler sends SIGQUIT to its parent. This parent ignores it, ends what is left of the launch, and
says why it failed: to all agents of this host, and to the other nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weightcache import checkpoint
from weightcache.engine.directive import UNPROVEN_VARIABLE, Directive, token_for
from weightcache.errors import DeviceUnavailable, LoadFailed, UsageError, WeightcacheError
from weightcache.loader import facts, gathering, reasons, rendezvous
from weightcache.loader.family import Family, end_with_parent
from weightcache.loader.meeting import Meeting
from weightcache.loader.wire import Hello
from weightcache.paths import RankPaths

LAUNCH = ("-m", "weightcache.loader.sglang_launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the agent passes, then ``--`` and SGLang's arguments."""
    parser.add_argument("--backend", choices=("host", "cuda"), required=True)
    parser.add_argument("--socket-dir", type=Path, required=True, help="directory of the agents' sockets")
    parser.add_argument(
        "--ranks",
        default="0",
        help="this host's ranks in the launch: 0,1, or 0:2,1:3 for agents 2, 3",
    )
    parser.add_argument("--group", default="", help="name of this launch")
    parser.add_argument("--arena-bytes", type=int, default=0)
    parser.add_argument("--unproven", choices=("refuse", "check"), default="refuse", help="methods without evidence")
    parser.add_argument("--anew", action="store_true", help="ranks load whatever they hold already")
    parser.add_argument("--node", type=int, default=0, help="this host's number among --nodes")
    parser.add_argument("--nodes", default="", help="all hosts that load together, in order: 10.0.0.1,10.0.0.2")
    parser.add_argument("--meet-port", type=int, default=0, help="port of the first node where the others report")
    parser.add_argument("--meet-seconds", type=float, default=600.0, help="how long the nodes wait for each other")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="SGLang's arguments")


def run(args: argparse.Namespace) -> int:
    """Run one load; 0 when the agents acknowledged it. Raises why it failed, once agents and other nodes know it."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    unproven = args.unproven
    if os.environ.get(UNPROVEN_VARIABLE) == "allow":
        unproven = "allow"
        said = "methods without evidence are published: this is for a comparison"
        print(f"weightcache-loader: {said}", file=sys.stderr, flush=True)
    agents = agents_of(args.ranks)
    directive = Directive(
        purpose="loader",
        backend=args.backend,
        sockets={f"rank:{rank}": str(RankPaths(args.socket_dir, agent).public) for rank, agent in agents.items()},
        group=args.group,
        arena_bytes=args.arena_bytes,
        unproven=unproven,
        anew=args.anew,
    )
    try:
        with _meeting(args, tuple(agents), arguments) as meeting:
            directive = replace(directive, group=meeting.group)
            try:
                _check_device(args.backend)
                _check_model(arguments)
                where = rendezvous.arguments(_nodes(args), args.meet_port)
                _launch(directive, (*arguments, *where), meeting)
            except WeightcacheError as error:
                meeting.fail(error.message)
                raise
            meeting.finish()
    except WeightcacheError as error:
        tell(directive, error)
        raise
    return 0


def agents_of(text: str) -> dict[int, int]:
    """``0,1`` or ``0:2,1:3`` as {rank within the launch: number of its agent}. Raises UsageError."""
    agents: dict[int, int] = {}
    for entry in text.split(","):
        rank, colon, agent = entry.partition(":")
        numbers = (rank, agent) if colon else (rank, rank)
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise UsageError(f"--ranks {text}: expected numbers such as 0,1 or 0:2,1:3")
        agents[int(numbers[0])] = int(numbers[1])
    if len(agents) != text.count(",") + 1 or len(set(agents.values())) != len(agents):
        raise UsageError(f"--ranks {text}: a rank or an agent is named twice")
    return agents


def _nodes(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.nodes.split(",")) if args.nodes else ()


def _meeting(args: argparse.Namespace, ranks: tuple[int, ...], arguments: Sequence[str]) -> Meeting:
    """Meet the loaders of the other nodes, if there are any. Raises UsageError, LoadFailed."""
    nodes = _nodes(args)
    if len(nodes) < 2:
        return Meeting(0, nodes, args.group, {})
    if not 0 <= args.node < len(nodes) or not 0 < args.meet_port < 65535 or args.meet_seconds <= 0:
        raise UsageError(f"--node {args.node} of --nodes {args.nodes} at --meet-port {args.meet_port} cannot meet")
    end_with_parent()
    me = Hello(args.node, nodes, ranks, args.group, facts.gather(arguments))
    return gathering.meet(me, args.meet_port, args.meet_seconds)


def model_path(arguments: Sequence[str]) -> str:
    """The value of --model-path (or --model) among SGLang's arguments, or an empty text."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--model-path", "--model"):
            return value if equals else (arguments[index + 1] if index + 1 < len(arguments) else "")
    return ""


def _check_device(backend: str) -> None:
    """Refuse a host without a GPU at once, and in words."""
    if backend == "cuda" and not Path("/dev/nvidiactl").exists():
        raise DeviceUnavailable(
            "this host shows no NVIDIA GPU (there is no /dev/nvidiactl): load the driver, give the loader the device, "
            'or set memory.backend = "host"'
        )


def _check_model(arguments: Sequence[str]) -> None:
    """Refuse a missing or damaged checkpoint in milliseconds instead of after SGLang's imports."""
    path = Path(model_path(arguments))
    if path.is_absolute() or path.exists():
        checkpoint.check(path)


def _launch(directive: Directive, arguments: Sequence[str], meeting: Meeting) -> None:
    """Run SGLang until all ranks have published. Raises the reason of whichever rank or node failed first."""
    variables = {**os.environ, **rendezvous.variables(meeting.address), **directive.environment()}
    command = [sys.executable, *LAUNCH, *arguments]
    alone = len(directive.sockets) == 1 and not meeting.address
    with Family(command, variables, alone=alone) as family:
        if elsewhere := meeting.until(family.pidfd):
            family.told(elsewhere)
            raise LoadFailed(elsewhere)
        failure = family.end()
    if failure is None:
        return
    if not failure.own and (elsewhere := meeting.until(None, reasons.CAUSE_SECONDS)):
        raise LoadFailed(elsewhere)
    raise failure.error()


def tell(directive: Directive, error: WeightcacheError) -> None:
    """Give every agent of this load the reason why it failed. Those whose rank did so already refuse it."""
    from weightcache.loader.publication import Publication

    for public in map(Path, directive.sockets.values()):
        agent = int(public.name.partition(".")[0])
        path = RankPaths(public.parent, agent).publish
        try:
            Publication(path, source="loader", group=directive.group, token=token_for(agent)).abort(error)
        except WeightcacheError:
            continue
