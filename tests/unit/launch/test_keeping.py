"""Daemon mode's keepers: what the end of an agent or of its keeper means for the next launch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.launch.support import GOOD, alive, eventually
from weightcache import protocol
from weightcache.client import Conversation
from weightcache.errors import AgentUnavailable
from weightcache.launch import detached
from weightcache.paths import RankPaths

MODEL = ["--model-path", "org/model", "--device", "cpu"]
GONE = "rank 0: the keeper of its agent has ended"


def launch(daemon, expected=0):
    """Launch once; returns what the launcher said."""
    daemon.script(*GOOD)
    begin = time.monotonic()
    status, _, err = daemon.run(*daemon.mode, *MODEL)
    assert status == expected, err
    assert time.monotonic() - begin < 25
    return err


def keeper_in(text):
    return int(re.search(r"started an agent under a keeper, process (\d+), ", text)[1])


def asked(daemon):
    """What the agent says of itself."""
    with Conversation(RankPaths(daemon.runtime_dir, 0).status) as conversation:
        return conversation.request(protocol.Status(), protocol.RankReport).status


def log(daemon):
    return (daemon.runtime_dir / "0.log").read_text(errors="replace")


def kill(pid, number=signal.SIGKILL):
    """Returns when the process is not even a zombie, so that none of its sockets is open."""
    os.kill(pid, number)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists(), 15)


def sabotage(daemon, code):
    """Every Python below the launcher runs this first."""
    folder = daemon.directory / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    daemon.environment["PYTHONPATH"] = os.pathsep.join([str(folder), daemon.environment["PYTHONPATH"]])


def test_the_weights_survive_the_agent(daemon):
    err = launch(daemon)
    pid = keeper_in(err)
    before = asked(daemon)
    assert before.kept == "store"
    assert pid not in (before.pid, os.getpid())
    kill(before.pid)
    err = launch(daemon)
    assert "started an agent" not in err
    assert "loading" not in err
    after = asked(daemon)
    assert after.pid != before.pid
    assert [(held.id, held.version) for held in after.sets] == [(before.sets[0].id, 1)]
    assert after.kept == "store"
    assert log(daemon).count("load begins") == 1
    assert alive(pid)


def test_kill_frees_the_memory_and_leaves_no_socket(daemon):
    err = launch(daemon)
    assert "the weights stay after this server ends, and after a crash of their agent" in err
    pid, agent = keeper_in(err), asked(daemon).pid
    assert f"`kill {pid}` stops keepers and agents and frees the memory" in err
    kill(pid, signal.SIGTERM)
    # They held the only descriptors, and nobody maps the memory.
    assert not alive(agent)
    assert "stopped, 5 stored descriptors closed" in log(daemon)
    assert list(daemon.runtime_dir.glob("*.sock")) == []
    assert keeper_in(launch(daemon)) != pid


def test_an_agent_that_cannot_start_ends_the_wait(daemon, agent):
    agent(doors=("publish",))
    err = launch(daemon, expected=69)
    found = re.search(r"the agent of rank 0 ends again and again: (.+)", err)
    assert "another agent answers at" in found[1]
    assert "ended: exit status" in found[1]
    pid = keeper_in(err)
    assert not alive(pid)
    assert not (daemon.runtime_dir / "0.sock").exists()
    assert daemon.runs == []


def test_an_agent_that_never_answers_ends_the_wait(daemon, monkeypatch, tmp_path):
    sabotage(daemon, "import sys, time\nif 'weightcache.server' in ' '.join(sys.orig_argv):\n    time.sleep(60)\n")
    monkeypatch.setattr(os, "environ", daemon.environment)
    where = RankPaths(daemon.runtime_dir, 0)
    started = detached.start(where, tmp_path / "unread.toml", keep=True)
    with pytest.raises(AgentUnavailable, match=r"does not answer at .*status\.sock: keeper: starting"):
        started.wait(time.monotonic() + 1)
    detached.stop([started])
    assert started.ended(0)


def test_an_agent_that_outlived_its_keeper(daemon):
    pid = keeper_in(launch(daemon))
    before = asked(daemon)
    kill(pid)
    assert eventually(lambda: asked(daemon).kept == "lost")
    err = launch(daemon)
    assert f"{GONE}: the weights will not survive the agent's crash; `kill {before.pid}` stops it and frees" in err
    assert "started an agent" not in err
    assert [held.id for held in asked(daemon).sets] == [before.sets[0].id]

    kill(before.pid)
    left = {path.name for path in daemon.runtime_dir.glob("*.sock")}
    assert left == {"0.sock", "0.status.sock", "0.publish.sock"}
    err = launch(daemon)
    assert keeper_in(err) != pid
    after = asked(daemon)
    assert after.kept == "store"
    assert after.sets[0].id != before.sets[0].id


def test_an_empty_agent_that_outlived_its_keeper_takes_no_weights(daemon):
    daemon.environment["WCTEST_MODE"] = "exit"
    err = launch(daemon, expected=1)
    kill(keeper_in(err))
    pid = asked(daemon).pid
    err = launch(daemon, expected=69)
    assert f"{GONE}, so that it can take no weights: `kill {pid}` and launch again" in err
    kill(pid, signal.SIGTERM)
    del daemon.environment["WCTEST_MODE"]
    launch(daemon)


def test_somebody_else_at_the_socket_is_left_alone(daemon):
    daemon.environment["XDG_RUNTIME_DIR"] = ""
    where = RankPaths(daemon.runtime_dir, 0)
    (daemon.runtime_dir / "0.log").write_text("the end of the story\n")
    keeper = [sys.executable, "-IS", detached._KEEPER, "--listen", where.public, "--", "/bin/sleep", "60"]
    with subprocess.Popen(keeper, env=daemon.environment, stderr=subprocess.DEVNULL) as other:
        try:
            assert eventually(where.public.exists)
            err = launch(daemon, expected=69)
            assert f"process {other.pid} listens at {where.public} already" in err
            assert "its log ends with: the end of the story" in err
            assert other.poll() is None
        finally:
            other.terminate()
    assert not (daemon.runtime_dir / "weightcache.toml").exists()


def test_without_sdnotify_there_is_no_keeper(daemon):
    sabotage(daemon, "import sys\nsys.modules['sdnotify'] = None\n")
    daemon.environment["NOTIFY_SOCKET"] = "/nowhere"
    err = launch(daemon)
    pid = int(re.search(r"rank 0: started an agent, process (\d+), ", err)[1])
    assert asked(daemon).pid == pid
    assert asked(daemon).kept == "process"
    assert f"`kill {pid}` stops the agents and frees the memory" in err
    said = [line for line in err.splitlines() if "will not survive" in line]
    assert said == [
        "weightcache: the weights will not survive an agent's crash: for a keeper, install sdnotify for "
        + sys.executable
    ]
