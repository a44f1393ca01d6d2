"""Split the command line into the launcher's own options and SGLang's, which come out unchanged and in order."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightcache.errors import UsageError
from weightcache.standby.places import SlotName, slot_name

if TYPE_CHECKING:
    from collections.abc import Sequence

MODE = "--weight-cache-mode"
MODE_SHORTEST = "--weight-cache-m"
"""argparse accepts abbreviations: this is the shortest one that SGLang itself takes for MODE."""

VALUES = (
    "--wcache-on-mismatch", "--wcache-wait", "--wcache-runtime-dir", "--wcache-config", "--wcache-python",
    "--wcache-without", "--wcache-slot",
)  # fmt: skip
PLAIN = ("--wcache-unproven", "--wcache-restart", "--wcache-hold-port", "--wcache-help")
FLAGS = ("--wcache-explain", *PLAIN)
OWN = (*VALUES, *FLAGS)

Mode = Literal["daemon", "client", "off"]
OnMismatch = Literal["fallback", "evict", "error"]
MODES: tuple[Mode, ...] = ("daemon", "client", "off")
REACTIONS: tuple[OnMismatch, ...] = ("fallback", "evict", "error")

Lever = Literal["caches", "graphs", "warmup", "workers"]
LEVERS: tuple[Lever, ...] = ("caches", "graphs", "warmup", "workers")
"""What makes a start shorter, besides the weights: each can be switched off on its own."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator asked of the launcher. None means: not said. ``sglang`` goes to SGLang as it is."""

    mode: Mode = "client"
    on_mismatch: OnMismatch | None = None
    wait_seconds: float | None = None
    explain: Literal["", "short", "full"] = ""
    runtime_dir: Path | None = None
    config: Path | None = None
    python: str = ""
    unproven: bool = False
    without: tuple[Lever, ...] = ()
    restart: bool = False
    hold_port: bool = False
    slot: SlotName | None = None
    help: bool = False
    sglang: tuple[str, ...] = ()

    @property
    def reaction(self) -> OnMismatch:
        """What to do when the engine cannot attach: in daemon mode a second copy would not fit, so never fall back."""
        return "error" if self.mode == "daemon" else self.on_mismatch or "fallback"

    @property
    def levers(self) -> tuple[Lever, ...]:
        """What may shorten this start."""
        return tuple(lever for lever in LEVERS if lever not in self.without)


def split(argv: Sequence[str]) -> Options:
    """Own options may stand anywhere before the first ``--``; MODE is consumed behind it as well.

    Raises UsageError.
    """
    options = Options()
    rest: list[str] = []
    separated = False
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        name, equals, value = token.partition("=")
        if token == "--" and not separated:  # noqa: S105 - no password
            separated = True
            continue
        is_mode = name.startswith(MODE_SHORTEST) and MODE.startswith(name)
        if not is_mode and not name.startswith("--wcache"):
            rest.append(token)
            continue
        if not is_mode:
            _check_name(name, separated)
        if (is_mode or name in VALUES) and not equals:
            if position == len(argv):
                raise UsageError(f"{name} needs a value")
            value = argv[position]
            position += 1
        options = _mode(options, value) if is_mode else _own(options, name, value, bool(equals))
    options = replace(options, sglang=tuple(rest))
    if options.slot is not None and not options.help:
        _check_slot(options, options.slot)
        return options
    if options.mode == "daemon" and options.on_mismatch not in (None, "error"):
        raise UsageError(
            f"--wcache-on-mismatch {options.on_mismatch} does not go with {MODE} daemon, where a mismatch is an error"
        )
    if options.unproven and options.mode != "daemon":
        raise UsageError(
            f"--wcache-unproven goes with {MODE} daemon; for agents that run already, set policy.unproven in their "
            "configuration and restart them"
        )
    if options.hold_port and not options.restart:
        raise UsageError("--wcache-hold-port goes with --wcache-restart: without it nobody would listen afterwards")
    if options.restart and (options.explain or options.mode == "off"):
        other = "--wcache-explain" if options.explain else f"{MODE} off"
        raise UsageError(f"--wcache-restart does not go with {other}, which leaves nothing to start again")
    return options


def _check_slot(options: Options, name: SlotName) -> None:
    """An engine's file says everything else."""
    alone = Options(slot=options.slot, config=options.config, runtime_dir=options.runtime_dir)
    if options.sglang:
        raise UsageError(
            f"--wcache-slot takes SGLang's arguments from the engine's file, {name.engine}.toml: "
            f"{options.sglang[0]!r} belongs there"
        )
    if options != alone:
        raise UsageError("--wcache-slot goes with --wcache-config and --wcache-runtime-dir: the rest is in its file")


def _check_name(name: str, separated: bool) -> None:
    if name not in OWN:
        nearest = difflib.get_close_matches(name, OWN, 1, 0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else "wcache-launch --wcache-help lists the options"
        raise UsageError(f"there is no option {name}: {hint}")
    if separated:
        raise UsageError(f"{name} stands behind --, where SGLang's arguments are: put it before the --")


def _mode(options: Options, value: str) -> Options:
    for mode in MODES:
        if value == mode:
            return replace(options, mode=mode)
    raise UsageError(f"{MODE} is daemon, client or off, not {value!r}")


def _own(options: Options, name: str, value: str, given: bool) -> Options:
    if name in PLAIN:
        if given:
            raise UsageError(f"{name} takes no value")
        return _flag(options, name)
    if name == "--wcache-explain":
        if given and value != "full":
            raise UsageError(f"--wcache-explain or --wcache-explain=full, not {value!r}")
        return replace(options, explain="full" if given else "short")
    if name == "--wcache-on-mismatch":
        for reaction in REACTIONS:
            if value == reaction:
                return replace(options, on_mismatch=reaction)
        raise UsageError(f"--wcache-on-mismatch is fallback, evict or error, not {value!r}")
    if name == "--wcache-slot":
        return replace(options, slot=slot_name(value))
    if name == "--wcache-without":
        return replace(options, without=(*options.without, *_levers(value)))
    if name == "--wcache-wait":
        return replace(options, wait_seconds=_seconds(value))
    if not value:
        raise UsageError(f"{name} has an empty value")
    if name == "--wcache-runtime-dir":
        return replace(options, runtime_dir=Path(value).absolute())
    if name == "--wcache-config":
        return replace(options, config=Path(value).absolute())
    return replace(options, python=value)


def _flag(options: Options, name: str) -> Options:
    match name:
        case "--wcache-unproven":
            return replace(options, unproven=True)
        case "--wcache-restart":
            return replace(options, restart=True)
        case "--wcache-hold-port":
            return replace(options, hold_port=True)
        case _:
            return replace(options, help=True)


def _levers(text: str) -> tuple[Lever, ...]:
    chosen = [word.strip() for word in text.split(",")]
    if unknown := [word for word in chosen if word not in LEVERS]:
        raise UsageError(f"--wcache-without takes {', '.join(LEVERS)}, separated by commas, not {unknown[0]!r}")
    return tuple(lever for lever in LEVERS if lever in chosen)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise UsageError(f"--wcache-wait is a number of seconds, not {text!r}")
    return seconds
