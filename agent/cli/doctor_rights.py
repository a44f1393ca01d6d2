"""`wcache doctor`: what this user may do with the agents, and what the loader's user may do with the model."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightcache.cli.findings import Finding, ok, problem
from weightcache.cli.systemd import Units
from weightcache.monitor.site import Site, find_ranks
from weightcache.text import user

ACCESS_SECONDS = 10.0
_ACL = "system.posix_acl_access"
_TEST = 'test -x "$1" || echo "$1"; shift; for file; do test -r "$file" || { echo "$file"; break; }; done'


def sockets(site: Site) -> Iterator[Finding]:
    """Whether this process may connect to the public sockets, and through which group."""
    found = find_ranks(site)
    for name in site.config.policy.publishers:
        yield from _publisher(site, found, name)
    wanted = site.config.agent.socket_group
    groups = {os.getegid(), *os.getgroups()}
    if wanted:
        try:
            group = grp.getgrnam(wanted)
        except KeyError:
            yield problem("rights", f"agent.socket_group: there is no group {wanted}", f"groupadd --system {wanted}")
            return
        yield _membership(group, groups)
    for rank in found:
        public = _gid(site.rank(rank).public)
        if public is None:
            continue
        yield from _one_group(site, rank, public)
        if wanted:
            continue
        if os.access(site.rank(rank).public, os.W_OK):
            yield ok("rights", f"this user may attach on rank {rank}")
        else:
            yield _membership(_group(public), groups)
            return


def _membership(wanted: grp.struct_group, groups: set[int]) -> Finding:
    name = user(os.geteuid())
    if os.geteuid() == 0:
        return ok("rights", "root may attach and operate")
    if wanted.gr_gid in groups:
        return ok("rights", f"{name} is in the group {wanted.gr_name} and may attach")
    if wanted.gr_gid == 0:
        advice = "wcache config set agent.socket_group weightcache, then restart the agents"
        return problem("rights", "the sockets belong to the group of root: only root may attach", advice)
    if name in wanted.gr_mem:
        return problem("rights", f"{name} joined {wanted.gr_name}, but after this login", "log out and in again")
    return problem(
        "rights",
        f"{name} is not in the group {wanted.gr_name}",
        f"usermod -aG {wanted.gr_name} {name}, then log in again",
    )


def _one_group(site: Site, rank: int, public: int) -> Iterator[Finding]:
    """The public socket is the unit's, the status socket the agent's: both have to mean the same engines."""
    subject, name = "rights", site.config.agent.socket_group
    group, status = _group(public).gr_name, _gid(site.rank(rank).status)
    if name and grp.getgrnam(name).gr_gid != public:
        text = f"agent.socket_group is {name}, and the socket of rank {rank} belongs to the group {group}"
        yield problem(subject, text, f"SocketGroup={name} in a drop-in of weightcache@{rank}.socket")
    elif status not in (None, public):
        text = f"members of {group} may attach on rank {rank}, and may not renew their leases at its status socket"
        advice = (
            f"agent.socket_group = {group}, and SupplementaryGroups={group} in drop-ins of weightcache@.service and "
            "weightcache-loader@.service"
        )
        yield problem(subject, text, advice)


def _publisher(site: Site, found: Sequence[int], name: str) -> Iterator[Finding]:
    try:
        entry = pwd.getpwuid(int(name)) if name.isascii() and name.isdigit() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        if not name.isdigit():
            yield problem("rights", f"policy.publishers: there is no user {name}", "correct the name, or add the user")
        return
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    for rank in found:
        gid = _gid(site.rank(rank).publish)
        if gid is not None and entry.pw_uid != 0 and gid not in groups:
            group = _group(gid).gr_name
            text = f"policy.publishers names {entry.pw_name}, who is not in the group {group} of the publish socket"
            yield problem("rights", text, f"usermod -aG {group} {entry.pw_name}, then restart its engines")
            return


def loader(units: Units, program: str, files: Sequence[Path]) -> Iterator[Finding]:
    """Whether the user of the loader's unit may run ``program`` (a path, or empty) and read ``files``."""
    if units.loader is None or not (name := units.loader["User"] or "root") or name == "root":
        return
    try:
        entry = pwd.getpwnam(name)
        groups = set(os.getgrouplist(name, entry.pw_gid))
        groups |= {grp.getgrnam(group).gr_gid for group in units.loader["SupplementaryGroups"].split()}
    except KeyError as error:
        text = f"the user or a group of weightcache-loader@.service does not exist: {error.args[0]}"
        yield problem("loader", text, "systemd-sysusers makes those of the package; your own come from a drop-in")
        return
    refused = _first_refused(entry, groups, program, files)
    if refused:
        yield problem(
            "loader",
            f"{name}, who loads, may not {'run' if refused == program else 'read'} {refused}",
            f"give {name} the right (chmod, setfacl, a group; every folder above counts), or set User= in a drop-in of "
            "weightcache-loader@.service",
        )
    else:
        yield ok("loader", f"{name}, who loads, may read the checkpoint and run the command")


def _first_refused(entry: pwd.struct_passwd, groups: set[int], program: str, files: Sequence[Path]) -> str:
    if os.geteuid() == 0:
        # Asked as that user: only this knows of access lists and of what a file server allows to whom.
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", _TEST, "sh", program or "/bin/sh", *map(str, files)],
                user=entry.pw_uid,
                group=entry.pw_gid,
                extra_groups=sorted(groups),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ACCESS_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.partition("\n")[0]
    if program and not _allowed(Path(program), entry.pw_uid, groups, stat.S_IXOTH):
        return program
    return next((str(file) for file in files if not _allowed(file, entry.pw_uid, groups, stat.S_IROTH)), "")


def _allowed(path: Path, uid: int, groups: set[int], wanted: int) -> bool:
    """Whether the mode bits allow it; what they do not tell counts as allowed."""
    try:
        real = path.resolve()
        for step in (*reversed(real.parents), real):
            if _ACL in os.listxattr(step):
                return True
            found = step.stat()
            bits = wanted if step == real else stat.S_IXOTH
            shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
            if not found.st_mode >> shift & bits:
                return False
    except OSError:
        return True
    return True


def _gid(path: Path) -> int | None:
    try:
        return path.stat().st_gid
    except OSError:
        return None


def _group(gid: int) -> grp.struct_group:
    try:
        return grp.getgrgid(gid)
    except KeyError:
        return grp.struct_group((f"gid {gid}", "", gid, []))
