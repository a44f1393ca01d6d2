"""Manual pages and completions of the package: all that the programs know is in them, and shells and man read them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.package.builds import Builds
from tests.support.environments import REPOSITORY, environments

pytestmark = pytest.mark.timeout(900)

COMMANDS = ("wcache", "wcache-top", "wcache-launch")
UNPACKED = "/tmp/x"
SHARE = f"{UNPACKED}/usr/share"
KINDS = (".service", ".socket", ".target")
UNITS = sorted(path.name for path in (REPOSITORY / "agent" / "units").iterdir() if path.suffix in KINDS)
PAGES = [
    *((name, 1) for name in COMMANDS),
    ("weightcache.toml", 5),
    *((name, 8) for name in UNITS),
]


@pytest.fixture(scope="module")
def unpack(builds: Builds) -> str:
    """A script that unpacks the Debian package."""
    return f"dpkg-deb -x {builds.inside(builds.deb())} {UNPACKED};"


@pytest.fixture(scope="module")
def pages(builds: Builds, unpack: str) -> dict[str, str]:
    """What man shows of each page, in wide lines; it warns of nothing."""
    export = f"{unpack} export MANWIDTH=2000 MANPATH={SHARE}/man MANOPT='--no-hyphenation --no-justification';"
    shown = builds.workshop.sh(
        export + "".join(f"echo @@{name}; man -P cat {section} {name};" for name, section in PAGES)
    )
    warned = builds.workshop.sh(
        export + f"for page in {SHARE}/man/man?/*; do man --warnings=w -l $page 2>&1 >/dev/null; done"
    )
    assert warned == ""
    texts = [part.partition("\n") for part in re.split(r"(?m)^@@", shown)[1:]]
    return {name: text for name, _, text in texts}


def help_of(*words: str) -> str:
    """What a command says of itself."""
    name, *below = words
    flag = "--wcache-help" if name == "wcache-launch" else "--help"
    return subprocess.run(
        [environments().agent.with_name(name), *below, flag], check=True, capture_output=True, text=True
    ).stdout


def below(*words: str) -> list[tuple[str, ...]]:
    """The commands below one, as its help lists them, and itself."""
    listed = re.search(r"(?m)^(?:commands|actions):\n  [A-Z]+\n((?:    .*\n)*)", help_of(*words))
    names = re.findall(r"(?m)^    (\w+) ", listed[1]) if listed else []
    return [words, *(deeper for name in names for deeper in below(*words, name))]


def options_of(text: str) -> set[str]:
    """Long options that a help explains."""
    return set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z][a-z=-]*)", text))


EVERY = [words for name in COMMANDS for words in below(name)]


def test_the_helps_were_read() -> None:
    assert ("wcache", "config", "set") in EVERY
    assert "--wcache-explain=full" in options_of(help_of("wcache-launch"))
    assert len(EVERY) > 15


@pytest.mark.parametrize("name", COMMANDS)
def test_pages_explain_every_command_and_option(pages: dict[str, str], name: str) -> None:
    page = pages[name]
    for words in (words for words in EVERY if words[0] == name):
        if len(words) > 1:
            assert f"   {' '.join(words)}\n" in page
        for option in options_of(help_of(*words)):
            assert re.search(rf"(?m)^ +(-\w, )?{re.escape(option)}( |$)", page), (words, option)


def test_the_page_of_the_configuration_explains_every_key(pages: dict[str, str]) -> None:
    text = (REPOSITORY / "docs" / "weightcache.toml").read_text()
    tables, keys = re.findall(r"(?m)^#(\[.*\])$", text), re.findall(r"(?m)^#(\w+ = .*)$", text)
    assert len(tables) > 5
    for words in (*tables, *keys):
        assert re.search(rf"(?m)^ +{re.escape(words)}", pages["weightcache.toml"]), words


@pytest.mark.parametrize("name", [name for name, section in PAGES if section == 8])
def test_every_unit_has_a_page(pages: dict[str, str], name: str) -> None:
    assert f"   {name}\n" in pages[name]


def test_pages_show_the_version_and_each_other(pages: dict[str, str]) -> None:
    assert len(pages) == len(PAGES)
    for page in pages.values():
        assert "SEE ALSO" in page
        assert not re.search(r"[`]", page), page


COMPLETE = r"""
for name in wcache wcache-top wcache-launch; do . SHARE/bash-completion/completions/$name; done
mkdir -p /tmp/run; touch /tmp/run/{0,1,12}.sock /tmp/run/0.status.sock; export WEIGHTCACHE_RUNTIME_DIR=/tmp/run
ask() { # WORDS..., the last of which is being typed
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    local function=_${1//-/_}
    $function 2>/dev/null || true
    echo "${COMPREPLY[*]}"
}
"""


def bash(builds: Builds, unpack: str, *lines: tuple[str, ...]) -> list[set[str]]:
    """What bash offers for the last word of each line."""
    asked = "\n".join("ask " + " ".join(f"'{word}'" for word in line) for line in lines)
    shown = builds.workshop.sh(unpack + COMPLETE.replace("SHARE", SHARE) + asked)
    return [set(line.split()) for line in shown.splitlines()]


def test_bash_completes_every_command_and_option(builds: Builds, unpack: str) -> None:
    offered = bash(builds, unpack, *((*words, "") for words in EVERY))
    for words, found in zip(EVERY, offered, strict=True):
        expected = options_of(help_of(*words)) | {deeper[-1] for deeper in EVERY if deeper[:-1] == words}
        assert expected <= found, words


def test_bash_completes_values(builds: Builds, unpack: str) -> None:
    offered = bash(
        builds,
        unpack,
        ("wcache", "evict", "--rank", ""),
        ("wcache-launch", "--weight-cache-mode", ""),
        ("wcache-launch", "--wcache-on-mismatch", "e"),
        ("wcache", "--config", "/etc/ld.so.con"),
        ("wcache", "--runtime-dir", "/usr/sb"),
        ("wcache", "dr"),
    )
    assert offered == [
        {"0", "1", "12"},
        {"client", "daemon", "off"},
        {"evict", "error"},
        {"/etc/ld.so.conf", "/etc/ld.so.conf.d"},
        {"/usr/sbin"},
        {"drain"},
    ]


ZSH = r"""
zmodload zsh/zpty
for typed in $argv; do
    zpty z zsh -f -i
    # A prompt that the echo of this line does not show.
    zpty -w z 'fpath=(SHARE/zsh/vendor-completions $fpath); autoload -Uz compinit; compinit -u -D; PS1=$'"'\\x3d\\x3e'"
    zpty -r z line '*=>*'
    zpty -w -n z "$typed"$'\t\x05 # \n'
    zpty -r z line '* # *'
    print -r -- "$line"
    zpty -d z
done
"""


def test_zsh_completes(builds: Builds, unpack: str) -> None:
    (builds.folder / "ask.zsh").write_text(ZSH.replace("SHARE", SHARE))
    typed = (
        "wcache config chec",
        "wcache evict --forc",
        "wcache-top --repla",
        "wcache-launch --wcache-wai",
    )
    lines = " ".join(f"'{words}'" for words in typed)
    shown = builds.workshop.sh(f"{unpack} TERM=dumb timeout 60 zsh -f ask.zsh {lines}")
    for whole in ("wcache config check", "wcache evict --force", "wcache-top --replay", "wcache-launch --wcache-wait"):
        assert whole in shown, shown
    for name in COMMANDS:
        builds.workshop.sh(f"{unpack} zsh -n {SHARE}/zsh/vendor-completions/_{name}")


NEEDRESTART = r"""
our %nrconf; do './rules.conf'; die $@ if $@;
for my $unit (@ARGV) { print grep({ $unit =~ $_ } keys %{$nrconf{override_rc}}) ? "left\n" : "restarted\n" }
"""


def test_needrestart_leaves_engines_and_loads_alone(builds: Builds, unpack: str) -> None:
    (builds.folder / "ask.pl").write_text(NEEDRESTART)
    units = {
        "chat.service": "left",
        "chat-web.service": "restarted",
        "engine@3.service": "left",
        "weightcache-loader@1-2-3.service": "left",
        "weightcache@0.service": "restarted",
        "cron.service": "restarted",
    }
    shown = builds.workshop.sh(
        f"{unpack} cp {UNPACKED}/etc/needrestart/conf.d/weightcache.conf rules.conf; cd /etc/systemd/system;"
        "printf '[Service]\\nExecStart=/opt/sglang/bin/wcache-launch --port 1\\n' | tee chat.service >engine@.service;"
        f"printf '[Service]\\nExecStart=/bin/true\\n' >chat-web.service; cd /build; perl ask.pl {' '.join(units)}"
    )
    assert shown.split() == list(units.values())
