"""`wcache attach --check`: map a resident set without an engine, in the operator's SGLang environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING

from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_rank
from weightcache.errors import ConfigError, UsageError
from weightcache.monitor.site import choose_ranks

if TYPE_CHECKING:
    import argparse
    import pwd
    from collections.abc import Iterator
    from types import FrameType

    from weightcache.config import Config

TIDY_SECONDS = 60.0
"""How long a role may take to end what it started; after that it is killed."""
_TERMINAL_SECONDS = 1.0

DESCRIPTION = """\
Map a resident set the way an engine does, without SGLang and as this user, compare its digests with those recorded
when it was published, and print bytes, tensors and milliseconds. The work is done by the loader's command
(loader.command), whose output and exit status are passed on.

Engines attach by themselves when they are started with wcache-launch."""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "attach", help="check that what is resident can be mapped (--check)", description=DESCRIPTION
    )
    parser.add_argument("--check", action="store_true", help="needed: say that a check is all that is wanted")
    add_rank(parser)
    parser.add_argument("--set", metavar="ID", help="this set (default: the newest target set)")
    parser.add_argument("--json", action="store_true", help="let the loader's command print JSON")
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the check once for each rank; the exit status is the first one that is not 0."""
    if not options.check:
        raise UsageError("attach needs --check (engines attach when they are started with wcache-launch)")
    site = ranks.open_site(options)
    config = site.require_config()
    statuses = []
    for rank in choose_ranks(site, options.rank):
        extra = ["--socket", str(site.rank(rank).status), "--backend", config.memory.backend]
        gpu = site.gpu(rank)
        extra += ["--gpu", gpu] if gpu else []
        extra += ["--set", options.set] if options.set is not None else []
        extra += ["--json"] if options.json else []
        statuses.append(run_command(loader_command(config, "check", *extra), loader_environment(config)))
    return next((status for status in statuses if status), 0)


def loader_command(config: Config, *arguments: str) -> list[str]:
    """The loader's command with a role's arguments. Raises ConfigError when none is configured."""
    if not config.loader.command:
        file = config.path or "the configuration"
        raise ConfigError(f"{file}: loader.command is not set, and this needs the loader's environment")
    return [*config.loader.command, *arguments]


def loader_environment(config: Config) -> dict[str, str]:
    """This process's environment with what the configuration adds."""
    return {**os.environ, **config.loader.environment}


def run_command(
    command: list[str],
    environment: dict[str, str],
    stdout: IO[bytes] | None = None,
    user: pwd.struct_passwd | None = None,
) -> int:
    """Run a loader's role, as ``user`` if that is given; returns its exit status. Raises ConfigError.

    Its output goes to this one's, or to ``stdout``. A signal that ends this process is passed on, the role may tidy up,
    and then this one ends with SystemExit.
    """
    sys.stdout.flush()
    with _ending() as ending:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=stdout,
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=os.getgrouplist(user.pw_name, user.pw_gid) if user else None,
                # Somebody else's process must not have this terminal, since it could type there.
                start_new_session=user is not None,
            )
        except OSError as error:
            raise ConfigError(f"loader.command: {command[0]!r} cannot be started ({error.strerror})") from None
        ending.begin(child)
        status = child.wait()
    status = status if status >= 0 else 128 - status
    if ending.asked:
        raise SystemExit(status or 128 + ending.asked)
    return status


class _Ending:
    """Passes the first signal on, and sees to it that the role ends then."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.asked = 0
        self._timers: list[threading.Timer] = []

    def begin(self, child: subprocess.Popen[bytes]) -> None:
        """The role runs; a signal may have come before."""
        self._child = child
        if self.asked and not self._timers:
            self._pass_on(child)

    def ask(self, number: int, _frame: FrameType | None) -> None:
        """A handler. Whoever asks again does not make it faster."""
        first, self.asked = not self.asked, self.asked or number
        if first and self._child:
            self._pass_on(self._child)

    def close(self) -> None:
        """The role has ended."""
        for timer in self._timers:
            timer.cancel()

    def _pass_on(self, child: subprocess.Popen[bytes]) -> None:
        # A terminal has sent its SIGINT to both, and a second one at once could meet the role while it tidies up.
        delay = _TERMINAL_SECONDS if self.asked == signal.SIGINT else 0.0
        for seconds, number in ((delay, self.asked), (TIDY_SECONDS, signal.SIGKILL)):
            timer = threading.Timer(seconds, child.send_signal, (number,))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)


@contextlib.contextmanager
def _ending() -> Iterator[_Ending]:
    ending = _Ending()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Whoever ignores a signal goes on doing so, and so does the role: nohup(1).
    before = {number: now for number in signals if (now := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, ending.ask)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ending.close()
