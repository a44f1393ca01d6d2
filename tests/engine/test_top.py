"""wcache-top in a real terminal, over a real agent and a real engine that is attached to it.

With WEIGHTCACHE_UPDATE_DOCS=1 what is seen becomes the picture in the README (docs/wcache-top.svg).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.engine.conftest import Attached
from tests.support.environments import REPOSITORY, environments
from tests.support.tmux import terminal
from weightcache.text import size

pytestmark = pytest.mark.timeout(600)

PICTURE = REPOSITORY / "docs" / "wcache-top.svg"


def command(attached: Attached, *options: str | Path) -> list[str | Path]:
    return [environments().script("wcache-top"), "--runtime-dir", attached.agent.runtime_dir, *options]


def test_the_screen_shows_agent_and_engine(attached: Attached) -> None:
    (held,) = attached.agent.status().sets
    (lease,) = held.leases
    with terminal(command(attached, "--readonly"), 160, 45) as window:
        seen = window.shows(attached.set_id, "sglang.launch_server", "rank 0: host memory")
        assert re.search(rf"^> +0 +host .* ready .*{re.escape(size(held.bytes))}", seen, re.MULTILINE), seen
        assert f"weights {size(held.bytes)}" in seen
        assert "mapped by 1 engine" in seen
        assert re.search(rf"^[> ] +{lease.pid} .*sglang.launch_server", seen, re.MULTILINE), seen
        assert "set-published" in seen
        window.resize(80, 24)
        narrow = window.lacks("UPTIME")
        assert "ready" in narrow
        assert str(lease.pid) in narrow
        window.resize(160, 45)
        window.shows("UPTIME")
        window.press("Tab", "Enter")
        window.shows("torch_version", held.fingerprint.torch_version, held.digest)
        window.press("Escape")
        window.shows("UPTIME")
        window.press("e")  # may not
        window.shows("read-only")
        window.press("?")
        window.shows("Everywhere")
        window.press("Escape")
        window.shows("UPTIME")  # a key right behind it would be one with Alt
        window.press("q")
        assert window.status() == 0


def test_the_engine_tells_its_requests(attached: Attached) -> None:
    (lease,) = attached.agent.status().sets[0].leases
    out = subprocess.run(command(attached, "--json"), capture_output=True, text=True, timeout=60, check=True).stdout
    (engine,) = json.loads(out)["engines"]
    assert (engine["pid"], engine["running"], engine["waiting"]) == (lease.pid, 0, 0)
    assert "sglang.launch_server" in engine["launch"]


@pytest.mark.skipif(not os.environ.get("WEIGHTCACHE_UPDATE_DOCS"), reason="only WEIGHTCACHE_UPDATE_DOCS=1 draws it")
def test_the_picture(attached: Attached, tmp_path: Path) -> None:
    record = tmp_path / "record"
    subprocess.run(command(attached, "--json", "--record", record), stdout=subprocess.DEVNULL, timeout=60, check=True)
    status = attached.agent.status()
    text = record.read_text()
    last = json.loads(text.splitlines()[-1])
    version = last["ranks"][0]["status"]["sets"][0]["fingerprint"]["sglang_version"]
    # The picture is of this run, but shows neither this machine's name nor its folders.
    for seen, shown in {
        last["host"]: "gpu07",
        str(Path(status.model).parent): "/srv/models",
        str(environments().engine(version)): "/opt/sglang/bin/python",
        str(attached.agent.runtime_dir): "/run/weightcache",
    }.items():  # fmt: skip
        text = text.replace(seen, shown)
    record.write_text(text)
    PICTURE.write_text(asyncio.run(_drawn(record)))
    assert "/tmp" not in PICTURE.read_text()


async def _drawn(record: Path) -> str:
    from weightcache.monitor.replay import Replay
    from weightcache.tui.app import Top

    replay = Replay(record)
    top = Top(replay, site=None, interval=1.0, clock=lambda: replay.snapshot().at + 1.0)
    async with top.run_test(size=(120, 32)) as pilot:
        await pilot.pause(1.0)
        svg = top.export_screenshot(title="wcache-top")
    replay.close()
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts from elsewhere
