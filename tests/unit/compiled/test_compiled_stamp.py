"""The stamp: equal for equal environments, another for whatever compiled code depends on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from weightcache.compiled import stamp
from weightcache.errors import UsageError

ANSWER = {"python": "CPython 3.11.2", "abi": "cpython-311", "prefix": "/opt/sglang"} | dict.fromkeys(stamp.PACKAGES, "")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that answers what lies beside it."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho a line that a start-up file printed\ncat {tmp_path}/answer\n")
    script.chmod(0o755)
    answer(script)
    return script


def answer(script: Path, **changes: object) -> None:
    script.with_name("answer").write_text(json.dumps({**ANSWER, **changes}))


def test_it_is_the_same_twice_and_says_what_it_stands_for(python: Path) -> None:
    answer(python, torch="2.14.1", sglang="0.5.23")
    first = stamp.of(str(python))
    assert stamp.of(str(python)).digest == first.digest
    assert len(first.digest) == 16
    assert first.facts["torch"] == "2.14.1"
    assert first.facts["prefix"] == "/opt/sglang"
    assert "triton" not in first.facts
    assert {"machine", "libc", "cpu"} <= set(first.facts)


@pytest.mark.parametrize("name", ["python", "abi", "prefix", *stamp.PACKAGES])
def test_every_version_counts(python: Path, name: str) -> None:
    before = stamp.of(str(python)).digest
    answer(python, **{name: "99.1"})
    assert stamp.of(str(python)).digest != before


def test_the_order_of_facts_does_not_count() -> None:
    assert stamp.Stamp({"a": "1", "b": "2"}).digest == stamp.Stamp({"b": "2", "a": "1"}).digest
    assert stamp.Stamp({"a": "1"}).digest != stamp.Stamp({"a": "1", "b": ""}).digest


@pytest.mark.parametrize("text", ["", "nothing", "[]", "7", '{"python": "x"}', "[" * 5000])
def test_an_interpreter_that_answers_something_else_is_no_stamp(python: Path, text: str) -> None:
    python.with_name("answer").write_text(text)
    with pytest.raises(UsageError, match="which versions"):
        stamp.of(str(python))


@pytest.mark.parametrize("body", ["exit 3", "kill -9 $$", "exec sleep 60"])
def test_one_that_fails_or_hangs_neither(python: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "SECONDS", 1.0)
    python.write_text(f"#!/bin/sh\n{body}\n")
    with pytest.raises(UsageError):
        stamp.of(str(python))


def test_one_that_does_not_exist_neither(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        stamp.of(str(tmp_path / "none"))


def test_versions_are_read_without_importing_anything(tmp_path: Path) -> None:
    """A package whose import would fail has a version all the same; broken metadata is no version."""
    for name, text in (("triton", "Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n"), ("torchao", "garbage")):
        (tmp_path / f"{name}-9.9.dist-info").mkdir()
        (tmp_path / f"{name}-9.9.dist-info" / "METADATA").write_text(text)
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    found = stamp.of(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.facts["triton"] == "9.9"
    assert "torchao" not in found.facts


def test_compilers_count_as_their_versions(python: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(tmp_path / "cxx"), "CUDA_HOME": str(tmp_path)}
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    for path, text in ((tmp_path / "cxx", "c++ 14.2.0\nCopyright"), (nvcc, "nvcc: a compiler 1.0\nBuild cuda_13.0/x")):
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        path.chmod(0o755)
    found = stamp.of(str(python), environment)
    assert (found.facts["cxx"], found.facts["nvcc"]) == ("c++ 14.2.0", "Build cuda_13.0/x")
    (tmp_path / "cxx").write_text("#!/bin/sh\nexit 1\n")
    assert stamp.of(str(python), environment).facts["cxx"] == stamp.UNKNOWN


def compilers(folder: Path, **versions: str) -> dict[str, str]:
    """An environment with these programs on its path."""
    for name, text in versions.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CUDA_HOME": str(folder)}


@pytest.mark.parametrize(
    ("cxx", "fact"),
    [
        ("cxx", "c++ 14.2"),
        ("ccache cxx", "ccache 4.8 c++ 14.2"),
        ("ccache clang", "ccache 4.8 clang 19.1"),
        ("cxx -m64", "c++ 14.2 -m64"),
        ("'cxx' -m32", "c++ 14.2 -m32"),
        ("ccache /none/cxx", "ccache 4.8 /none/cxx"),
        ("/none/cxx -m64", f"{stamp.UNKNOWN} (/none/cxx -m64)"),
        ("'", f"{stamp.UNKNOWN} (')"),
    ],
)
def test_a_compiler_of_several_words(python: Path, tmp_path: Path, cxx: str, fact: str) -> None:
    environment = compilers(tmp_path, cxx="c++ 14.2", ccache="ccache 4.8", clang="clang 19.1")
    assert stamp.of(str(python), {**environment, "CXX": cxx}).facts["cxx"] == fact


def test_without_a_compiler_there_is_no_fact(python: Path, tmp_path: Path) -> None:
    environment = compilers(tmp_path, **{"g++": "g++ 12.2"})
    for unset in ({}, {"CXX": ""}, {"CXX": " "}):
        assert stamp.of(str(python), {**environment, **unset}).facts["cxx"] == "g++ 12.2"
    (tmp_path / "g++").unlink()
    python.write_text(python.read_text().replace("cat ", "/bin/cat "))
    facts = stamp.of(str(python), {"PATH": str(tmp_path)}).facts
    assert "cxx" not in facts


def test_nothing_of_the_working_directory_runs_or_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton-9.9.dist-info").mkdir()
    (tmp_path / "triton-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n")
    before = stamp.of(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert stamp.of(sys.executable).facts == before.facts
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    assert stamp.of(sys.executable).facts == before.facts


def test_the_driver_and_the_models_of_gpus(tmp_path: Path) -> None:
    assert stamp._gpus(tmp_path / "none") == {}
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    for bus in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 7\n")
    assert stamp._gpus(tmp_path) == {"driver": "580.65.06", "gpu": "NVIDIA H200"}
    (tmp_path / "gpus" / bus / "information").write_bytes(b"\xff\x00")
    (tmp_path / "version").write_bytes(b"\xff")
    assert stamp._gpus(tmp_path) == {"driver": stamp.UNKNOWN, "gpu": f"NVIDIA H200, {stamp.UNKNOWN}"}


def test_what_the_cpu_can_do_counts(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: EPYC\nflags\t\t: avx2 sse\n\nprocessor\t: 1\nflags\t: other\n")
    first = stamp._cpu(file)
    assert first.startswith("EPYC ")
    file.write_text(file.read_text().replace("avx2 sse", "sse avx2", 1))
    assert stamp._cpu(file) == first
    file.write_text(file.read_text().replace("sse avx2", "sse avx2 avx512f", 1))
    assert stamp._cpu(file) != first
    assert stamp._cpu(tmp_path / "none") == stamp.UNKNOWN
