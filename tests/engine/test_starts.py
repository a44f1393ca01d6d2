"""What a start through wcache-launch leaves: a line, and a trace that `wcache starts` shows. No engine of its own."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from tests.engine import support
from tests.engine.conftest import Attached
from tests.support.agent import eventually
from tests.support.engine import Engine
from tests.support.environments import environments, scratch
from weightcache.starts import phases, reading
from weightcache.starts.reading import FIRST_TOKEN, SERVING, WARM_UP_TOKEN, Process, Start

WHERE = scratch() / "state" / "starts"
SERVING_SECONDS = 120.0
"""The warm-up ends some seconds after the first answer."""


def start_of(engine: Engine) -> Start:
    """The trace of an engine that runs, once it serves."""
    pids = {process.pid for process in engine.family()}

    def found() -> Start | None:
        starts = reading.newest_first(WHERE)
        return next((start for start in starts if start.main is not None and start.main.pid in pids), None)

    eventually(
        lambda: (start := found()) is not None and start.point(SERVING) is not None, SERVING_SECONDS, engine.tail
    )
    start = found()
    assert start is not None
    return start


def wcache(version: str, *arguments: str) -> str:
    """What `wcache starts` prints, at 80 columns and without a terminal."""
    command = [str(environments().script("wcache", version)), "starts", *arguments, "--dir", str(WHERE)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"COLUMNS": "80", "PYTHONUTF8": "1"}, check=True
    )
    return done.stdout


def test_one_line_says_what_took_the_time(attached: Attached) -> None:
    start = start_of(attached.engine)

    def said() -> list[str]:
        return [line for line in support.lines(attached.engine) if line.startswith("serving after ")]

    eventually(lambda: bool(said()), 10.0, attached.engine.tail)  # the trace comes before the report
    lines = said()
    assert lines == [phases.sentence(start)]
    found = re.fullmatch(r"serving after ([\d.]+) s \(first token after ([\d.]+) s\): (.+)", lines[0])
    assert found, lines
    assert float(found[2]) <= float(found[1])
    named = dict(re.findall(r"([a-z -]+?) ([\d.]+)(?:, |$)", found[3]))
    assert {"imports", "weights", "tokenizer", "warm-up"} <= set(named)
    assert abs(sum(map(float, named.values())) - float(found[1])) < 0.05 * (len(named) + 6)


def test_the_phases_of_every_process_lie_within_the_start(attached: Attached) -> None:
    start = start_of(attached.engine)
    assert start.damaged == 0
    assert start.live
    assert (start.how, start.outcome, len(start.attempts)) == ("cold", "attached", 1)
    assert [process.title for process in start.processes] == ["main", "scheduler rank 0", "detokenizer"]
    assert {process.pid for process in start.processes} <= {process.pid for process in attached.engine.family()}
    origin, serving = start.header.began if start.header else 0.0, start.point(SERVING) or 0.0
    for process in start.processes:
        assert process.began >= origin - 0.02  # /proc counts in hundredths
        for span in process.spans:
            assert span.end is not None, (process.title, span)
            assert process.began <= span.begin <= span.end
            assert span.end <= origin + serving + 0.1, (process.title, span)
    main, scheduler, detokenizer = start.processes
    assert {"imports", "arguments", "spawn", "tokenizer", "waiting", "http server", "warm-up"} <= names(main)
    assert {"imports", "scheduler", "distributed", "tokenizer", "weights", "kv", "graphs"} <= names(scheduler)
    assert {"imports", "detokenizer"} <= names(detokenizer)
    assert list(scheduler.points) == ["ready"]


def names(process: Process) -> set[str]:
    """The phases of a process."""
    return {span.name for span in process.spans}


def test_hardly_any_time_is_without_a_name(attached: Attached) -> None:
    start = start_of(attached.engine)
    found = phases.phases(start)
    assert sum(found.values()) == start.point(SERVING)
    assert found["imports"] > 0.2 * sum(found.values())
    assert found["other"] < 0.2 * sum(found.values())
    (entry,) = start.weights
    assert sum(entry.milliseconds.values()) / 1000 <= found["weights"]


def test_tokens_of_the_warm_up_and_of_a_request_are_told_apart(attached: Attached) -> None:
    support.text(attached.engine)
    start = start_of(attached.engine)
    warm, serving, first = (start.point(name) for name in (WARM_UP_TOKEN, SERVING, FIRST_TOKEN))
    assert warm is not None
    assert serving is not None
    assert first is not None
    assert warm <= serving < first


def test_the_command_shows_it(attached: Attached, sglang_version: str) -> None:
    start = start_of(attached.engine)
    (row,) = [line for line in wcache(sglang_version).splitlines() if line.split()[0] == str(start.number)]
    assert row.split()[4:6] == ["cold", "attached"]
    assert row.endswith("serving")
    listed: dict[str, Any] = json.loads(wcache(sglang_version, "--json"))
    assert listed["schema"] == 1
    (entry,) = [entry for entry in listed["starts"] if entry["start"] == start.number]
    assert entry["serving"] == start.point(SERVING)
    drawn = wcache(sglang_version, "show", str(start.number), "--ascii")
    assert phases.sentence(start) in drawn
    bars = drawn[drawn.index("\nseconds") :].splitlines()[1:]
    assert max(map(len, bars)) <= 80
    assert len(bars) > 20
    shown = json.loads(wcache(sglang_version, "show", str(start.number), "--json"))
    assert (shown["schema"], shown["start"], len(shown["processes"])) == (1, start.number, 3)
