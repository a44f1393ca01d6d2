"""What the commands say of themselves, as plain data: manual pages and completions are made from it.

Nothing is written twice: whoever adds an option and its help has documented and completed it.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Option:
    """An option, or (without a dash) an operand. ``value`` is empty for a flag."""

    names: tuple[str, ...]
    value: str
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command, with the commands below it."""

    name: str
    summary: str
    description: str
    options: tuple[Option, ...]
    operands: tuple[Option, ...] = ()
    commands: tuple[Command, ...] = ()
    epilog: str = ""


def commands() -> tuple[Command, ...]:
    """Everything in /usr/bin."""
    wcache = import_module("weightcache.cli.main").parser()
    top = import_module("weightcache.tui.main").parser()
    return (
        _read(wcache, "wcache", "ask the weightcache agents of this host"),
        _read(top, "wcache-top", "watch the ranks of this host"),
        _launcher(import_module("weightcache.launch.help").HELP),
    )


def _read(parser: argparse.ArgumentParser, name: str, summary: str) -> Command:
    options: list[Option] = []
    operands: list[Option] = []
    below: list[Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below = [_read(sub, word, helps.get(word, "")) for word, sub in action.choices.items()]
        elif action.help == argparse.SUPPRESS:
            continue
        else:
            (options if action.option_strings else operands).append(_option(action, parser))
    description, epilog = parser.description or "", parser.epilog or ""
    return Command(name, summary, description, tuple(options), tuple(operands), tuple(below), epilog)


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> Option:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest).upper()
    choices = tuple(map(str, action.choices or ()))
    shown = parser._get_formatter()._expand_help(action) if action.help else ""
    return Option(tuple(action.option_strings), value, shown, choices)


def _launcher(text: str) -> Command:
    """The launcher's help is a text: a usage, what it does, options in two columns, and what is worth to know."""
    paragraphs = text.strip().split("\n\n")
    [_, description, *rest] = paragraphs
    options: list[Option] = []
    for line in next(p for p in rest if p.startswith("  --")).splitlines():
        left, _, right = line.strip().partition("  ")
        if line.startswith("  --"):
            name, _, value = left.partition(" ")
            name, equals, choice = name.partition("=")
            options.append(Option((name + equals + choice,), value, right.strip()))
        else:
            last = options.pop()
            # Each choice on a line of its own, as there.
            joint = "\n" if re.match(r"[a-z]+( \(default\))?: ", line.strip()) else " "
            options.append(Option(last.names, last.value, f"{last.help}{joint}{line.strip()}"))
    epilog = "\n\n".join(_headed(p) for p in rest if not p.startswith("  --"))
    summary = "start SGLang with the weights that an agent holds"
    operands = (Option((), "SGLANG_ARGUMENTS...", "as for sglang.launch_server, unchanged"),)
    return Command("wcache-launch", summary, description, tuple(options), operands, (), epilog)


def _headed(paragraph: str) -> str:
    """A paragraph with its first words as a heading of its own line."""
    heading, _, rest = paragraph.partition(":")
    lines = rest.strip("\n").splitlines()
    return f"{heading.lower()}:\n" + "\n".join(f"  {line.strip()}" for line in lines)
