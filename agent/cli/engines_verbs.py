"""`wcache promote`, `park` and `wake`: tell the launchers of one engine, and wait until it is as asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from weightcache.cli import engines
from weightcache.cli.parsing import Parser, add_global, add_wait
from weightcache.errors import AgentUnavailable, NotReady, WeightcacheError
from weightcache.standby import listing, locks
from weightcache.standby.control import Command, ask
from weightcache.text import escape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from weightcache.standby.control import Verb
    from weightcache.standby.listing import EngineView, SlotView
    from weightcache.standby.places import EnginePaths
    from weightcache.standby.status import Promotion

T = TypeVar("T")

PROMOTE = """\
Let the standby of an engine become the active one: the active engine takes no more requests, lets those that run go on
for drain_seconds, answers the rest with 503, and is the standby afterwards. Refused without a standby that is ready."""

PARK = """\
Take an engine out of service, and leave both slots ready: the active engine retires as for `wcache promote`, and nobody
is promoted until `wcache wake` or a reboot. Connections wait in the socket's queue meanwhile."""

WAKE = """\
Let a parked engine take requests again: one of its slots is promoted."""

ANSWER_SECONDS = 10.0
WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.02


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    verbs: tuple[tuple[str, str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("promote", "let an engine's standby take over", PROMOTE, _promote),
        ("park", "take an engine out of service", PARK, _park),
        ("wake", "put a parked engine into service again", WAKE, _wake),
    )
    for name, text, description, run in verbs:
        parser = commands.add_parser(name, help=text, description=description)
        parser.add_argument("engine", metavar="NAME", help="its name, as `wcache engines` shows it")
        add_wait(parser, f"how long to wait until it is so (default: {WAIT_SECONDS:.0f})", WAIT_SECONDS)
        add_global(parser)
        parser.set_defaults(run=run, parser=parser)


def _promote(options: argparse.Namespace) -> int:
    paths, began = engines.paths(options), time.monotonic()
    before = _known(paths)
    active = before.slot_in("active", "retiring")
    if before.parked:
        raise NotReady(f"{before.engine} is parked: `wcache wake {before.engine}` puts it into service again")
    if active is None:
        raise NotReady(f"{before.engine} has no active engine that could retire: {_roles(before)}")
    if active.role == "active":
        _tell(paths, active.slot, "retire")
    slot = _await(paths, began + options.wait, lambda now: _promoted(before, now))
    return _done(before, began, slot)


def _park(options: argparse.Namespace) -> int:
    paths, began = engines.paths(options), time.monotonic()
    before = _known(paths)
    _tell_all(paths, before, "park")
    _await(paths, began + options.wait, lambda now: (now.parked and _nobody(paths, now)) or None)
    print(f"{before.engine} is parked after {time.monotonic() - began:.2f} s")
    return 0


def _wake(options: argparse.Namespace) -> int:
    paths, began = engines.paths(options), time.monotonic()
    before = _known(paths)
    active = before.slot_in("active")
    if active is not None and not before.parked:
        print(f"{before.engine} is not parked: {before.engine}-{active.slot} is active")
        return 0
    _tell_all(paths, before, "wake")
    slot = _await(paths, began + options.wait, _woken)
    return _done(before, began, slot)


def _woken(now: EngineView) -> SlotView | None:
    """The active slot of an engine that nobody parked. Raises NotReady where a more important one keeps it parked."""
    if now.parked:
        return None
    parked = now.slot_in("parked")
    if parked is not None and parked.problem:
        raise NotReady(f"{now.engine} is woken, and stays parked for now: {parked.problem}")
    return now.slot_in("active")


def _known(paths: EnginePaths) -> EngineView:
    """The engine, of which at least one launcher is there. Raises AgentUnavailable."""
    view = listing.look(paths)
    if all(role == "down" for role in view.roles):
        why = next((slot.problem for slot in view.slots if slot.problem), "") or view.problem
        raise AgentUnavailable(f"no slot of {view.engine} runs{f': {why}' if why else ''}")
    return view


def _tell(paths: EnginePaths, slot: str, verb: Verb) -> None:
    reply = ask(paths.control(slot), Command(verb), ANSWER_SECONDS)
    if not reply.ok:
        raise NotReady(reply.text)


def _tell_all(paths: EnginePaths, view: EngineView, verb: Verb) -> None:
    """Tell every launcher, the active engine's first; one that has heard it is enough."""
    slots = sorted((slot for slot in view.slots if slot.role != "down"), key=lambda slot: slot.role != "active")
    problems: list[WeightcacheError] = []
    for slot in slots:
        try:
            _tell(paths, slot.slot, verb)
        except WeightcacheError as error:
            problems.append(error)
    if len(problems) == len(slots):
        raise problems[0]


def _await(paths: EnginePaths, deadline: float, reached: Callable[[EngineView], T | None]) -> T:
    """What ``reached`` gives, once that is something. Raises NotReady at the deadline, AgentUnavailable."""
    while True:
        view = _known(paths)
        if (found := reached(view)) is not None:
            return found
        if time.monotonic() >= deadline:
            raise NotReady(f"{view.engine} is not there yet, and goes on: {_roles(view)}")
        time.sleep(LOOK_SECONDS)


def _promoted(before: EngineView, now: EngineView) -> SlotView | None:
    """The active slot, if it was promoted since ``before``. Raises NotReady if it is the one that was to retire."""
    active, retired = now.slot_in("active"), before.slot_in("active", "retiring")
    if active is None or _newest(active) in [None, *map(_newest, before.slots)]:
        return None
    if retired is not None and active.slot == retired.slot:
        name, others = f"{now.engine}-{active.slot}", [slot for slot in now.slots if slot.slot != active.slot]
        them = ", ".join(f"{now.engine}-{slot.slot} is {_role(slot)}" for slot in others)
        raise NotReady(f"{name} has retired, and nobody has taken over: it is active again, and {them}")
    return active


def _newest(slot: SlotView) -> Promotion | None:
    return slot.status.promotions[-1] if slot.status and slot.status.promotions else None


def _nobody(paths: EnginePaths, view: EngineView) -> bool:
    """Whether no engine takes requests, or is about to."""
    if any(role in ("active", "promoting", "retiring") for role in view.roles):
        return False
    try:
        return not locks.is_taken(paths.lock, 0)
    except WeightcacheError:  # not this user's to see: the roles have to do
        return True


def _roles(view: EngineView) -> str:
    return ", ".join(f"{view.engine}-{slot.slot} is {_role(slot)}" for slot in view.slots)


def _role(slot: SlotView) -> str:
    return f"{slot.role} ({slot.problem})" if slot.problem else slot.role


def _done(before: EngineView, began: float, slot: SlotView) -> int:
    print(f"{before.engine}-{slot.slot} is active after {time.monotonic() - began:.2f} s")
    if promotion := _newest(slot):
        steps = ", ".join(f"{name} {seconds:.3f}" for name, seconds in promotion.phases.items())
        print(escape(f"the promotion took {promotion.seconds:.3f} s{f' ({steps})' if steps else ''}"))
    return 0
