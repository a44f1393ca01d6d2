"""The ``load`` role: a tiny parent without SGLang, and below it one SGLang launch that publishes and ends.

A failing SGLang scheduler sends SIGQUIT to its parent. This parent ignores it, reaps the child, and says how it ended.
A child that knows why tells the agent itself; otherwise the agent has this process's exit status and last lines.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from weightcache import checkpoint
from weightcache.engine.directive import UNPROVEN_VARIABLE, Directive, token_for
from weightcache.errors import DeviceUnavailable, LoadFailed, WeightcacheError
from weightcache.paths import RankPaths

PR_SET_PDEATHSIG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the agent passes, then ``--`` and SGLang's arguments."""
    parser.add_argument("--backend", choices=("host", "cuda"), required=True)
    parser.add_argument("--socket-dir", type=Path, required=True, help="directory of the agents' sockets")
    parser.add_argument("--ranks", default="0", help="the ranks of this host that publish, such as 0,1")
    parser.add_argument("--group", default="", help="name of this launch")
    parser.add_argument("--arena-bytes", type=int, default=0)
    parser.add_argument("--unproven", choices=("refuse", "check"), default="refuse", help="methods without evidence")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="SGLang's arguments")


def run(args: argparse.Namespace) -> int:
    """Run one load; 0 when the agents acknowledged it."""
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    ranks = [int(rank) for rank in args.ranks.split(",")]
    unproven = args.unproven
    if os.environ.get(UNPROVEN_VARIABLE) == "allow":
        unproven = "allow"
        said = "methods without evidence are published: this is for a comparison"
        print(f"weightcache-loader: {said}", file=sys.stderr, flush=True)
    sockets = {f"rank:{rank}": str(RankPaths(args.socket_dir, rank).public) for rank in ranks}
    directive = Directive(
        purpose="loader",
        backend=args.backend,
        sockets=sockets,
        group=args.group,
        arena_bytes=args.arena_bytes,
        unproven=unproven,
    )
    try:
        _check_device(args.backend)
        _check_model(arguments)
    except WeightcacheError as error:
        tell(directive, error)
        raise
    status = _launch(directive, arguments)
    if status:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        print(f"weightcache-loader: SGLang ended with {how} before the weights were published", file=sys.stderr)
        return LoadFailed.exit_status
    return 0


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


def _launch(directive: Directive, arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    # A load for an agent that was killed would hold the device for minutes, for nobody.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def tie_to_parent() -> None:
        # Ignored signals survive exec, and SGLang's own processes rely on SIGQUIT's default.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(
        [sys.executable, "-m", "weightcache.loader.sglang_launch", *arguments],
        env={**os.environ, **directive.environment()},
        stdin=subprocess.DEVNULL,
        preexec_fn=tie_to_parent,
    )
    # SIGKILL, because SGLang would first end its own children with patience; nothing that it holds outlives it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _received, _frame: child.kill())
    return child.wait()


def tell(directive: Directive, error: WeightcacheError) -> None:
    """Give every agent of this load the reason why it failed."""
    from weightcache.loader.publication import Publication

    for public in map(Path, directive.sockets.values()):
        agent = int(public.name.partition(".")[0])
        path = RankPaths(public.parent, agent).publish
        try:
            Publication(path, source="loader", group=directive.group, token=token_for(agent)).abort(error)
        except WeightcacheError:
            continue
