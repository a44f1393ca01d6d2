"""`wcache verify`, `evict`, `drain` and `resume`: one request to each rank's status socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache import protocol
from weightcache.cli import ranks
from weightcache.cli.parsing import Parser, add_global, add_rank, add_wait
from weightcache.client import Conversation
from weightcache.errors import NotReady
from weightcache.monitor.site import Site, choose_ranks
from weightcache.monitor.view import ANSWER_SECONDS
from weightcache.text import count, duration, size

if TYPE_CHECKING:
    import argparse

VERIFY = """\
Compute the digests of all resident sets again, on the device, in a process of the loader's command. A set that does
not match makes the rank degraded. Root or the agent's own user only."""

EVICT = """\
Drop a weight set, or all sets of the chosen ranks, and free the memory as soon as no engine maps it. Refused while
engines are attached, unless --force: they keep running, and nobody else can attach to their set. Root or the agent's
own user only."""

DRAIN = """\
Stop giving out the chosen ranks' weights, wait for the attached engines to leave, then free the memory. A drain holds
until `wcache resume` or a reboot, also over a restart of the agent; when the time is up, the exit status is 1 and the
drain goes on. Root or the agent's own user only."""

RESUME = """\
End a drain: the chosen ranks may load and give out weights again. Root or the agent's own user only."""

VERIFY_SECONDS = 3600.0
DRAIN_SECONDS = 60.0


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    verify = commands.add_parser("verify", help="compute the digests of what is resident again", description=VERIFY)
    add_wait(verify, f"how long to wait for the result (default: {VERIFY_SECONDS:.0f})", VERIFY_SECONDS)
    _finish(verify, _verify)
    evict = commands.add_parser("evict", help="drop resident sets", description=EVICT)
    evict.add_argument("set", nargs="?", metavar="SET", help="id of the set, or the beginning of it (default: all)")
    evict.add_argument("--force", action="store_true", help="also while engines are attached")
    _finish(evict, _evict)
    drain = commands.add_parser("drain", help="stop giving out, wait for engines to leave, free", description=DRAIN)
    add_wait(drain, f"how long to wait for the engines (default: {DRAIN_SECONDS:.0f})", DRAIN_SECONDS)
    _finish(drain, _drain)
    _finish(commands.add_parser("resume", help="end a drain", description=RESUME), _resume)


def _finish(parser: Parser, run: ranks.Runner) -> None:
    add_rank(parser)
    add_global(parser)
    parser.set_defaults(run=run, parser=parser)


def _open(options: argparse.Namespace) -> tuple[Site, list[int]]:
    site = ranks.open_site(options)
    ranks.warn_of_config(site)
    return site, choose_ranks(site, options.rank)


def _done(site: Site, rank: int, message: protocol.Message, seconds: float = ANSWER_SECONDS) -> str:
    with Conversation(site.rank(rank).status, ANSWER_SECONDS) as agent:
        return agent.request(message, protocol.Done, seconds).text


def _verify(options: argparse.Namespace) -> int:
    site, chosen = _open(options)

    def verify(rank: int) -> str:
        with Conversation(site.rank(rank).status, ANSWER_SECONDS) as agent:
            got = agent.request(protocol.Verify(), protocol.Verified, options.wait)
        return f"{count(got.sets, 'set')} intact, {size(got.bytes)} read in {duration(got.seconds)}"

    return ranks.report(chosen, verify)


def _evict(options: argparse.Namespace) -> int:
    site, chosen = _open(options)
    if options.set is None:
        # Dropping the descriptors of a large set takes the driver a moment.
        return ranks.report(chosen, lambda rank: _done(site, rank, protocol.Evict(None, options.force), 60))
    rank, set_id = _find_set(site, chosen, options.set)
    return ranks.report([rank], lambda rank: _done(site, rank, protocol.Evict(set_id, options.force), 60))


def _find_set(site: Site, chosen: list[int], wanted: str) -> tuple[int, str]:
    views = [view for view in ranks.query_all(site, chosen) if view.agent == "up"]
    if not views:
        # Nobody to ask: let the first rank's own sentence say why.
        return chosen[0], wanted
    held = [(view.status.rank, entry.id) for view in views for entry in view.status.sets]
    found = [pair for pair in held if pair[1] == wanted] or [pair for pair in held if pair[1].startswith(wanted)]
    if not found or not wanted:
        names = ", ".join(set_id for _, set_id in held) or "none"
        raise NotReady(f"no set {wanted!r} is resident (resident: {names})")
    if len(found) > 1:
        raise NotReady(f"{wanted!r} is the beginning of {', '.join(set_id for _, set_id in found)}: which one?")
    return found[0]


def _drain(options: argparse.Namespace) -> int:
    site, chosen = _open(options)
    seconds = options.wait + ANSWER_SECONDS
    return ranks.report(chosen, lambda rank: _done(site, rank, protocol.Drain(options.wait), seconds))


def _resume(options: argparse.Namespace) -> int:
    site, chosen = _open(options)
    return ranks.report(chosen, lambda rank: _done(site, rank, protocol.Resume()))
