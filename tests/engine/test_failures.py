"""Bad input through the real loader, and failures at every stage: one sentence, nothing left behind, nothing lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.agent import Agent, eventually
from tests.support.environments import NEWEST, environments
from weightcache.errors import AgentUnavailable, DeviceUnavailable, LoadFailed

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def missing(model: Path) -> str:
    shutil.rmtree(model)
    return f"there is no model at {model}"


def truncated(model: Path) -> str:
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    return f"{weights} is truncated or damaged: {size - 1000} bytes where its header says {size}"


def garbage(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(b"\xff" * 4096)
    return f"{weights} is no whole safetensors file: its header is missing or cut off"


def bad_config(model: Path) -> str:
    (model / "config.json").write_text('{"architectures": [')
    return f"{model / 'config.json'} is not valid JSON"


def unreadable(model: Path) -> str:
    """Root reads any file; a directory in its place cannot be read by anybody."""
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    return f"cannot read {model / 'config.json'}: Is a directory"


def no_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return f"{model} holds no weight files"


@pytest.mark.parametrize("damage", [missing, truncated, garbage, bad_config, unreadable, no_weights])
def test_a_bad_checkpoint_is_one_sentence(
    sglang_version: str, tiny_model: Path, runtime_dir: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    sentence = damage(model)
    with Agent(runtime_dir, model=model) as agent:
        asked = agent.wcache("load")
        assert asked.returncode == 66, asked
        assert sentence in asked.stderr
        assert "Traceback" not in asked.stderr + agent.text()
        assert len(asked.stderr.strip().splitlines()) == 1, asked.stderr
        status = agent.status()
        assert status.state == "failed"
        assert status.error is not None
        assert status.error.code == "checkpoint"
        assert sentence in status.error.message
        assert status.sets == ()
        eventually(lambda: agent.arenas == 0, 5.0, lambda: f"{agent.arenas} arenas are left")


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_a_loader_without_sglang(sglang_version: str, tiny_model: Path, runtime_dir: Path) -> None:
    """The command of another environment: the sentence names the interpreter and what it lacks."""
    python = environments().agent
    with Agent(runtime_dir, model=tiny_model, command=(python, "-m", "weightcache.loader")) as agent:
        with pytest.raises(LoadFailed) as refused:
            agent.load()
        assert f"the loader's interpreter {python} cannot import SGLang" in refused.value.message
        assert agent.status().state == "failed"


def test_arguments_that_sglang_refuses(sglang_version: str, tiny_model: Path, runtime_dir: Path) -> None:
    """SGLang's parser prints pages; its one sentence arrives."""
    with Agent(runtime_dir, model=tiny_model, arguments=("--no-such-option", "3")) as agent:
        with pytest.raises(LoadFailed) as refused:
            agent.load()
        assert refused.value.message == (
            "SGLang refuses the [model] arguments: unrecognized arguments: --no-such-option 3"
        )


def test_no_gpu_on_a_cuda_configuration(sglang_version: str, tiny_model: Path, runtime_dir: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    with Agent(runtime_dir, model=tiny_model) as agent:
        agent.stop()
        gpu = 'gpu = "GPU-01234567-89ab-cdef-0123-456789abcdef"\n'
        agent.config.write_text(agent.config.read_text().replace('"host"', '"cuda"') + gpu)
        agent.start()
        with pytest.raises(DeviceUnavailable, match="this host shows no NVIDIA GPU"):
            agent.load()


def test_a_loader_that_is_no_program(sglang_version: str, tiny_model: Path, runtime_dir: Path) -> None:
    with Agent(runtime_dir, model=tiny_model, command=("/nonexistent/python", "-m", "weightcache.loader")) as agent:
        with pytest.raises(LoadFailed, match=r"the loader cannot be started \('/nonexistent/python'"):
            agent.load()
        assert agent.status().state == "failed"


def test_a_killed_loader_leaves_nothing_and_the_next_one_works(
    sglang_version: str, smollm2: Path, runtime_dir: Path
) -> None:
    with Agent(runtime_dir, model=smollm2) as agent:
        for victim, sentence in (("sglang", "SGLang ended with signal SIGKILL"), ("parent", "ended with signal 9")):
            message = load_and_kill(agent, victim)
            assert sentence in message
            status = agent.status()
            assert (status.state, status.sets, status.progress) == ("failed", (), None)
            eventually(lambda: agent.arenas == 0, 5.0, lambda: f"{agent.arenas} arenas are left")
            assert psutil.Process(agent.pid).children(recursive=True) == []
            time.sleep(2.5)  # the back-off after one and after two failures
        set_id = agent.load()
        (held,) = agent.status().sets
        assert held.id == set_id
        assert agent.wcache("verify").returncode == 0


def test_a_load_ends_with_its_agent(sglang_version: str, smollm2: Path, runtime_dir: Path) -> None:
    """Outside systemd nobody else ends a loader whose agent was SIGKILLed; it would load for nobody."""
    with Agent(runtime_dir, model=smollm2) as agent:
        asker = threading.Thread(target=load_ignored, args=(agent,))
        asker.start()
        found = loader_of(agent)
        agent.kill()
        asker.join(30)
        eventually(lambda: not any(map(psutil.Process.is_running, found)), 10.0, "the loader outlives its agent")


def load_ignored(agent: Agent) -> None:
    """Ask for a load whose answer will not come."""
    with contextlib.suppress(AgentUnavailable):
        agent.load()


def loader_of(agent: Agent) -> list[psutil.Process]:
    """The processes of the load: the loader's supervisor, below it the loader, below that SGLang."""
    process = psutil.Process(agent.pid)
    return eventually(lambda: found if len(found := process.children(recursive=True)) == 3 else [], 20.0, agent.text)


def load_and_kill(agent: Agent, victim: str) -> str:
    """Kill SGLang's process while it reads weights, or the small one above it at once; what the load's asker got."""
    told: list[str] = []

    def load() -> None:
        try:
            agent.load()
        except LoadFailed as error:
            told.append(error.message)

    asker = threading.Thread(target=load)
    asker.start()
    try:
        phases = ("loading", "packing") if victim == "sglang" else ("importing",)
        eventually(lambda: (told := agent.status().progress) and told.phase in phases, 120.0, agent.text)
        _, parent, sglang = loader_of(agent)
        (sglang if victim == "sglang" else parent).kill()
    finally:
        asker.join(60)
    assert len(told) == 1
    return told[0]
