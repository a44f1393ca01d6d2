"""What the loader's part of `wcache doctor` says of its own environment."""

from __future__ import annotations

import importlib
import py_compile
from pathlib import Path

import pytest

from weightcache.loader import doctor

MODULES = 20


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package of that name in place of the real one: its modules."""
    package = tmp_path / "with space" / "sglang"
    (package / "srt").mkdir(parents=True)
    made = [package / "__init__.py", *(package / "srt" / f"module_{i}.py" for i in range(MODULES - 1))]
    for path in made:
        path.write_text("raise AssertionError('imported')\n")
    monkeypatch.delitem(doctor.sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(package.parent)
    importlib.invalidate_caches()
    return made


def test_modules_without_bytecode_are_said_with_what_to_do(sglang: list[Path]) -> None:
    (found,) = doctor._bytecode()
    assert (found.status, found.subject) == ("note", "bytecode")
    assert found.text.startswith(f"{MODULES} of {MODULES} of SGLang's modules have no bytecode")
    assert found.advice.endswith(f"-m compileall -q -j 0 '{sglang[0].parent}'")


@pytest.mark.parametrize(("compiled", "notes"), [(MODULES - 3, 1), (MODULES - 2, 0), (MODULES, 0)])
def test_a_few_of_them_do_not_matter(sglang: list[Path], compiled: int, notes: int) -> None:
    for path in sglang[:compiled]:
        py_compile.compile(str(path))
    assert len(list(doctor._bytecode())) == notes


def test_without_sglang_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(doctor.sys.modules, "sglang", raising=False)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    assert list(doctor._bytecode()) == []
