"""What an engine does when the resident set is not what it needs, or nobody holds any."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engine import support
from tests.support import test_loader
from tests.support.agent import Agent
from tests.support.engine import Engine
from tests.support.environments import NEWEST, SHIM
from weightcache import manifest, protocol, transport
from weightcache.client import Conversation
from weightcache.fingerprint import CONSEQUENCES, Fingerprint
from weightcache.memory import memfd

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("sglang_version", [NEWEST], indirect=True)]

FLOAT16 = ("--dtype", "float16")
DTYPE = {"dtype": ("bfloat16", "float16", CONSEQUENCES["dtype"])}
HOLDS_OTHERS = "rank 0 holds other weights than this engine needs"


@dataclass(frozen=True, slots=True)
class Resident:
    """An agent that loaded ``model``, a checkpoint that the tests may change."""

    agent: Agent
    model: Path
    set_id: str


@pytest.fixture(scope="module")
def resident(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    """The tiny model in bfloat16, loaded by the real loader."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    model = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(tiny_model, model)
    try:
        with Agent(folder, model=model) as agent:
            yield Resident(agent, model, agent.load())
    finally:
        shutil.rmtree(folder)


def assert_serves_from_disk(engine: Engine) -> None:
    assert len(engine.generate("weights stay", 4)) >= 0
    assert support.memory_of(support.scheduler(engine)).arenas == ()


def test_fallback_names_the_field_and_serves_from_disk(resident: Resident, sglang_version: str, tmp_path: Path) -> None:
    with support.launched(resident.agent, resident.model, tmp_path / "log", arguments=FLOAT16) as engine:
        assert support.line_of(engine) == f"rank 0: loaded from disk: {HOLDS_OTHERS} (dtype)"
        assert support.table_of(engine) == DTYPE
        assert_serves_from_disk(engine)
        (held,) = resident.agent.status().sets
        assert (held.id, held.leases) == (resident.set_id, ())


def test_error_ends_with_the_table(resident: Resident, sglang_version: str, tmp_path: Path) -> None:
    """Other rotary angles: the same shapes, so that nothing but the fingerprint stands in the way."""
    override = '{"rope_theta": 500000}'
    engine = support.launched(
        resident.agent,
        resident.model,
        tmp_path / "log",
        options=("--wcache-on-mismatch", "error"),
        arguments=("--json-model-override-args", override),
    )
    assert support.run_to_end(engine) == 1
    assert f"rank 0: refused: {HOLDS_OTHERS} (override_args)" in support.lines(engine)
    assert support.table_of(engine) == {"override_args": ("(none)", override, CONSEQUENCES["override_args"])}
    assert "Traceback" not in engine.text()
    assert engine.family() == []


def test_evict_needs_the_agents_permission(resident: Resident, sglang_version: str, tmp_path: Path) -> None:
    evict = ("--wcache-on-mismatch", "evict")
    engine = support.launched(resident.agent, resident.model, tmp_path / "log", options=evict, arguments=FLOAT16)
    with support.until_decided(engine) as (line,):
        assert "loaded from disk" in line
        assert "[policy] clients_may_evict_unleased is off" in line
        assert support.table_of(engine) == DTYPE
        assert [held.id for held in resident.agent.status().sets] == [resident.set_id]


