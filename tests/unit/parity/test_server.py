"""The server of a comparison: started, asked, and ended with everything that it started."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import time
from pathlib import Path

import pytest

from weightcache.errors import LoadFailed
from weightcache.parity.server import Answer, serving


def helper(log: Path) -> int:
    return int(re.findall(r"helper (\d+)", log.read_text())[0])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("manner", ["well", "busy"])
def test_tokens_and_their_probabilities(tmp_path: Path, environment: dict[str, str], manner: str) -> None:
    log = tmp_path / "log"
    with serving(["--model-path", "m"], {**environment, "FAKE": manner}, log, 20.0) as server:
        assert server.answer([1, 2, 3], 2) == Answer(
            (6, 7), (-3.0, -3.5), (((-3.0, 6), (-9.0, 1)), ((-3.5, 7), (-9.0, 1)))
        )
        pid = helper(log)
    assert gone(pid)
    assert not server.client.answers()


def test_an_adapter_answers_and_a_draft_is_counted(tmp_path: Path, environment: dict[str, str]) -> None:
    with serving([], {**environment, "FAKE": "drafts"}, tmp_path / "log", 20.0) as server:
        plain, adapted = server.answer([1, 2], 2), server.answer([1, 2], 2, "four")
    assert (plain.tokens, adapted.tokens) == ((3, 4), (7, 8))
    assert plain.drafts == (4, 1)


@pytest.mark.parametrize(
    ("manner", "sentence"),
    [
        ("ends", "SGLang ended with 1: .*out of memory, says the fake"),
        ("silent", "did not answer within 2 s: .*helper"),
    ],
)
def test_a_server_that_does_not_come_up(
    tmp_path: Path, environment: dict[str, str], manner: str, sentence: str
) -> None:
    log = tmp_path / "log"
    with pytest.raises(LoadFailed, match=sentence), serving([], {**environment, "FAKE": manner}, log, 2.0):
        pytest.fail("it never answered")
    if manner == "silent":
        assert gone(helper(log))


def test_an_answer_without_probabilities(tmp_path: Path, environment: dict[str, str]) -> None:
    broken = {**environment, "FAKE": "broken"}
    with serving([], broken, tmp_path / "log", 20.0) as server, pytest.raises(LoadFailed, match="gave no tokens"):
        server.answer([1], 1)


def test_an_interrupted_comparison_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), serving([], {**environment, "FAKE": "well"}, log, 20.0):
        raise KeyboardInterrupt
    assert gone(helper(log))


def test_it_answers_nobody_else_and_has_no_key_or_port_of_the_operators(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    given = ["--api-key", "operators", "--model-path", "m", "--ssl-keyfile=f", "--port", "1", "--host", "0.0.0.0"]
    with serving(given, {**environment, "FAKE": "well"}, tmp_path / "log", 20.0) as server:
        parent = Path(f"/proc/{helper(tmp_path / 'log')}/stat").read_text().rpartition(")")[2].split()[1]
        shown = Path(f"/proc/{parent}/cmdline").read_bytes().decode().split("\0")
        arguments = json.loads(server.client.ask("GET", "/model_info", seconds=10.0))["arguments"]
        connection = http.client.HTTPConnection("127.0.0.1", server.client.port)
        connection.request("GET", "/model_info", headers={"Authorization": "Bearer operators"})
        assert connection.getresponse().status == 401
        connection.close()
    key = arguments[arguments.index("--api-key") + 1]
    assert len(key) > 40
    assert arguments[1:5] == ["--model-path", "m", "--host", "127.0.0.1"]
    assert not {"operators", "1", "0.0.0.0", "--ssl-keyfile=f"} & set(arguments[:-6])
    assert all(key not in word for word in shown)


def test_no_key_is_an_option(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes that begin with a dash in base64, as one in 64 do."""
    monkeypatch.setattr(secrets, "token_bytes", lambda count=None: b"\xf8" * (count or 32))
    with serving([], {**environment, "FAKE": "well"}, tmp_path / "log", 20.0) as server:
        arguments = json.loads(server.client.ask("GET", "/model_info", seconds=10.0))["arguments"]
    for option in ("--api-key", "--admin-api-key"):
        assert re.fullmatch("[0-9a-f]{64}", arguments[arguments.index(option) + 1])


def test_the_group_of_a_server_that_ended_is_killed_before_its_number_is_free(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, states = os.killpg, []

    def note(group: int, number: int) -> None:
        states.append(Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0])
        kill(group, number)

    monkeypatch.setattr(os, "killpg", note)
    with pytest.raises(LoadFailed), serving([], {**environment, "FAKE": "ends"}, tmp_path / "log", 20.0):
        pytest.fail("it never answered")
    assert states == ["Z"]
