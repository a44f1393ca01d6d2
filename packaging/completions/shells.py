"""Write the completions: shells.py SHARE. The package, and commands.py, are on $PYTHONPATH.

    SHARE/bash-completion/completions/wcache, wcache-top, wcache-launch
    SHARE/zsh/site-functions/_wcache, ...

Options come from the commands' own help; ranks from the sockets that are there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from commands import Command, Option, commands

FILES = ("FILE", "PATH", "MODEL", "INTERPRETER")
FOLDERS = ("DIR", "DIRECTORY")
RANK = "--rank"

BASH = """\
# bash completion for {name}, made from its help
{function}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} path='' words='' position
    for ((position = 1; position < COMP_CWORD; position++)); do
        case "$path ${{COMP_WORDS[position]}}" in
            {paths}) path+=" ${{COMP_WORDS[position]}}" ;;
        esac
    done
    case $previous in
        {files}) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;
        {folders}) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word"); return ;;
        --rank) words=$(cd "${{WEIGHTCACHE_RUNTIME_DIR:-/run/weightcache}}" 2>/dev/null && printf '%s\\n' [0-9]*.sock |
            sed -n 's/^\\([0-9]*\\)\\.sock$/\\1/p') ;;
{choices}
        {values}) return ;;
        *) case $path in
{words}
        esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}}
complete {default}-F {function} {name}
"""


def tree(command: Command, path: str = "") -> Iterator[tuple[str, Command]]:
    """Every command below one, with the words that lead to it."""
    yield path, command
    for below in command.commands:
        yield from tree(below, f"{path} {below.name}")


def options_of(command: Command) -> list[Option]:
    """All options of a command and of those below it."""
    return [option for _, below in tree(command) for option in below.options]


def names(options: list[Option], values: tuple[str, ...] = ()) -> str:
    """The options with such values as a pattern for `case`."""
    found = {name for option in options if option.value in values for name in option.names}
    return " | ".join(sorted(found)) or "''"


def choices(option: Option) -> tuple[str, ...]:
    """What may stand behind an option, as argparse knows it or as the launcher's help lists it."""
    return option.choices or tuple(re.findall(r"(?:^|\n|: )([a-z]+)(?: \(default\))?(?=: )", option.help))


def bash(command: Command) -> str:
    """One file for bash."""
    options = options_of(command)
    chosen = [option for option in options if option.value and choices(option)]
    known = {*FILES, *FOLDERS, *(option.value for option in chosen), ""}
    others = tuple({option.value for option in options if RANK not in option.names} - known)
    lines = []
    for path, below in tree(command):
        listed = [deeper.name for deeper in below.commands]
        listed += [name for option in below.options for name in option.names]
        lines.append(f"            '{path}') words='{' '.join(listed)}' ;;")
    selected = [f"        {' | '.join(option.names)}) words='{' '.join(choices(option))}' ;;" for option in chosen]
    paths = [f"'{path}'" for path, _ in tree(command) if path]
    return BASH.format(
        name=command.name,
        function="_" + command.name.replace("-", "_"),
        paths=" | ".join(paths) or "''",
        files=names(options, FILES),
        folders=names(options, FOLDERS),
        choices="\n".join(dict.fromkeys(selected)) or "        '') ;;",
        values=names(options, others),
        words="\n".join(lines),
        # SGLang's own arguments, models and commands: whatever the shell would offer.
        default="-o bashdefault -o default " if any(below.operands for _, below in tree(command)) else "",
    )


def zsh(command: Command) -> str:
    """One file for zsh: a function for each command."""
    function = "_" + command.name
    functions = "\n".join(_function(function + path.replace(" ", "_"), below) for path, below in tree(command))
    return f'#compdef {command.name}\n# made from its help\n\n{functions}\n{function} "$@"\n'


def _function(name: str, command: Command) -> str:
    arguments = [_zsh_option(option) for option in command.options]
    lines = [f"{name}() {{"]
    if command.commands:
        lines += ["    local context state state_descr line", "    typeset -A opt_args"]
        arguments += ["'1: :->command'", "'*:: :->argument'"]
    elif command.operands:
        arguments.append("'*: :_files'")
    lines.append("    _arguments " + ("-C " if command.commands else "") + " \\\n        ".join(arguments))
    if command.commands:
        described = " ".join(_quoted(f"{below.name}:{below.summary}") for below in command.commands)
        cases = "".join(f"            {b.name}) {name}_{b.name} ;;\n" for b in command.commands)
        lines += [
            "    case $state in",
            f"        command) local -a commands; commands=({described}); _describe command commands ;;",
            "        argument) case $words[1] in\n" + cases + "        esac ;;",
            "    esac",
        ]
    return "\n".join([*lines, "}"])


def _zsh_option(option: Option) -> str:
    help_ = re.sub(r"([\[\]:\\])", r"\\\1", option.help.replace("\n", " "))
    # An option may be written with its value in one word, and these two exclude each other.
    together = f"{{{','.join(option.names)}}}" if len(option.names) > 1 else option.names[0]
    action = ""
    if option.value:
        action = f":{option.value}:" + _zsh_value(option)
    quoted = _quoted(f"[{help_}]{action}")
    return f"{together}{'=' if option.value and option.names[0].startswith('--') else ''}{quoted}"


def _zsh_value(option: Option) -> str:
    if RANK in option.names:
        return "{compadd -- /run/weightcache/<->.sock(N\\:t\\:r)}"
    if found := choices(option):
        return f"({' '.join(found)})"
    return "_files" if option.value in FILES else "_files -/" if option.value in FOLDERS else " "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def main(share: Path) -> None:
    """Write all files."""
    for command in commands():
        for path, text in (
            (share / "bash-completion" / "completions" / command.name, bash(command)),
            (share / "zsh" / "site-functions" / f"_{command.name}", zsh(command)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