def test_evict_with_permission(sglang_version: str, tiny_model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    with Agent(runtime_dir, policy={"clients_may_evict_unleased": True}) as agent:
        other = test_loader.fingerprint()
        old = fill(agent, other, lambda publishing: test_loader.publish(publishing, test_loader.make(other)))
        evict = ("--wcache-on-mismatch", "evict")
        engine = support.launched(agent, tiny_model, tmp_path / "log", options=evict)
        with support.until_decided(engine) as (line,):
            assert "loaded from disk and donated" in line
            (held,) = agent.status().sets
            assert held.id != old
            assert held.model == str(tiny_model.resolve())
            assert [lease.pid for lease in held.leases] == [support.scheduler(engine)]


def fill(agent: Agent, fingerprint: Fingerprint, publish: Callable[[Conversation], str]) -> str:
    """Let an empty agent hold a set that nobody uses; returns its id."""
    with Conversation(agent.paths.public) as invited, Conversation(agent.paths.publish) as publishing:
        attach = protocol.Attach("target", "g", fingerprint, 0.0, donate=True)
        token = invited.request(attach, protocol.DonationInvited).token
        publishing.request(protocol.Begin("donor", "g", token), protocol.Accepted)
        set_id = publish(publishing)
        publishing.request(protocol.Commit(1), protocol.Committed)
    return set_id


def test_no_agent(sglang_version: str, tiny_model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    engine = support.launched(runtime_dir, tiny_model, tmp_path / "log")
    with support.until_decided(engine):
        why = f"no agent at {runtime_dir}/RANK.sock"
        assert support.lines(engine) == [
            f"{why}: the weights will be loaded from disk",
            f"rank 0: loaded from disk: {why}",
        ]


def copy_with_another_class(source: Agent, target: Agent) -> None:
    """Publish ``source``'s set to ``target`` with a manifest in which one module has another class."""
    (held,) = source.status().sets
    with Conversation(source.paths.status) as conversation:
        conversation.send(protocol.Inspect(held.id))
        answer, fds = conversation.receive(max_fds=transport.MAX_FDS)
    assert isinstance(answer, protocol.Attached)
    body = manifest.decode(memfd.read_sealed(fds[0], manifest.MAX_BYTES))
    os.close(fds[0])
    modules = (*body.modules[:-1], body.modules[-1]._replace(cls="another.Module"))
    wrong = memfd.sealed("wrong-manifest", manifest.encode(replace(body, modules=modules)))
    info = protocol.SetInfo(
        "target", held.model, held.revision, held.fingerprint, answer.arenas, held.tensors, 0.1, held.bytes
    )
    made = test_loader.Made(info, (wrong, *fds[1:]))
    fill(target, held.fingerprint, lambda publishing: test_loader.publish(publishing, made))


def test_an_attach_that_fails_after_the_decision_starts_again_from_disk_once(
    sglang_version: str, resident: Resident, runtime_dir: Path, tmp_path: Path
) -> None:
    """The fingerprint fits, but one module of the manifest has a class that the engine's has not."""
    with Agent(runtime_dir) as agent:
        copy_with_another_class(resident.agent, agent)
        with support.launched(agent, resident.model, tmp_path / "log") as engine:
            said = support.lines(engine)
            assert [line for line in said if "attaching failed after the decision" in line] == said[:1], said
            assert "another.Module" in said[0]
            assert said[1] == "starting the server again, from disk (this happens once)"
            assert said[2].startswith("rank 0: loaded from disk: ")
            assert "another.Module" in said[2]
            assert len(said) == 3
            assert len(engine.generate("weights stay", 4)) >= 0
            assert support.memory_of(support.scheduler(engine)).arenas == ()
            assert agent.status().sets[0].leases == ()


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Variables under which SGLang does not find the plugin: a distribution of the same name without entry points."""
    folder = tmp_path / "hidden" / "weightcache-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: weightcache\nVersion: 0\n")
    return {"PYTHONPATH": f"{folder.parent}:{SHIM}"}


def test_a_plugin_that_sglang_does_not_find_is_an_error_in_error_mode(
    sglang_version: str, resident: Resident, tmp_path: Path, hidden: dict[str, str]
) -> None:
    engine = support.launched(
        resident.agent, resident.model, tmp_path / "log", options=("--wcache-on-mismatch", "error"), environment=hidden
    )
    assert support.run_to_end(engine) == 69
    assert any("WARNING" in line and "not installed" in line for line in support.lines(engine))
    assert engine.family() == []


@pytest.fixture
def another_norm(tmp_path: Path) -> dict[str, str]:
    """Variables under which SGLang finds a plugin that puts a class of its own in the place of a layer's."""
    folder = tmp_path / "plugin" / "another_norm-7.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: another-norm\nVersion: 7\n")
    (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nanother_norm = another_norm:load\n")
    folder.with_name("another_norm.py").write_text(
        "def load():\n    from sglang.srt.models import qwen3\n    qwen3.RMSNorm = type('Norm', (qwen3.RMSNorm,), {})\n"
    )
    return {"PYTHONPATH": f"{folder.parent}:{SHIM}"}


def test_a_plugin_on_one_side_is_a_mismatch(
    sglang_version: str, resident: Resident, tmp_path: Path, another_norm: dict[str, str]
) -> None:
    """It replaces a layer, and its weights have the same names and shapes."""
    engine = support.launched(
        resident.agent,
        resident.model,
        tmp_path / "log",
        options=("--wcache-on-mismatch", "error"),
        environment=another_norm,
    )
    assert support.run_to_end(engine) == 1
    assert f"rank 0: refused: {HOLDS_OTHERS} (plugins)" in support.lines(engine)
    assert support.table_of(engine) == {"plugins": ("(none)", "another_norm=7", CONSEQUENCES["plugins"])}


# -- last: these change the checkpoint ---------------------------------------------------------------------------------


def test_explain_full_after_the_checkpoint_was_replaced(
    resident: Resident, sglang_version: str, tmp_path: Path
) -> None:
    """Another file under the same name, of the same size and time: the engine says so, and does not serve.

    The operator names another plugin in SGLANG_PLUGINS, which would exclude this one: the launcher adds it.
    """
    weights = resident.model / "model.safetensors"
    exchange(weights)
    engine = support.launched(
        resident.agent,
        resident.model,
        tmp_path / "log",
        options=("--wcache-explain=full",),
        environment={"SGLANG_PLUGINS": "other"},
    )
    assert support.run_to_end(engine) == 1
    table = support.table_of(engine)
    assert set(table) == {"checkpoint"}
    cached, live, consequence = table["checkpoint"]
    (held,) = resident.agent.status().sets
    assert cached == held.fingerprint.checkpoint
    assert re.fullmatch("[0-9a-f]{32}", live)
    assert live != cached
    assert consequence == CONSEQUENCES["checkpoint"]
    assert f"rank 0: would not attach: {HOLDS_OTHERS} (checkpoint)" in engine.text()
    assert "Load weight end" not in engine.text()
    assert "Traceback" not in engine.text()
    assert held.leases == ()


def exchange(weights: Path) -> None:
    """Put a file in the place of ``weights`` that differs in one byte in the middle, with its size and times."""
    before = weights.stat()
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    fresh = weights.with_suffix(".fresh")
    fresh.write_bytes(data)
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.rename(weights)
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_the_launchers_own_check_sees_a_file_written_in_place(
    resident: Resident, sglang_version: str, tmp_path: Path
) -> None:
    """The same file, size and times, one byte changed: ``--wcache-explain`` says so without starting anything."""
    weights = resident.model / "model.safetensors"
    before = weights.stat()
    with weights.open("r+b") as opened:
        opened.seek(before.st_size // 3)
        byte = opened.read(1)[0]
        opened.seek(before.st_size // 3)
        opened.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    engine = support.launched(resident.agent, resident.model, tmp_path / "log", options=("--wcache-explain",))
    assert support.run_to_end(engine) == 1
    assert re.search(r"^ +checkpoint +\| .*differs", engine.text(), re.MULTILINE), engine.text()
