"""`apt install`, an engine, an upgrade below it, `apt remove`, `apt purge`, in this order, on Debian 12 and Debian 13.

With the real SGLang, in an environment of its own; on Debian 13 that is for another Python than the host's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.package.builds import VERSION, Builds
from tests.package.host import AptHost
from tests.package.sides import HOME, Sglang
from tests.package.story import EXPORTER, LOADERS, SOCKET, TARGET, Story, told
from tests.systemd.rank import CONFIG

pytestmark = pytest.mark.timeout(900)

DEBIANS = ("packages-12", "packages-13")


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that nothing but this module's engine opens: what is read of it, that engine or its loader read."""
    copy = tmp_path_factory.mktemp("checkpoint") / smollm2.name
    shutil.copytree(smollm2, copy)
    return copy


@pytest.fixture(scope="module", params=DEBIANS)
def story(
    request: pytest.FixtureRequest, builds: Builds, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """A bare host, booted."""
    side = Sglang(checkpoint)
    host = AptHost(request.param, tmp_path_factory.mktemp("empty"), (*side.readable, builds.folder))
    with told(host, side) as story:
        yield story


def test_install(story: Story, builds: Builds) -> None:
    story.install(builds.deb())
    assert story.host.run("dpkg-query", "-Wf", "${db:Status-Status}", "python3-psutil").stdout == "installed"
    assert story.enabled(TARGET, LOADERS, SOCKET, EXPORTER) == ["enabled", "enabled", "disabled", "disabled"]


def test_programs_run_on_the_hosts_python_and_on_nothing_of_their_caller(story: Story) -> None:
    host = story.host
    python = host.run("python3", "-Ic", "import platform; print(platform.python_version())").stdout.strip()
    traps = "/tmp/trap"
    for name in ("weightcache/__init__.py", "textual.py", "tomlkit.py", "sitecustomize.py"):
        host.write_file(f"{traps}/{name}", "raise SystemExit(99)\n")
    for command in (
        ["wcache", "--version"],
        ["wcache-top", "--version"],
        ["wcache-launch", "--wcache-help"],
        ["wcache", "config", "check"],
        ["wcache", "metrics"],
        ["wcache-top", "--once", "--replay", "/none"],
    ):
        done = host.run("env", "-C", traps, f"PYTHONPATH={traps}", *command, check=False)
        assert done.returncode == (2 if "--replay" in command else 0), done
        assert "99" not in done.stderr
    assert f"weightcache {VERSION} (protocol 1, Python {python})" in host.run("wcache", "--version").stdout
    # textual itself, with psutil of the distribution.
    shown = (
        "import sys; sys.path[:0] = ['/usr/lib/weightcache', '/usr/lib/weightcache/vendor']; import weightcache.tui.app"
    )
    host.run("python3", "-IBc", f"{shown}; import weightcache.monitor.gather")


@pytest.mark.parametrize("python", ["/opt/none/bin/python", "/usr/bin/python3"])
def test_a_wrong_loader_is_a_state_and_a_sentence(story: Story, python: str) -> None:
    story.mistake(f'["{python}", "-m", "weightcache.loader"]')


def test_an_engine_starts_the_agent_through_its_socket_which_loads(story: Story) -> None:
    story.attach()
    story.side.isolated(story.host)


def test_an_upgrade_touches_nothing_that_runs(story: Story, builds: Builds) -> None:
    story.upgrade(builds.deb("next"))


def test_a_restart_takes_the_new_code_over_and_reads_nothing(story: Story) -> None:
    story.restart()


def test_removal_leaves_the_engine_and_the_configuration(story: Story) -> None:
    story.remove()
    assert story.host.path(CONFIG).read_text() == story.side.configuration


def test_a_host_that_is_configured_already_is_started(story: Story, builds: Builds) -> None:
    story.host.install(builds.deb())
    assert sorted(story.host.units()) == sorted([TARGET, LOADERS])


def test_purge_leaves_nothing(story: Story) -> None:
    host = story.host
    assert isinstance(host, AptHost)
    story.end()
    host.systemctl("enable", "--now", SOCKET)
    host.purge()
    assert host.units() == []
    assert host.links() == []
    assert host.owned() == []
    changed = host.everything() ^ story.bare
    assert {path for path in changed if not path.startswith((HOME, "/etc/sysusers.d"))} == set()
