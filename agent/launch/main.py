"""``wcache-launch``: decide what the launcher can decide, then run SGLang under it."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from weightcache import config as configuration
from weightcache.config import Config
from weightcache.errors import ConfigError, Mismatch, UsageError, WeightcacheError
from weightcache.launch import (
    decisions,
    explain,
    interpreter,
    listener,
    plan,
    restart,
    session,
    signals,
    slots,
    sockets,
)
from weightcache.launch.arguments import Options, split
from weightcache.launch.console import say, write
from weightcache.launch.help import HELP
from weightcache.launch.refusals import refused
from weightcache.sglang_options import Given, given

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return explain.explain(plan.of_this_launch(found, launch, ask_driver=True), launch, refused(launch))
    python = interpreter.choose(options.python, config)
    if options.explain:
        return session.explain(plan.launched(options, config, launch, python))
    start = partial(plan.started, options, config, launch, python, listener.held(launch, options.hold_port, os.environ))
    if options.restart:
        return session.leave(restart.supervise(start, plan.pool(options, launch)))
    with start() as chosen:
        served = session.serve(chosen)
    return session.leave(served.status)


def _in_slot(name: SlotName, options: Options) -> int:
    options, engine = slots.completed(options, name)
    launch = given(options.sglang)
    config = _config(options, options.config is not None or options.reaction == "error")
    _check_port(config, launch)
    python = interpreter.choose(options.python, config)
    try:
        with signals.interrupting(), slots.opened(name, engine, launch, options.runtime_dir) as slot:
            start = partial(plan.started, options, config, launch, python, slot.listener, slot)
            status = restart.supervise(start, None, slot)
    except signals.Interrupted as interrupted:
        status = -interrupted.number
    return session.leave(status)


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


def _config(options: Options, strict: bool) -> Config:
    try:
        return configuration.load(options.config)
    except ConfigError as error:
        if strict:
            raise
        # The configuration is the agents'; an engine that may load from disk starts without it.
        say(f"{error.message}; going on with the defaults")
        return Config()
