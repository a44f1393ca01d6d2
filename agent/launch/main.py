"""``wcache-launch``: decide what the launcher can decide, then run SGLang under it."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from weightcache import config as configuration
from weightcache.config import Config, RankConfig
from weightcache.engine.directive import Directive
from weightcache.errors import ConfigError, Mismatch, UsageError, WeightcacheError
from weightcache.launch import (
    caches,
    daemon,
    decisions,
    explain,
    interpreter,
    layout,
    listener,
    restart,
    session,
    signals,
    slots,
    sockets,
    supervisor,
)
from weightcache.launch.arguments import Options, split
from weightcache.launch.console import say, write
from weightcache.launch.help import HELP
from weightcache.launch.refusals import refused
from weightcache.sglang_options import Given, given
from weightcache.warm.messages import Layout
from weightcache.warm.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightcache.launch.slot import Slot
    from weightcache.standby.places import SlotName


HOPELESS_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    handed = os.environ.get("LISTEN_PID") == str(os.getpid())
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except WeightcacheError as error:
        say(error.message)
        if isinstance(error, Mismatch) and error.differences:
            write(decisions.differences(error.differences), sys.stderr)
        if isinstance(error, UsageError):
            say("wcache-launch --wcache-help lists the options")
        if handed and isinstance(error, UsageError | ConfigError):
            # A unit that nobody but an operator can mend is started again for every client that waits at its socket.
            time.sleep(HOPELESS_SECONDS)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _main(argv: Sequence[str]) -> int:
    options = split(argv)
    if options.help:
        write(HELP, sys.stdout)
        return 0
    if options.slot is not None:
        return _in_slot(options.slot, options)
    if not options.sglang:
        raise UsageError("no arguments for SGLang: at least --model-path is needed")
    launch = given(options.sglang)
    if launch.flag("help") or (options.mode == "off" and not options.explain):
        return _plain(options)
    config = _config(options, options.config is not None or options.reaction == "error")
    _check_port(config, launch)
    if options.explain == "short":
        where = sockets.directory(options.runtime_dir, config)
        found = sockets.discover(where, config, launch.text("device"), activate=False)
        return explain.explain(_of_this_launch(found, launch, ask_driver=True), launch, refused(launch))
    python = interpreter.choose(options.python, config)
    if options.explain:
        return session.explain(_launch(options, config, launch, python))
    start = partial(_started, options, config, launch, python, listener.held(launch, options.hold_port, os.environ))
    if options.restart:
        return session.leave(restart.supervise(start, _pool(options, launch)))
    with start() as plan:
        served = session.serve(plan)
    return session.leave(served.status)


def _in_slot(name: SlotName, options: Options) -> int:
    options, engine = slots.completed(options, name)
    launch = given(options.sglang)
    config = _config(options, options.config is not None or options.reaction == "error")
    _check_port(config, launch)
    python = interpreter.choose(options.python, config)
    try:
        with signals.interrupting(), slots.opened(name, engine, launch) as slot:
            start = partial(_started, options, config, launch, python, slot.listener, slot)
            status = restart.supervise(start, None, slot)
    except signals.Interrupted as interrupted:
        status = -interrupted.number
    return session.leave(status)


def _launch(options: Options, config: Config, launch: Given, python: str) -> session.Launch:
    directive = _directive(options, config, launch, python)
    strict = options.reaction == "error"
    port = launch.number("port", listener.DEFAULT_PORT)
    return session.Launch(python, options.sglang, directive, strict, port, _local_ranks(launch))


@contextmanager
def _started(
    options: Options,
    config: Config,
    launch: Given,
    python: str,
    port: socket.socket | None,
    slot: Slot | None = None,
) -> Iterator[session.Launch]:
    """What to run, decided now; inside the block, what it needs besides is held."""
    began = time.monotonic()
    plan = _launch(options, config, launch, python)
    with caches.kept(options.levers, config.compiled, python) as kept:
        directive = replace(plan.directive, warmed=kept.warmed(plan.arguments))
        plan = replace(plan, directive=directive, variables=kept.variables, listener=port, began=began)
        # In a slot nobody need look whether the server listens: it says so.
        yield plan if slot is None else replace(plan, slot=slot, port=None)


def _pool(options: Options, launch: Given) -> Pool | None:
    if "workers" not in options.levers:
        return None
    attention = launch.flag("enable_dp_attention") or (launch.number("attn_dp_size") or 1) > 1
    shape = Layout(_local_ranks(launch), launch.number("dp_size") or 1, attention)
    return Pool(supervisor.fresh, shape, say)


def _of_this_launch(found: sockets.Agents, launch: Given, ask_driver: bool) -> sockets.Agents:
    """The agents whose state matters to this launch. Only the driver knows its GPUs, and asking takes time."""
    if not found.agents:
        return found
    try:
        if found.backend == "host":
            return found.only([RankConfig(rank) for rank in layout.ranks(launch)][: layout.reporting(launch)])
        if ask_driver:
            return found.only(layout.rank_configs(launch)[1])
        return found if len(found.agents) == len(layout.ranks(launch)) else replace(found, agents=())
    except WeightcacheError:
        return found


def _plain(options: Options) -> int:
    """Become plain SGLang, with nothing added."""
    config = Config() if options.python else _config(options, strict=False)
    python = interpreter.choose(options.python, config)
    command = [python, "-m", "sglang.launch_server", *options.sglang]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, os.environ)  # noqa: S606
    except OSError as error:
        raise UsageError(f"{python} cannot be started ({error.strerror})") from None


def _check_port(config: Config, launch: Given) -> None:
    """Engines and loaders of several nodes meet in their own ways, on the same first node. Raises UsageError."""
    port, deployment = launch.text("dist_init_addr").rpartition(":")[2], config.deployment
    if deployment.node_count > 1 and port in (str(deployment.port), str(deployment.port + 1)):
        taken = f"{deployment.port} and {deployment.port + 1}"
        raise UsageError(f"--dist-init-addr: the loaders of this deployment meet at ports {taken}: choose another one")


def _local_ranks(launch: Given) -> int:
    try:
        return layout.reporting(launch)
    except UsageError:
        return 1  # SGLang will say what is wrong


def _config(options: Options, strict: bool) -> Config:
    try:
        return configuration.load(options.config)
    except ConfigError as error:
        if strict:
            raise
        # The configuration is the agents'; an engine that may load from disk starts without it.
        say(f"{error.message}; going on with the defaults")
        return Config()


def _directive(options: Options, config: Config, launch: Given, python: str) -> Directive:
    strict = options.reaction == "error"
    from_disk = ""
    if refusal := refused(launch):
        if strict:
            raise UsageError(refusal)
        from_disk = refusal
    if options.mode == "daemon":
        found = daemon.agents(options, config, launch, python)
    else:
        where = sockets.directory(options.runtime_dir, config)
        found = sockets.discover(where, config, launch.text("device"))
    if not found.agents and not from_disk:
        error = found.missing()
        if strict or options.explain:
            raise error
        from_disk = error.message
    if from_disk:
        say(f"{from_disk}: the weights will be loaded from disk")
    elif options.mode == "client":
        for sentence in explain.early(_of_this_launch(found, launch, ask_driver=False), launch):
            say(sentence)
    return Directive(
        purpose="engine",
        backend=found.backend,
        sockets=found.sockets,
        group=uuid.uuid4().hex,
        on_mismatch=options.reaction,
        wait_seconds=options.wait_seconds or 0.0,
        donate=not strict and not from_disk and not options.explain,
        from_disk=from_disk,
        levers=options.levers,
    )
