"""Write the manual pages: pages.py FOLDER. The package, and commands.py, are on $PYTHONPATH.

FOLDER/man1/wcache.1.gz, ...                             from the commands' own help
FOLDER/man5/weightcache.toml.5.gz                        from the comments in the configuration file
FOLDER/man8/weightcache@.service.8.gz, ...               from the comments that units begin with; one page for all
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import weightcache
from commands import Command, Option, commands

ROOT = Path(__file__).resolve().parents[2]
SEE_ALSO = (
    ("wcache", 1),
    ("wcache-launch", 1),
    ("wcache-top", 1),
    ("weightcache.toml", 5),
    ("weightcache@.service", 8),
)
CONFIGURATION = ROOT / "docs" / "weightcache.toml"
UNITS = ROOT / "agent" / "units"
FIRST_UNIT = "weightcache@.service"


def escaped(text: str) -> str:
    """Plain text for troff; what stands in backticks is bold."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def literal(lines: list[str]) -> Iterator[str]:
    """Lines as they are."""
    yield from (".PP", ".nf", ".RS 2", escaped("\n".join(lines)), ".RE", ".fi")


def prose(text: str) -> Iterator[str]:
    """Paragraphs; those whose lines are indented are shown as they are."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        for indented, lines in itertools.groupby(paragraph.splitlines(), lambda line: line.startswith("  ")):
            shown = list(lines)
            yield from literal([line[2:] for line in shown]) if indented else (".PP", escaped("\n".join(shown)))


def page(name: str, section: int, summary: str, body: Iterator[str], version: str) -> str:
    """A whole page."""
    when = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    others = [f".BR {escaped(other)} ({part})" for other, part in SEE_ALSO if (other, part) != (name, section)]
    lines = [
        f'.TH "{escaped(name.upper())}" {section} {when} "weightcache {version}" weightcache',
        ".SH NAME",
        rf"{escaped(name)} \- {escaped(summary)}",
        *body,
        ".SH SEE ALSO",
        ",\n".join(others),
    ]
    return "\n".join(lines) + "\n"


def command_body(command: Command) -> Iterator[str]:
    """Synopsis, description, options, commands, and the sections of the epilog."""
    yield from (".SH SYNOPSIS", _usage(command, command.name), ".SH DESCRIPTION")
    yield from prose(command.description)
    yield ".SH OPTIONS"
    yield from _items(command.options)
    if command.commands:
        yield ".SH COMMANDS"
        for below in command.commands:
            yield from _below(below, command.name)
    for section in re.split(r"\n\s*\n", command.epilog):
        heading, _, rest = section.partition("\n")
        if rest:
            yield f".SH {escaped(heading.rstrip(':').upper())}"
            yield from literal([line[2:] for line in rest.splitlines()])


def _below(command: Command, above: str) -> Iterator[str]:
    whole = f"{above} {command.name}"
    yield f".SS {escaped(whole)}"
    yield _usage(command, whole)
    yield from prose(command.description)
    yield from _items((*command.operands, *command.options))
    for deeper in command.commands:
        yield from _below(deeper, whole)


def _usage(command: Command, whole: str) -> str:
    words = ["[OPTIONS]"] if command.options else []
    words += ["COMMAND"] if command.commands else []
    words += [operand.value for operand in command.operands]
    return f".B {escaped(whole)}\n{escaped(' '.join(words))}"


def _items(options: tuple[Option, ...]) -> Iterator[str]:
    for option in options:
        value = rf" \fI{escaped(option.value)}\fR" if option.value else ""
        yield ".TP"
        yield ", ".join(rf"\fB{escaped(name)}\fR{value}" for name in option.names) or value.strip()
        yield escaped(option.help).replace("\n", "\n.br\n")


def configuration_body(text: str) -> Iterator[str]:
    """Tables and keys of the commented file: what explains them stands above each, without an empty line."""
    yield ".SH DESCRIPTION"
    said: list[str] = []
    for line in text.splitlines():
        if line == "#" or line.startswith("# "):
            said.append(line[2:])
            continue
        if line.startswith("#["):
            yield f".SS {escaped(line[1:])}"
            yield from prose("\n".join(said))
        elif line:
            example = said[-1:] == ["Example:"]
            yield from (".TP", rf"\fB{escaped(line[1:])}\fR" + " (an example)" * example)
            yield escaped("\n".join(said[: len(said) - example]))
        elif said:
            yield from prose("\n".join(said))
        said = []


def unit_body() -> Iterator[str]:
    """Each unit's own words, and the comments on users and groups."""
    yield ".SH DESCRIPTION"
    yield from prose("What systemd runs of weightcache. Ranks are instances: `weightcache@0.socket` is rank 0's.")
    for path in units():
        yield f".SS {escaped(path.name)}"
        yield from prose(comment(path))
    yield ".SH USERS AND GROUPS"
    yield from prose(comment(UNITS / "weightcache.sysusers.conf"))
    yield ".SH FILES"
    yield from prose("/run/weightcache: " + comment(UNITS / "weightcache.tmpfiles.conf"))


def units() -> list[Path]:
    """The units, the agent's own first."""
    found = [path for path in UNITS.iterdir() if path.suffix in (".service", ".socket", ".target")]
    return sorted(found, key=lambda path: (path.name != FIRST_UNIT, path.name))


def comment(path: Path) -> str:
    """What a file begins with."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[2:])
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Write all pages."""

    def write(name: str, section: int, summary: str, body: Iterator[str]) -> None:
        path = folder / f"man{section}" / f"{name}.{section}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = page(name, section, summary, body, weightcache.__version__)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))

    for command in commands():
        write(command.name, 1, command.summary, command_body(command))
    summary = "what weightcache holds in memory, and who may do what with it"
    write("weightcache.toml", 5, summary, configuration_body(CONFIGURATION.read_text()))
    write(FIRST_UNIT, 8, "the units of weightcache", unit_body())
    for path in units()[1:]:
        (folder / "man8" / f"{path.name}.8.gz").symlink_to(f"{FIRST_UNIT}.8.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
