"""Sets that outlived an agent are checked: when, and what follows from what the check says, or fails to say."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.support import test_loader
from tests.unit.server.harness import LOADER, PYTHON, contents, eventually, gone
from tests.unit.server.kept import Kept, Managed, Supervised
from weightcache import protocol
from weightcache.errors import Degraded, Empty
from weightcache.protocol import SetStatus
from weightcache.server.readiness import EXTENSION_SECONDS
from weightcache.server.verify import LONGEST_CHECK_SECONDS

GOOD = [test_loader.arena_bytes(0, number, size) for number, size in enumerate(test_loader.ARENAS)]


def script(text: str) -> dict[str, Any]:
    """A loader whose check is a shell script."""
    return {"command": ["/bin/sh", "-c", text]}


def verified(agent: Supervised) -> int:
    return agent.text().count(" verified: ")


def held(kept: Kept, **more: Any) -> str:
    """An agent that holds a set; the next one has another configuration."""
    kept.start("--load")
    set_id = kept.await_state("ready").sets[0].id
    kept.configure(**more)
    return set_id


def test_in_the_background(kept: Kept) -> None:
    """It serves meanwhile."""
    set_id = held(kept)
    kept.gate("checking")
    kept.kill()
    kept.reached("checking")
    assert kept.status().state == "ready"
    with kept.attach() as engine:
        assert contents(engine) == GOOD
    assert verified(kept) == 0
    kept.open("checking")
    eventually(lambda: verified(kept) == 1)
    assert f"set {set_id} verified: 131072 bytes" in kept.text()
    assert kept.loads() == 1


def test_before_ready(managed: Managed) -> None:
    managed.start("--load")
    managed.await_ready()
    assert verified(managed) == 0  # its loader has just written it
    managed.stop(signal.SIGKILL)
    managed.configure(policy={"verify_adopted": "before-ready"})
    managed.gate("checking")
    managed.start("--load")
    managed.reached("checking")
    time.sleep(0.1)
    assert not managed.ready()
    managed.open("checking")
    managed.await_ready()
    assert verified(managed) == 1
    assert managed.loads() == 1


def test_before_ready_the_manager_is_told_of_each_check(managed: Managed) -> None:
    """A start may take as long as one check; each one gets its time from when it begins."""
    managed.configure(WITH_DRAFT)
    managed.start("--load")
    managed.await_ready()
    managed.stop(signal.SIGKILL)
    managed.configure(WITH_DRAFT, policy={"verify_adopted": "before-ready"})
    managed.gate("checking")
    managed.start("--load")
    managed.reached("checking")
    more = f"EXTEND_TIMEOUT_USEC={int((LONGEST_CHECK_SECONDS + EXTENSION_SECONDS) * 1e6)}"
    assert [m for m in managed.manager.messages if m.startswith("EXTEND")] == [more]
    managed.open("checking")
    managed.await_ready()
    assert verified(managed) == 2
    told = [m for m in managed.manager.messages if m.startswith(("EXTEND", "READY"))]
    assert told == [more, more, "READY=1"]
    managed.ask(protocol.Verify(), protocol.Verified)
    assert [m for m in managed.manager.messages if m.startswith(("EXTEND", "READY"))] == told  # the start is over


@pytest.mark.parametrize("policy", ["background", "before-ready"])
def test_a_stop_does_not_wait_for_a_check(managed: Managed, policy: str) -> None:
    managed.start("--load")
    managed.await_ready()
    managed.stop(signal.SIGKILL)
    managed.configure(policy={"verify_adopted": policy})
    managed.gate("checking")
    managed.start()
    checker = managed.reached("checking")
    started = time.monotonic()
    assert managed.stop() == 0
    assert time.monotonic() - started < 5
    assert gone(checker)


@pytest.mark.parametrize("mode", ["wrong-digest", "check-fault"])
def test_damage_is_replaced(kept: Kept, mode: str) -> None:
    """Once: what is loaded then is not checked again."""
    kept.configure({"WCTEST_MODE": "wrong-digest"})
    set_id = held(kept, environment={"WCTEST_MODE": mode} if mode == "check-fault" else {})
    kept.kill()
    eventually(lambda: [s.id for s in kept.status().sets] not in ([], [set_id]))
    [second] = kept.await_state("ready").sets
    assert second.version == 2
    assert kept.loads() == 2
    assert "is damaged" in kept.text()
    with kept.attach() as engine:
        assert contents(engine) == GOOD
    # And the damaged one is gone from the store too.
    kept.configure()
    assert [s.id for s in kept.kill().sets] == [second.id]
    eventually(lambda: verified(kept) == 1)


WITH_DRAFT = {"WCTEST_ROLES": "target,draft-1"}


def condemning(set_id: str) -> dict[str, Any]:
    """The usual loader, but its check finds this set damaged."""
    verdict = '{"code": "damaged", "message": "arena 1 differs"}'
    damaged = f"""case "$0 $*" in "check "*{set_id}*) echo '{verdict}'; exit 1;; esac; """
    return script(f'{damaged}exec {PYTHON} {LOADER} "$0" "$@"')


def with_draft(kept: Kept) -> tuple[SetStatus, SetStatus]:
    """A target and its draft, of one load."""
    kept.configure(WITH_DRAFT)
    kept.start("--load")
    target, draft = kept.await_state("ready").sets
    assert (target.role, draft.role) == ("target", "draft-1")
    return target, draft


def test_a_damaged_draft_is_replaced_with_its_target(kept: Kept) -> None:
    """A load brings all sets. The target serves until then, and those who use it even longer."""
    target, draft = with_draft(kept)
    kept.configure(WITH_DRAFT, loader=condemning(draft.id))
    kept.gate("loading")
    kept.kill()
    kept.reached("loading")
    assert [s.id for s in kept.status().sets] == [target.id]
    with kept.attach() as engine:
        assert (engine.message.set_id, contents(engine)) == (target.id, GOOD)
        kept.open("loading")
        old, *new = kept.await_state("ready").sets
        assert old.id == target.id
        assert [(s.role, s.version) for s in new] == [("target", 2), ("draft-1", 2)]
        assert draft.id not in [s.id for s in new]
    eventually(lambda: [s.id for s in kept.status().sets] == [s.id for s in new])
    assert kept.status().error is None
    assert kept.loads() == 2


def test_a_damaged_draft_that_nothing_replaces(kept: Kept) -> None:
    """Status and engines are told what is missing, and how it comes back, also later."""
    target, draft = with_draft(kept)
    kept.configure(WITH_DRAFT, loader=condemning(draft.id), model=None)
    kept.kill()
    error = eventually(lambda: kept.status().error)
    for words in (f"set {draft.id} (draft-1) was damaged", "no [model] is configured", "`wcache load` brings it back"):
        assert words in error.message
    kept.configure(WITH_DRAFT)
    for status in (kept.status(), kept.kill()):
        assert (status.state, [s.id for s in status.sets]) == ("ready", [target.id])
        with pytest.raises(Empty, match=r"no draft-1 weights, only: target; .*`wcache load` loads all of them again"):
            kept.attach(test_loader.fingerprint(role="draft-1"))
    kept.load()
    status = kept.status()
    assert (status.error, [s.role for s in status.sets]) == (None, ["target", "draft-1"])
    assert kept.loads() == 2
    kept.load()  # there is nothing left to do
    assert kept.loads() == 2


def test_a_damaged_draft_is_held(kept: Kept) -> None:
    """Evicted and loaded, as the refusal says: its target need not be evicted for that."""
    target, draft = with_draft(kept)
    kept.configure(WITH_DRAFT, loader=condemning(draft.id), policy={"damaged": "hold"})
    kept.kill()
    kept.await_state("degraded")
    with pytest.raises(Degraded, match=f"set {draft.id}.*`wcache evict` them, then `wcache load`"):
        kept.load()
    kept.ask(protocol.Evict(draft.id))
    assert [s.id for s in kept.status().sets] == [target.id]
    kept.load()
    assert [(s.role, s.version) for s in kept.status().sets] == [("target", 2), ("draft-1", 2)]
    assert kept.loads() == 2


def test_damage_is_replaced_before_ready(managed: Managed) -> None:
    """Up is up: the replacement is resident then."""
    managed.configure({"WCTEST_MODE": "wrong-digest"})
    managed.start("--load")
    first = managed.await_ready().sets[0].id
    managed.stop(signal.SIGKILL)
    managed.configure(policy={"verify_adopted": "before-ready"})
    managed.gate("loading")
    managed.start("--load")
    managed.reached("loading")
    time.sleep(0.1)
    assert not managed.ready()
    managed.open("loading")
    status = managed.await_ready()
    assert status.state == "ready"
    assert [s.id for s in status.sets] != [first]
    assert managed.loads() == 2


@pytest.mark.parametrize("policy", ["background", "before-ready"])
def test_damage_is_held(managed: Managed, policy: str) -> None:
    """Nothing is given out, and nothing loaded, until somebody decides."""
    managed.configure({"WCTEST_MODE": "wrong-digest"})
    managed.start("--load")
    set_id = managed.await_ready().sets[0].id
    managed.stop(signal.SIGKILL)
    managed.configure(policy={"verify_adopted": policy, "damaged": "hold"})
    managed.start("--load")
    managed.await_ready()
    status = managed.await_state("degraded")
    assert [s.id for s in status.sets] == [set_id]
    with pytest.raises(Degraded, match=f"damaged weights .set {set_id}.*wcache evict"):
        managed.attach()
    eventually(lambda: managed.manager.status.startswith("degraded: "))
    managed.ask(protocol.Evict(None))
    assert managed.loads() == 1
    managed.load()
    assert managed.status().state == "ready"


ARMED = 'echo \'{"code": "armed"}\'; '


NO_ANSWER = {
    "echo no driver >&2; exit 69": "ended with status 69: no driver",
    "kill -SEGV $$": "ended with signal 11 (SIGSEGV)",
    'echo \'{"code": "ok"}\'; exit 1': "ended with status 1",
    ARMED + "exit 70": "ended with status 70",
    ARMED + "kill -KILL $$": "ended with signal 9 (SIGKILL)",
    "head -c 300000 /dev/urandom; exit 3": "ended with status 3",
}


def test_a_check_that_says_nothing_about_the_bytes(kept: Kept) -> None:
    """It changes nothing."""
    set_id = held(kept)
    for text, sentence in NO_ANSWER.items():
        log = len(kept.text())
        kept.configure(loader=script(text))
        kept.kill()
        expected = f"verification failed: the check of set {set_id} {sentence}"
        eventually(lambda log=log, expected=expected: expected in kept.text()[log:])
        status = kept.status()
        assert (status.state, [s.id for s in status.sets], status.error) == ("ready", [set_id], None)
        with kept.attach() as engine:
            assert contents(engine) == GOOD
    assert kept.loads() == 1


@pytest.mark.parametrize("policy", ["background", "before-ready"])
def test_a_check_that_cannot_run(managed: Managed, policy: str) -> None:
    managed.start("--load")
    set_id = managed.await_ready().sets[0].id
    for command, sentence in {
        ("/nowhere/loader",): "cannot be started ('/nowhere/loader': No such file or directory)",
        (): "what was adopted is not verified: [loader] command is not set",
    }.items():
        managed.stop(signal.SIGKILL)
        model = ("--model-path", "m") if command else None  # a model without a loader is an error
        managed.configure(loader={"command": list(command)}, policy={"verify_adopted": policy}, model=model)
        managed.start("--load")
        managed.await_ready()
        eventually(lambda sentence=sentence: sentence in managed.text())
        status = managed.status()
        assert (status.state, [s.id for s in status.sets]) == ("ready", [set_id])


@pytest.mark.parametrize(
    "text",
    [
        ARMED + "kill -SEGV $$",
        ARMED + "kill -BUS $$",
        ARMED + "seq 100; kill -SEGV $$",  # the last words of a runtime that prints its stack
        'echo \'{"code": "attach-failed", "message": "cannot map"}\'; exit 1',
    ],
)
def test_a_check_that_dies_of_the_set(kept: Kept, text: str) -> None:
    set_id = held(kept, loader=script(text), policy={"damaged": "hold"})
    kept.kill()
    status = kept.await_state("degraded")
    assert status.error is not None
    assert status.error.code == "damaged"
    assert set_id in status.error.message
    assert kept.loads() == 1


def test_a_set_that_goes_while_it_is_checked(kept: Kept) -> None:
    held(kept)
    kept.gate("checking")
    kept.kill()
    kept.reached("checking")
    kept.ask(protocol.Evict(None))
    kept.open("checking")
    eventually(lambda: "verification failed" in kept.text())
    status = kept.status()
    assert (status.state, status.error) == ("empty", None)
    assert kept.loads() == 1
