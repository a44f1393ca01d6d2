"""`wcache doctor`: the runtime directory, the agents and what this user may do with them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from typing import TYPE_CHECKING

import weightcache
from weightcache import paths
from weightcache.cli import ranks
from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.cli.text import count
from weightcache.client import trusted_uids
from weightcache.errors import PermissionRefused, VersionSkew

if TYPE_CHECKING:
    from collections.abc import Iterator


def directory(site: ranks.Site) -> Iterator[Finding]:
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
            f"{where} belongs to {_user(found.st_uid)}, who is no agent's user",
            f"check who made it; chown root {where}",
        )
    elif not os.access(where, os.R_OK | os.X_OK):
        yield problem("runtime directory", f"this user may not enter {where}", f"chmod 0755 {where}")
    else:
        yield ok("runtime directory", f"{where} (mode {stat.S_IMODE(found.st_mode):04o}, {_user(found.st_uid)})")


def agents(site: ranks.Site) -> Iterator[Finding]:
    """Every rank's agent: there, answering, of this version, and as configured."""
    found = ranks.find_ranks(site)
    if not found:
        yield note("agents", "no rank is configured and no socket exists", _start(site, 0)[0])
        return
    for view in ranks.query_all(site, found):
        yield from _agent(site, view)


def _agent(site: ranks.Site, view: ranks.RankView) -> Iterator[Finding]:
    status, subject = view.status, f"rank {view.status.rank}"
    start, restart = _start(site, status.rank)
    if view.agent == "down":
        reason = view.reason.message if view.reason else ""
        if isinstance(view.reason, VersionSkew):
            yield problem(subject, reason, f"install the same version everywhere, then {restart}")
        elif isinstance(view.reason, PermissionRefused):
            yield problem(subject, reason, "see the line about rights")
        else:
            yield problem(subject, reason, start)
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


def _start(site: ranks.Site, rank: int) -> tuple[str, str]:
    """How to start and restart an agent: systemd looks after those in the system's directory."""
    if site.directory == paths.SYSTEM_RUNTIME_DIR:
        unit = f"weightcache@{rank}"
        return f"systemctl start {unit}; journalctl -u {unit} says why it ended", f"systemctl restart {unit}"
    return f"python3 -m weightcache.server --rank {rank}", f"restart the agent of rank {rank}"


def _as_configured(site: ranks.Site, view: ranks.RankView) -> Iterator[Finding]:
    status, config = view.status, site.config
    if config.path is None or site.problem is not None:
        return
    restart = f"{_start(site, status.rank)[1]}: agents read the file when they start"
    entry = next((entry for entry in config.ranks if entry.rank == status.rank), None)
    if entry is None:
        yield note(f"rank {status.rank}", f"an agent runs, and {config.path} has no such rank", "add a [[rank]] for it")
    elif (status.backend, status.gpu_uuid) != (config.memory.backend, entry.gpu):
        running = f"{status.backend} {status.gpu_uuid}".strip()
        wanted = f"{config.memory.backend} {entry.gpu}".strip()
        yield note(f"rank {status.rank}", f"the agent runs on {running}, the file says {wanted}", restart)
    public = site.rank(status.rank).public
    if not public.is_socket():
        yield problem(f"rank {status.rank}", f"{public} is missing: engines cannot attach", restart)


def rights(site: ranks.Site) -> Iterator[Finding]:
    """Whether this process may connect to the public sockets, and through which group."""
    for user in site.config.policy.publishers:
        if not _exists(user):
            yield problem("rights", f"policy.publishers: there is no user {user}", "correct the name, or add the user")
    name = site.config.agent.socket_group
    groups = {os.getegid(), *os.getgroups()}
    if name:
        try:
            wanted = grp.getgrnam(name)
        except KeyError:
            yield problem("rights", f"agent.socket_group: there is no group {name}", f"groupadd --system {name}")
            return
        yield _membership(wanted, groups)
        return
    for rank in ranks.find_ranks(site):
        public = site.rank(rank).public
        try:
            found = public.stat()
        except OSError:
            continue
        if os.access(public, os.W_OK):
            yield ok("rights", f"this user may attach on rank {rank}")
        else:
            yield _membership(_group(found.st_gid), groups)
            return


def _membership(wanted: grp.struct_group, groups: set[int]) -> Finding:
    user = _user(os.geteuid())
    if os.geteuid() == 0:
        return ok("rights", "root may attach and operate")
    if wanted.gr_gid in groups:
        return ok("rights", f"{user} is in the group {wanted.gr_name} and may attach")
    if wanted.gr_gid == 0:
        advice = "wcache config set agent.socket_group weightcache, then restart the agents"
        return problem("rights", "the sockets belong to the group of root: only root may attach", advice)
    if user in wanted.gr_mem:
        return problem("rights", f"{user} joined {wanted.gr_name}, but after this login", "log out and in again")
    return problem(
        "rights",
        f"{user} is not in the group {wanted.gr_name}",
        f"usermod -aG {wanted.gr_name} {user}, then log in again",
    )


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return user.isascii() and user.isdigit()
    return True


def _group(gid: int) -> grp.struct_group:
    try:
        return grp.getgrgid(gid)
    except KeyError:
        return grp.struct_group((f"gid {gid}", "", gid, []))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
