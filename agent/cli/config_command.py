"""`wcache config check`, `get` and `set`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcache import config, paths
from weightcache.cli import config_edit
from weightcache.cli.config_keys import parse_key
from weightcache.cli.parsing import Parser, add_global
from weightcache.text import count, escape

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Check, read and edit the configuration file. Keys are written with dots, as in memory.backend, rank[0].gpu or
loader.environment.NAME. Agents read the file when they start; a restart of an agent keeps the resident weights."""

CHECK = """\
Say whether a configuration file is valid: unknown keys, wrong types and combinations that make no sense are refused
with exit status 78. Whether this machine has what the file asks for is the question of `wcache doctor`."""

GET = """\
Print the value of a key, the default where the file does not set it. Text is printed as it is, numbers, switches,
lists and tables as JSON; a key without value or default prints nothing."""

SET = """\
Change one key of the file; comments and order are kept. VALUE is TOML (true, 12, ["a", "b"], { A = "1" }), and
anything that is no TOML is text. The changed file is checked before it replaces the old one, by rename, with owner and
mode kept; nothing is written when the check fails. rank[N] with N the number of [[rank]] tables adds one."""


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command group."""
    group = commands.add_parser("config", help="check, read and edit the configuration", description=DESCRIPTION)
    add_global(group)
    group.set_defaults(parser=group)
    actions = group.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="is the file valid?", description=CHECK)
    check.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="file to check (default: the one that --config names)"
    )
    get = actions.add_parser("get", help="print the value of a key", description=GET)
    get.add_argument("key", metavar="KEY", help="dotted key, or a whole table such as memory")
    change = actions.add_parser("set", help="change a key", description=SET)
    change.add_argument("key", metavar="KEY", help="dotted key")
    change.add_argument("value", metavar="VALUE", help="TOML, or text")
    for parser, run in ((check, _check), (get, _get), (change, _set)):
        add_global(parser)
        parser.set_defaults(run=run, parser=parser)


def _check(options: argparse.Namespace) -> int:
    got = config.load(options.file or options.config)
    if got.path is None:
        print(f"{paths.CONFIG_FILE}: there is no such file; the defaults apply")
        return 0
    model = "a model" if got.model else "no model"
    ranks = count(len(got.ranks or got.deployment.ranks), "rank")
    if got.deployment.node_count > 1:
        ranks += f" on {got.deployment.node_count} nodes"
    print(f"{escape(str(got.path))}: valid ({got.memory.backend} memory, {ranks}, {model} to hold)")
    return 0


def _get(options: argparse.Namespace) -> int:
    key = parse_key(options.key)
    value = key.find(_plain(config.load(options.config)))
    if value is not None:
        print(escape(value) if isinstance(value, str) else json.dumps(value))
    return 0


def _set(options: argparse.Namespace) -> int:
    path = options.config or paths.CONFIG_FILE
    key = parse_key(options.key)
    changed = config_edit.change(path, key, config_edit.parse_value(options.value))
    text = f"{escape(str(path))}: {escape(options.key)}"
    print(f"{text} is set; agents see it when they restart" if changed else f"{text} was so already")
    return 0


def _plain(value: config.Config) -> dict[str, Any]:
    """The effective configuration, in the shape of the file."""
    return {
        name: [_fields(rank) for rank in value.ranks] if name == "rank" else _fields(getattr(value, name))
        for name in config.SECTIONS
    }


def _fields(value: Any) -> Any:
    if value is None:
        return None
    names = value.__dataclass_fields__
    return {name: str(got) if isinstance(got := getattr(value, name), Path) else got for name in names}
