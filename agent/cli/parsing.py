"""argparse with wcache's manners: errors are UsageError with the nearest match, options are never abbreviated."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from weightcache.config_checks import MAX_RANK
from weightcache.config_decode import nearest
from weightcache.errors import UsageError


class Parser(argparse.ArgumentParser):
    """One command. ``options`` are its option strings, for the nearest match."""

    def __init__(self, **keywords: Any) -> None:
        self.options: list[str] = []
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **keywords)

    def add_argument(self, *names: Any, **keywords: Any) -> argparse.Action:
        """As in argparse; remembers the option strings."""
        self.options += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage and leaving."""
        # "argument COMMAND: invalid choice: 'stauts' (choose from 'status', ...)": the quotes differ between versions.
        match = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if match:
            known = [name.strip(" '") for name in match[2].split(",")]
            near = nearest(match[1], known) or f" (known: {', '.join(known)})"
            raise UsageError(f"unknown command {match[1]!r}{near}; see {self.prog} --help")
        raise UsageError(f"{message}; see {self.prog} --help")


def unknown(extra: list[str], parser: Parser) -> UsageError:
    """The error for arguments that ``parser`` did not take."""
    option = next((word.partition("=")[0] for word in extra if word.startswith("-")), None)
    if option is None:
        return UsageError(f"unexpected argument {extra[0]!r}; see {parser.prog} --help")
    return UsageError(f"unknown option {option}{nearest(option, parser.options)}; see {parser.prog} --help")


def add_global(parser: Parser, top: bool = False) -> None:
    """--config and --runtime-dir, which may stand before or behind the command."""
    default = None if top else argparse.SUPPRESS
    parser.add_argument(
        "--config",
        type=as_path,
        default=default,
        metavar="FILE",
        help="configuration file (default: /etc/weightcache/weightcache.toml)",
    )
    parser.add_argument(
        "--runtime-dir",
        type=as_path,
        default=default,
        metavar="DIR",
        help="directory of the agents' sockets (default: agent.runtime_dir of the configuration, else "
        "$WEIGHTCACHE_RUNTIME_DIR, else /run/weightcache, else below $XDG_RUNTIME_DIR)",
    )


def add_rank(parser: Parser, text: str = "only this rank (default: all ranks of this host)") -> None:
    """--rank."""
    parser.add_argument("--rank", type=_rank, metavar="N", help=text)


def add_wait(parser: Parser, text: str, default: float | None) -> None:
    """--wait."""
    parser.add_argument("--wait", type=_seconds, default=default, metavar="SECONDS", help=text)


def as_path(text: str) -> Path:
    """The argument type of a path."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("no usable path")
    return Path(text)


def _rank(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > MAX_RANK:
        raise argparse.ArgumentTypeError(f"a rank is a number from 0 to {MAX_RANK}, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10_000_000:
        raise argparse.ArgumentTypeError(f"expected seconds, not {text!r}")
    return value
