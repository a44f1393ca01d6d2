"""What an operator can do from the screen. Each waits at most its deadline, and never in the screen's own thread."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.app import App, SuspendNotSupported

from weightcache import paths, protocol, text
from weightcache.client import Conversation
from weightcache.errors import WeightcacheError
from weightcache.monitor.view import ANSWER_SECONDS
from weightcache.tui import words
from weightcache.tui.attached import attached
from weightcache.tui.cells import Cell, Line, fold, safe

if TYPE_CHECKING:
    from weightcache.monitor.site import Site
    from weightcache.monitor.view import RankView
    from weightcache.protocol import SetStatus

EVICT_SECONDS = 60.0
"""Dropping the descriptors of a large set takes the driver a moment."""

DRAIN_SECONDS = 60.0
SHOWN_USERS = 8

Done = Callable[[str, bool], None]
"""Called with what happened, and whether it went well."""


def evict(site: Site, rank: int, set_id: str, done: Done) -> None:
    """Drop a set; the agent refuses while engines are attached."""
    _ask(site, rank, protocol.Evict(set_id), EVICT_SECONDS, done)


def drain(site: Site, rank: int, done: Done) -> None:
    """Stop giving out a rank's weights and wait DRAIN_SECONDS for its engines to leave."""
    _ask(site, rank, protocol.Drain(DRAIN_SECONDS), DRAIN_SECONDS + ANSWER_SECONDS, done)


def _ask(site: Site, rank: int, message: protocol.Message, seconds: float, done: Done) -> None:
    def ask() -> None:
        try:
            with Conversation(site.rank(rank).status, ANSWER_SECONDS) as agent:
                told, well = agent.request(message, protocol.Done, seconds).text, True
        except WeightcacheError as error:
            told, well = error.message, False
        done(safe(told), well)

    # A daemon, so that quitting does not wait for an agent. The agent goes on with what it was asked for.
    threading.Thread(target=ask, name=f"ask-{rank}", daemon=True).start()


def about_evict(view: RankView, entry: SetStatus, width: int) -> list[Line]:
    """What an eviction will do, and who still uses the set."""
    users = [one.lease for one in attached(view.status) if entry in one.sets]
    sentences = [
        Cell(
            f"Evict set {safe(entry.id)} ({safe(entry.role)}, version {entry.version}) of rank {view.status.rank}?",
            "strong",
        ),
        Cell(f"Frees {text.size(entry.bytes)}. The next engine that needs {safe(entry.model)[-200:]} loads from disk."),
    ]
    if users:
        sentences.append(
            Cell("In use, so the agent will refuse; stop these engines first, or wcache evict --force:", "busy")
        )
    sentences += _users(users)
    return _folded(sentences, width)


def about_drain(view: RankView, width: int) -> list[Line]:
    """What a drain will do, and who still uses the rank."""
    status = view.status
    users = [one.lease for one in attached(status) if one.sets]
    held = sum(entry.bytes for entry in status.sets)
    sentences = [
        Cell(f"Drain rank {status.rank}?", "strong"),
        Cell(
            f"Nothing more is given out, a load that is under way ends, and {text.size(held)} are freed as soon as the "
            "engines have left. That holds until wcache resume or a reboot."
        ),
    ]
    if users:
        waits = f"Waits {text.duration(DRAIN_SECONDS)} for these engines; the drain goes on after that:"
        sentences.append(Cell(waits, "busy"))
    return _folded(sentences + _users(users), width)


def _users(leases: list[protocol.LeaseStatus]) -> list[Cell]:
    if not leases:
        return [Cell("No engine uses it.")]
    shown = [Cell(f"  {words.engine(lease)}") for lease in leases[:SHOWN_USERS]]
    more = len(leases) - SHOWN_USERS
    return [*shown, Cell(f"  and {more} more")] if more > 0 else shown


def _folded(sentences: list[Cell], width: int) -> list[Line]:
    return [[cell._replace(text=part)] for cell in sentences for part in fold(cell.text, width)]


def journal(site: Site | None, rank: int) -> list[str] | None:
    """The command that shows a rank's journal; None where no unit of that rank can be expected here."""
    if site is None or site.directory != paths.SYSTEM_RUNTIME_DIR or not (found := shutil.which("journalctl")):
        return None
    return [found, "--unit", f"weightcache@{rank}", "--lines", "1000", "--pager-end"]


def show(app: App[None], command: list[str]) -> bool:
    """Give the terminal to a command until its user leaves it; False where this terminal cannot be given away."""
    # Ctrl-C in a pager is the pager's. F in the options of less would end it at once where little is to be shown.
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with app.suspend():
            subprocess.run(command, check=False, env={**os.environ, "SYSTEMD_LESS": "RSMK"})
    except SuspendNotSupported:
        return False
    finally:
        signal.signal(signal.SIGINT, former)
    return True
