"""The parts of warm workers, each on its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightcache import records
from weightcache.errors import AgentUnavailable, DeviceUnavailable, ProtocolError, WeightcacheError
from weightcache.warm import binding, device, messages, priority, title
from weightcache.warm.key import Key, changed, listed, parked
from weightcache.warm.learned import Learned
from weightcache.warm.pool import LAST_RETRY_SECONDS, Pool

ATTRIBUTES = dict.fromkeys(device._ATTRIBUTES, 1) | {
    "major": 9, "minor": 0, "warp_size": 32, "shared_memory_per_block_optin": 232_448, "multi_processor_count": 132,
}  # fmt: skip
HOPPER = device.Facts((device.Device("NVIDIA H200", 150_754_820_096, ATTRIBUTES),))
TITLE = """
import os, sys
from weightcache.warm import title
print(title.become(sys.argv[2:]), flush=True)
sys.stdin.readline()
"""


def renamed(command: list[str], room: int) -> tuple[str, list[str]]:
    """What a process with ``room`` more bytes said and is called after it became ``command``."""
    line = [sys.executable, "-c", TITLE, "-" * max(1, room), *command]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.communicate("\n", timeout=10)
    return said, shown.rstrip(b"\0").decode().split("\0")


@pytest.mark.parametrize(
    "command", [["a"], ["python", "-m", "sglang.launch_server", "--model-path", "ü x", "--port=1"]]
)
def test_a_command_line_is_written_over(command: list[str]) -> None:
    assert renamed(command, 200) == ("True", command)


def test_a_command_line_without_room_is_left_alone() -> None:
    command = ["x" * 2000] * 3
    line = [sys.executable, "-c", "from weightcache.warm import title; print(title.become(['x' * 4000]))"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "False\n"
    assert title._size([*command, title.padding(["a"], command)]) > title._size(command)
    assert title._size(["a", title.padding(["a"], command)]) == title._size(command)
    assert title.padding(command, ["a"]) == "-"


def test_the_memory_of_the_arguments_ends_where_they_end() -> None:
    """The kernels that the tests run on let a process say so; what readers see is checked above for all."""
    line = [sys.executable, "-c", TITLE, "-" * 300, "short"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.communicate("\n", timeout=10)
    assert shown in (b"short\0", b"short\0".ljust(len(shown), b"\0"))


def test_a_priority_is_restored() -> None:
    code = (
        "import os, sys; from weightcache.warm import priority; before = priority.lower(); "
        "low = os.sched_getscheduler(0), os.getpriority(0, 0); priority.restore(before); "
        "print(*low, os.sched_getscheduler(0), os.getpriority(0, 0))"
    )

    def unprivileged() -> None:
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert (int(shown[0]), int(shown[2]), int(shown[3])) == (os.SCHED_BATCH, os.SCHED_OTHER, 0)
    if os.geteuid() == 0 and os.access(sys.executable, os.X_OK):
        folder = Path(priority.__file__).parents[2]
        if not all(
            parent.stat().st_mode & 0o001 for parent in (folder, *folder.parents, *Path(sys.executable).parents)
        ):
            pytest.skip("other users may not read the environment")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=unprivileged
        )
        # A nice value that this user could not lower again is not touched.
        assert done.stdout.split() == [str(os.SCHED_BATCH), "0", str(os.SCHED_OTHER), "0"]


def test_numactls_script_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\nexec numactl --cpunodebind=1 --membind=1 /usr/bin/python3 "$@"')
    wanted = binding.wanted(str(script), str(script), "/usr/bin/python3")
    assert wanted == {"--cpunodebind": "1", "--membind": "1"}
    assert binding.wanted("/usr/bin/python3", "/usr/bin/python3", "/usr/bin/python3") == {}


@pytest.mark.parametrize(
    "text",
    [
        '#!/bin/sh\nexec numactl --interleave=all /usr/bin/python3 "$@"',
        '#!/bin/sh\nexec numactl --membind=1 /usr/bin/other "$@"',
        '#!/bin/sh\nrm x; exec numactl --membind=1 /usr/bin/python3 "$@"',
        '#!/bin/sh\nexec numactl --localalloc=1 /usr/bin/python3 "$@"',
    ],
)
def test_other_programs_are_not(tmp_path: Path, text: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(WeightcacheError, match="it would run as"):
        binding.wanted(str(script), str(script), "/usr/bin/python3")


def test_lists_of_processors() -> None:
    assert binding.numbers("0-3,8") == {0, 1, 2, 3, 8}
    assert binding.numbers("") == set()


def test_a_process_is_bound_with_all_its_threads() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        "import os, threading; from weightcache.warm import binding, priority; gone = threading.Event(); "
        f"t = threading.Thread(target=gone.wait); t.start(); binding.apply({{'--physcpubind': '{one}', "
        "'--preferred': '0'}); print([sorted(os.sched_getaffinity(i)) for i in priority.threads()]); gone.set()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == [[one], [one]]


def test_keys_are_compared_without_what_is_given_later() -> None:
    key = Key.of(["a"], {"A": "1", "WEIGHTCACHE_DIRECTIVE": "x"})
    assert key.difference(Key.of(["a"], {"A": "1", "WEIGHTCACHE_DIRECTIVE": "y"})) == ""
    assert key.difference(Key.of(["a"], {"A": "2"})) == "the environment differs in A"
    assert key.difference(Key.of(["b"], {"A": "1"})) == "its command line is another one"
    assert parked({"A": "1", "WEIGHTCACHE_DIRECTIVE": "x"}) == {"A": "1"}


def test_differing_names_are_listed_up_to_three() -> None:
    assert changed({"A": "1", "B": "2"}, {"B": "2", "C": ""}) == ["A", "C"]
    assert listed(["A", "B", "C", "D", "E"]) == "A, B, C and 2 more"


def test_messages_travel_and_are_checked() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        park = messages.Park(("--port", "1"), messages.Layout(2), ({"A": None, "B": "x"},))
        messages.send(ours, park)
        assert messages.expect(theirs, messages.Park, 1) == (park, ())
        messages.send(ours, messages.Unfit("it rained"))
        with pytest.raises(AgentUnavailable, match="it rained"):
            messages.expect(theirs, messages.Park, 1)
        messages.send(ours, messages.Going())
        with pytest.raises(ProtocolError, match="Going where Park was expected"):
            messages.expect(theirs, messages.Park, 1)
        ours.send(b'{"type": "Park", "arguments": 3}')
        with pytest.raises(ProtocolError, match="makes no sense"):
            messages.expect(theirs, messages.Park, 1)
        with pytest.raises(AgentUnavailable, match="does not answer within 0 s"):
            messages.expect(theirs, messages.Park, 0.05)
        ours.close()
        with pytest.raises(AgentUnavailable, match="it ended"):
            messages.expect(theirs, messages.Park, 1)


def test_the_environment_of_spawned_children_is_learned() -> None:
    code = "from multiprocessing.spawn import spawn_main\nimport time; time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", code.replace("\n", "; ")], env={"NUMBER": str(number), "A": "1"})
        for number in (1, 2)
    ]
    learned = Learned()
    try:
        for _ in range(500):
            learned.look(os.getpid())
            if len(learned.changes({})) == 2:
                break
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert learned.changes({"A": "1", "B": "2"}) == ({"NUMBER": "1", "B": None}, {"NUMBER": "2", "B": None})
    learned.look(1)  # another server, of which nothing is known: what was learned stays
    assert len(learned.changes({})) == 2


def real(name: str) -> SimpleNamespace:
    calls: list[str] = []

    def asked(*_: object) -> str:
        calls.append(name)
        return "real"

    return SimpleNamespace(calls=calls, asked=asked)


def test_questions_are_answered_from_facts_and_by_the_device_afterwards() -> None:
    asked = real("cuda")
    names = ("is_available", "device_count", "current_device", "get_device_name", "get_device_capability")
    cuda = SimpleNamespace(**dict.fromkeys((*names, "get_device_properties"), asked.asked))
    with device.answering(HOPPER, cuda):
        kept = cuda.get_device_capability
        assert kept() == kept(0) == kept("cuda:0") == kept(SimpleNamespace(index=None)) == (9, 0)
        assert (cuda.is_available(), cuda.device_count(), cuda.current_device()) == (True, 1, 0)
        assert cuda.get_device_name() == "NVIDIA H200"
        assert cuda.get_device_properties(0).multi_processor_count == 132
        assert cuda.get_device_properties(0).total_memory == 150_754_820_096
        with pytest.raises(IndexError):
            kept(1)
    assert asked.calls == []
    assert cuda.get_device_capability is asked.asked
    assert kept() == "real"  # from torch.cuda import get_device_capability


def test_originals_come_back_after_an_import_that_fails() -> None:
    cuda = SimpleNamespace(**dict.fromkeys(device._answers(HOPPER), 1))
    with pytest.raises(ImportError), device.answering(HOPPER, cuda):
        raise ImportError
    assert set(vars(cuda).values()) == {1}


def test_without_a_device_nothing_is_replaced() -> None:
    cuda = SimpleNamespace(is_available=1)
    with device.answering(device.Facts(), cuda):
        assert cuda.is_available == 1


def test_tritons_driver_is_replaced_meanwhile() -> None:
    triton = pytest.importorskip("triton.runtime.driver")
    cuda = SimpleNamespace(**dict.fromkeys(device._answers(HOPPER), 1))
    holder = device.triton_driver()
    assert holder is triton.driver
    with device.answering(HOPPER, cuda, holder):
        active = triton.driver.active
        target = active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
        assert active.get_current_device() == 0
        assert active.utils.get_device_properties(0)["max_shared_mem"] == 232_448
    with pytest.raises(RuntimeError):  # no driver here
        triton.driver.active.get_current_target()


class FakeDriver:
    """libcuda of a host with two GPUs: every attribute is its own number. A function that is not here is not called."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return int(self.failing == "cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        handle._obj.value = 100 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        name.value = f"GPU {handle.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, handle: Any) -> int:  # noqa: N802
        size._obj.value = 1 << 37
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        number._obj.value = attribute
        return 999 if self.failing == "attribute" else 0


