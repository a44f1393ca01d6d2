"""`wcache doctor`: the loader's command, which looks at its own environment, and the checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import records
from weightcache.cli.attach import loader_command, loader_environment
from weightcache.cli.findings import Finding, note, ok, problem
from weightcache.config_checks import model_path
from weightcache.text import count, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightcache.config import Config

DEADLINE_SECONDS = 120.0
MAX_OUTPUT = 2**20
SUBJECT = "loader"


def command(config: Config) -> Iterator[Finding]:
    """Find the loader's command, let it look at its environment, and pass on what it finds."""
    if not config.loader.command:
        yield note(SUBJECT, "loader.command is not set: ranks hold only what engines donate")
        return
    program = config.loader.command[0]
    found = shutil.which(program, path=loader_environment(config).get("PATH"))
    if found is None:
        what = "is not executable" if Path(program).exists() else "is not found"
        advice = "wcache config set loader.command to the Python of your SGLang environment"
        yield problem(SUBJECT, f"{program} {what}", advice)
        return
    yield ok(SUBJECT, f"{found} is there")
    yield from _own_findings(config)


def _own_findings(config: Config) -> Iterator[Finding]:
    # Files instead of pipes: a grandchild that outlives the deadline can then hold nothing open that is waited for.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                loader_command(config, "doctor", "--json", "--backend", config.memory.backend),
                env=loader_environment(config),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            yield problem(SUBJECT, f"cannot be started ({error.strerror})", "look at loader.command")
            return
        late = False
        try:
            child.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        errors.seek(0)
        findings, strange = _read(output.read(MAX_OUTPUT))
        last = errors.read(MAX_OUTPUT).decode(errors="replace").strip().rpartition("\n")[2]
    yield from findings
    if late:
        yield problem(SUBJECT, f"no end after {DEADLINE_SECONDS:.0f} s", "is its environment on a slow or hung disk?")
    elif not findings or (child.returncode and not any(finding.status == "problem" for finding in findings)):
        told = last or strange or "without a word"
        yield problem(
            SUBJECT,
            f"`doctor --json` ended with status {child.returncode}: {told}",
            "loader.command has to run weightcache.loader in an environment that has weightcache and SGLang",
        )


def _read(output: bytes) -> tuple[list[Finding], str]:
    """Findings, and the last line that is none: libraries print to stdout as they please."""
    findings, strange = [], ""
    for line in output.decode(errors="replace").splitlines():
        try:
            findings.append(records.from_plain(Finding, json.loads(line)))
        except (ValueError, RecursionError):
            strange = line.strip() or strange
    return findings, strange


def _model_path(config: Config) -> str:
    return (model_path(config.model.arguments) or "") if config.model else ""


def checkpoint_bytes(config: Config) -> int:
    """Size of the configured checkpoint's weight files, 0 when it is not a readable local directory."""
    name = _model_path(config)
    try:
        return sum(file.stat().st_size for file in _weights(Path(name))) if name else 0
    except OSError:
        return 0


def _weights(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf"))


def needed(config: Config) -> tuple[str, list[Path]]:
    """What the loader has to be able to run (empty: unknown) and to read, as far as this user can list it."""
    command = config.loader.command
    program = (shutil.which(command[0], path=loader_environment(config).get("PATH")) or "") if command else ""
    path = Path(_model_path(config) or "/nothing")
    try:
        files = [path / "config.json", *_weights(path)] if path.is_dir() else [path]
        return program, [file for file in files if file.exists()]
    except OSError:
        return program, []


def checkpoint(config: Config) -> Iterator[Finding]:
    """The configured model's files, as far as this user sees them."""
    subject, name = "checkpoint", _model_path(config)
    if not name:
        yield note(subject, "no [model] is configured", 'wcache config set model.arguments \'["--model-path", "..."]\'')
        return
    path = Path(name)
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_absolute() or name.startswith(("./", "../")) or name.count("/") != 1:
            yield problem(subject, f"{name} does not exist", "look at --model-path in model.arguments")
        else:
            yield note(subject, f"{name} is no local path: the loader asks its model hub, or its cache, for it")
        return
    except OSError as error:
        yield problem(subject, f"{name}: {error.strerror}", "the loader's user has to be able to read it")
        return
    if path.is_file():
        yield ok(subject, f"{name}, {size(path.stat().st_size)}")
        return
    try:
        files = _weights(path)
        unreadable = [file for file in (path / "config.json", *files) if not os.access(file, os.R_OK)]
    except OSError as error:
        yield problem(subject, f"{name}: {error.strerror}", "the loader's user has to be able to read it")
        return
    if unreadable:
        first = unreadable[0]
        what = "cannot be read by this user" if first.exists() else "does not exist"
        yield problem(subject, f"{first} {what}", "the loader's user has to be able to read the whole checkpoint")
    elif not files:
        yield problem(subject, f"{name} holds no weights (*.safetensors)", "is the download complete?")
    else:
        yield ok(subject, f"{name}, {count(len(files), 'file')}, {size(checkpoint_bytes(config))}")
