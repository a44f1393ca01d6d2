"""`wcache doctor`: the runtime directory and the agents."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import weightcache
from weightcache import paths
from weightcache.cli import doctor_systemd
from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.client import trusted_uids
from weightcache.errors import PermissionRefused, VersionSkew
from weightcache.monitor.site import Site
from weightcache.monitor.view import RankView
from weightcache.text import count, user

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightcache.cli.systemd import Units


def directory(site: Site) -> Iterator[Finding]:
    """The directory of the sockets: whoever may write there can pose as an agent."""
    where = site.directory
    try:
        found = where.stat()
    except OSError as error:
        advice = "an agent makes it when it starts"
        if where == paths.SYSTEM_RUNTIME_DIR:
            advice = "systemd-tmpfiles --create (the package's tmpfiles.d entry makes it)"
        yield problem("runtime directory", f"{where}: {error.strerror}", advice)
        return
    if not stat.S_ISDIR(found.st_mode):
        yield problem("runtime directory", f"{where} is no directory", "remove it, or set agent.runtime_dir")
    elif found.st_mode & stat.S_IWOTH:
        yield problem("runtime directory", f"{where} is writable by everybody", f"chmod o-w {where}")
    elif found.st_uid not in trusted_uids():
        yield problem(
            "runtime directory",
            f"{where} belongs to {user(found.st_uid)}, who is no agent's user",
            f"check who made it; chown root {where}",
        )
    elif not os.access(where, os.R_OK | os.X_OK):
        yield problem("runtime directory", f"this user may not enter {where}", f"chmod 0755 {where}")
    else:
        yield ok("runtime directory", f"{where} (mode {stat.S_IMODE(found.st_mode):04o}, {user(found.st_uid)})")


def agents(site: Site, views: Sequence[RankView], units: Units) -> Iterator[Finding]:
    """Every rank's agent: there, answering, of this version, and as configured."""
    if not views:
        yield note("agents", "no rank is configured and no socket exists", _start(site, 0)[0])
    for view in views:
        yield from _agent(site, view, units)


def _agent(site: Site, view: RankView, units: Units) -> Iterator[Finding]:
    status, subject = view.status, f"rank {view.status.rank}"
    start, restart = _start(site, status.rank)
    if view.agent != "up":
        reason = view.reason.message if view.reason else ""
        if view.reason and view.reason.code == VersionSkew.code:
            yield problem(subject, reason, f"install the same version everywhere, then {restart}")
        elif view.reason and view.reason.code == PermissionRefused.code:
            yield problem(subject, reason, "see the line about rights")
        else:
            yield doctor_systemd.down(status.rank, units) or problem(subject, reason, start)
        return
    if status.version != weightcache.__version__:
        yield note(
            subject,
            f"the agent is version {status.version}, this command is {weightcache.__version__}",
            restart,
        )
    text = f"{status.state}, {count(len(status.sets), 'set')}"
    if status.state in ("failed", "degraded"):
        sentence = f"{status.state}: {status.error.message}" if status.error else status.state
        mend = "mend the cause" if status.state == "failed" else f"wcache evict --rank {status.rank}"
        yield problem(subject, sentence, f"{mend}, then wcache load --rank {status.rank}")
    elif status.state == "drained":
        yield note(subject, text, f"wcache resume --rank {status.rank} ends the drain")
    else:
        yield ok(subject, text)
    yield from _as_configured(site, view)


def _start(site: Site, rank: int) -> tuple[str, str]:
    """How to start and restart an agent: systemd looks after those in the system's directory."""
    if site.directory == paths.SYSTEM_RUNTIME_DIR:
        unit = f"weightcache@{rank}"
        return f"systemctl start {unit}; journalctl -u {unit} says why it ended", f"systemctl restart {unit}"
    return f"python3 -m weightcache.server --rank {rank}", f"restart the agent of rank {rank}"


def _as_configured(site: Site, view: RankView) -> Iterator[Finding]:
    status, config = view.status, site.config
    if config.path is None or site.problem is not None:
        return
    restart = f"{_start(site, status.rank)[1]}: agents read the file when they start"
    gpu = site.gpu(status.rank)
    if status.rank not in site.ranks and not site.lost:
        advice = "add a [[rank]] for it, or stop it: `wcache ranks` prints the ranks of this host"
        yield note(f"rank {status.rank}", f"an agent runs, and {config.path} has no such rank on this host", advice)
    elif (status.backend, status.gpu_uuid) != (config.memory.backend, gpu):
        running = f"{status.backend} {status.gpu_uuid}".strip()
        wanted = f"{config.memory.backend} {gpu}".strip()
        yield note(f"rank {status.rank}", f"the agent runs on {running}, the file says {wanted}", restart)
    public = site.rank(status.rank).public
    if not public.is_socket():
        yield problem(f"rank {status.rank}", f"{public} is missing: engines cannot attach", restart)