def test_the_driver_is_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: {"libcuda.so.1": FakeDriver()}[name])
    facts = device.ask_driver()
    assert [one.name for one in facts.devices] == ["GPU 100", "GPU 101"]
    assert facts.devices[1].capability == (75, 76)
    assert facts.devices[1].total_memory == 1 << 37
    assert device.read(json.dumps(records.to_plain(facts))) == facts


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: FakeDriver("cuInit"))
    assert device.ask_driver() == device.Facts()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: FakeDriver("attribute"))
    with pytest.raises(DeviceUnavailable, match=r"does not describe GPU 0 \(error 999\)"):
        device.ask_driver()


def test_facts_are_found_out_and_checked() -> None:
    text = device.find_out(os.environ)
    assert device.read(text) == device.Facts()  # no GPU on this machine
    assert device.read(json.dumps(records.to_plain(HOPPER))) == HOPPER
    broken = records.to_plain(HOPPER)
    del broken["devices"][0]["attributes"]["major"]
    with pytest.raises(ValueError, match="attributes are missing"):
        device.read(json.dumps(broken))


def test_a_pool_that_always_fails_tries_again_for_ever() -> None:
    said: list[str] = []

    def fresh(*_: Any) -> Any:
        pytest.fail("nothing is started")

    pool = Pool(fresh, messages.Layout(), said.append)
    for _ in range(3000):
        pool._later("it ended")
    assert said[0] == "no warm worker: it ended; trying again in 5 s"
    assert said[-1] == f"no warm worker: it ended; trying again in {LAST_RETRY_SECONDS:.0f} s"
