"""Lines of a trace, and whoever appends them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.starts.made import header
from weightcache.starts import reading, record
from weightcache.starts.record import Header, Mark, Writer, decode, encode

APPENDER = """
import sys, time
from weightcache.starts.record import Writer
writer = Writer.to(sys.argv[1])
writer.mark("process", "scheduler", facts={"began": 1.0})
for number in range(300):
    writer.mark("point", f"point {number} " + "x" * 50)
print(writer.works)
"""


def trace(where: Path) -> Path:
    path = where / "000001.jsonl"
    path.write_bytes(encode(header()))
    return path


def test_what_is_written_is_read() -> None:
    mark = Mark(1.5, 7, "begin", "weights", 3, "target", {"size": 4.0})
    assert decode(encode(mark), Mark) == mark
    assert decode(encode(header()), Header) == header()
    assert encode(Mark(1.0, 7, "end", "kv")) == b'{"at":1.0,"pid":7,"kind":"end","name":"kv"}\n'


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"at":1,"pid":1,"kind":"begin","name":""}',
        b'{"at":1,"pid":1,"kind":"other","name":"a"}', b'{"at":-1,"pid":1,"kind":"end","name":"a"}',
        b'{"at":1,"pid":0,"kind":"end","name":"a"}', b'{"at":1e999,"pid":1,"kind":"end","name":"a"}',
        b'{"at":1,"pid":1,"kind":"end","name":"a","facts":{"b":1e300}}', b'{"at":1,"pid":1,"kind":"end","more":1}',
        b'{"at":1,"pid":1,"kind":"end","name":"' + b"a" * 81 + b'"}', b" " * 5000 + b"{}",
    ],
)  # fmt: skip
def test_other_lines_are_refused(data: bytes) -> None:
    for kind in (Mark, Header):
        with pytest.raises(ValueError, match=r"."):
            decode(data, kind)


def test_a_header_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema 2"):
        decode(encode(header()).replace(b'"schema":1', b'"schema":2'), Header)


def test_a_header_with_many_arguments_loses_some() -> None:
    found = decode(encode(header(arguments=("x" * 50,) * 200)), Header)
    assert isinstance(found, Header)
    assert 0 < len(found.arguments) < 200


def test_a_mark_that_is_too_long_is_left_out_and_the_next_is_written(tmp_path: Path) -> None:
    path = trace(tmp_path)
    writer = Writer.to(str(path))
    writer.mark("point", "a", facts={f"name {number:060}": 1.0 for number in range(100)})
    writer.mark("point", "b" * 200)
    assert writer.works
    writer.close()
    (line,) = path.read_bytes().splitlines()[1:]
    assert b'"name":"' + b"b" * 80 + b'"' in line


def test_a_mark_costs_little(tmp_path: Path) -> None:
    writer = Writer.to(str(trace(tmp_path)))
    started = time.process_time()
    for _ in range(1000):
        writer.mark("begin", "weights")
    assert time.process_time() - started < 0.5
    writer.close()


@pytest.mark.parametrize("kind", ["none", "missing", "folder", "link", "fifo"])
def test_a_writer_without_a_file_is_silent(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(trace(tmp_path))
    elif kind == "fifo":
        os.mkfifo(path)
    writer = Writer.to("" if kind == "none" else str(path))
    writer.mark("point", "a")
    assert not writer.works
    if kind == "link":
        assert len(trace(tmp_path).read_bytes().splitlines()) == 1


def test_a_full_disk_silences_a_writer(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the write is cut short first, and then fails."""
    path = trace(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
        writer = Writer.to(str(path))
        writer.mark("point", "a")
        works = writer.works
        writer.mark("point", "b")
        os._exit(0 if not works and writer.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    start = reading.parse(1, path.read_bytes())
    assert start.header is not None
    assert start.damaged == 1


def test_a_failing_write_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer.to(str(trace(tmp_path)))

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(record.os, "write", full)
    writer.mark("point", "a")
    assert not writer.works


def test_lines_of_many_processes_do_not_mix(tmp_path: Path) -> None:
    path = trace(tmp_path)
    running = [
        subprocess.Popen([sys.executable, "-c", APPENDER, path], stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    assert {process.communicate(timeout=60)[0] for process in running} == {"True\n"}
    start = reading.parse(1, path.read_bytes())
    assert start.damaged == 0
    assert sorted(process.pid for process in start.processes) == sorted(process.pid for process in running)
    assert {len(process.points) for process in start.processes} == {300}


def test_processes_that_are_killed_leave_at_most_half_a_line(tmp_path: Path) -> None:
    path = trace(tmp_path)
    endless = APPENDER.replace("range(300)", "__import__('itertools').count()")
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", endless, path], stdout=subprocess.DEVNULL)
        size = path.stat().st_size
        deadline = time.monotonic() + 20
        while path.stat().st_size < size + 2000 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait(10)
    data = path.read_bytes()
    assert len(data) > 10_000
    start = reading.parse(1, data)
    assert len(start.processes) == 5
    assert start.damaged <= 5


def test_when_this_process_began() -> None:
    now = time.monotonic()
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert abs(record.process_began(child.pid) - now) < 2.0
        assert record.process_began() < now
    finally:
        child.kill()
        child.wait(10)
    with pytest.raises(OSError, match="No such file"):
        record.process_began(child.pid)
