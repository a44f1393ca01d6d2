"""`wcache parity` around its role: what it prints, records, and as whom the role runs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.unit.parity.test_verdict import SIDE, with_tensors
from weightcache.cli.main import main
from weightcache.engine import evidence
from weightcache.parity.verdict import judge

EQUAL = json.dumps(judge(SIDE, SIDE).plain())
DIFFERENT = json.dumps(judge(SIDE, with_tensors(1, "11")).plain())


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "evidence.toml"
    monkeypatch.setenv(evidence.VARIABLE, str(path))
    return path


def parity(tmp_path: Path, script: str, *options: str) -> int:
    """Run it with a shell's script as the loader's command, which any user can start."""
    config = tmp_path / "weightcache.toml"
    config.write_text(f"[loader]\ncommand = {json.dumps(['/bin/sh', '-c', script])}\n")
    if "--user" not in options:
        options = (*options, "--user", subprocess.check_output(["id", "-un"], text=True).strip())
    return main(["--config", str(config), "parity", *options, "org/m"])


def test_what_was_found_is_printed_and_recorded(tmp_path: Path, known: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert parity(tmp_path, f"echo {shlex.quote(EQUAL)}", "--record") == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "equal: disk load and attach are the same engine"
    assert err == f"parity: 1 methods recorded in {known}\n"
    proof = next(proof for proof in evidence.all_known() if proof.method == "M()")
    assert proof.run.startswith("org/m, SGLang 0.5.17, ")
    assert parity(tmp_path, f"echo {shlex.quote(EQUAL)}", "--json") == 0
    assert json.loads(capfd.readouterr().out) == json.loads(EQUAL)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (f"echo {shlex.quote(DIFFERENT)}; exit 1", 1),
        (f"echo {shlex.quote(EQUAL)}; exit 1", 1),
        (f"echo {shlex.quote(DIFFERENT)}", 0),
        ("exit 69", 69),
        ("kill -TERM $$", 143),
        ("true", 76),
        ("echo '{}'", 76),
        ("echo '[[[['", 76),
        ("echo " + shlex.quote(EQUAL.replace('"M()": 3', '"M()": "3"')), 76),
        ("echo " + shlex.quote(EQUAL.replace("{", '{"more": 1, ', 1)), 76),
    ],
)
def test_only_a_good_result_of_a_comparison_that_went_well_is_recorded(
    tmp_path: Path, known: Path, script: str, status: int
) -> None:
    assert parity(tmp_path, script, "--record") == status
    assert not known.exists()


def test_a_result_cannot_write_to_the_terminal_what_it_likes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert parity(tmp_path, "echo " + shlex.quote(EQUAL.replace("M()", "M\\u001b[2J"))) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_a_role_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcache.cli.attach.TIDY_SECONDS", 0.5)
    with pytest.raises(SystemExit) as ended:
        parity(tmp_path, "trap '' TERM; kill -TERM $PPID; exec sleep 600")
    assert ended.value.code == 128 + 9


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_root_runs_it_as_another_user(tmp_path: Path, known: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = 'id -u; id -G; stat -c "%u %a" "$TMPDIR" "$HOME"; ps -o tty= -p $$; echo "$TMPDIR"; touch "$TMPDIR/file"'
    assert parity(tmp_path, f"({script}) >&2; echo {shlex.quote(EQUAL)}", "--record", "--user", "nobody") == 0
    uid, groups, *folders, terminal, temporary, recorded = capfd.readouterr().err.splitlines()
    assert (uid, folders, terminal) == ("65534", ["65534 700"] * 2, "?")
    assert "0" not in groups.split()
    assert not Path(temporary).exists()
    assert recorded.startswith("parity: 1 methods recorded")
    assert known.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_root_without_such_a_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "weightcache.toml"
    config.write_text('[loader]\ncommand = ["/bin/false"]\n')
    monkeypatch.setattr("weightcache.cli.parity.USER", "nobody-of-that-name")
    assert main(["--config", str(config), "parity", "org/m"]) == 1
    expected = "wcache: there is no user nobody-of-that-name: code of the checkpoint runs as root\n"
    assert capfd.readouterr().err == expected
    assert main(["--config", str(config), "parity", "--user", "nobody-of-that-name", "org/m"]) == 2
