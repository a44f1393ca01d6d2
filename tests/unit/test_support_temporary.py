"""What processes of the tests leave behind goes with a folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import GPU
from tests.support.temporary import own_folder

LEFT = "import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name)"


@pytest.mark.parametrize("before", ["", "/tmp/not there"])
def test_what_a_process_leaves_goes(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    if before:
        monkeypatch.setenv("TMPDIR", before)
    with own_folder() as folder:
        done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True, timeout=60)
        left = Path(done.stdout.strip())
        assert left.parent == folder == Path(tempfile.gettempdir())
        assert left.is_file()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert not folder.exists()
    assert os.environ.get("TMPDIR", "") == before
    assert tempfile.tempdir is None


def test_what_a_run_left_that_was_killed_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    holds = (
        "import pathlib, sys, time; from tests.support.temporary import own_folder\n"
        "with own_folder(pathlib.Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(60)"
    )
    (tmp_path / "other").mkdir()
    with subprocess.Popen([sys.executable, "-c", holds, tmp_path], stdout=subprocess.PIPE, text=True) as run:
        try:
            held = Path((run.stdout or pytest.fail("no output")).readline().strip())
            (held / "file").touch()
            with own_folder(tmp_path) as own:
                assert own != held
                assert (held / "file").exists()
        finally:
            run.kill()
    with own_folder(tmp_path) as own:
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "other", own])


@pytest.mark.skipif(GPU.exists(), reason="compilers keep in /tmp what takes minutes")
def test_these_tests_have_such_a_folder_and_pytest_its_own(tmp_path: Path) -> None:
    assert Path(os.environ["TMPDIR"]).name.startswith("wc-tmp-")
    assert not tmp_path.is_relative_to(os.environ["TMPDIR"])
