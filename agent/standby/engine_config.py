"""/etc/weightcache/engines/NAME.toml as frozen values: what both slots of an engine run.

Whatever is wrong with a file, or cannot work with two engines on one host, is a ConfigError of one sentence.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weightcache import sglang_options
from weightcache.config import read_text, shown_path, toml_table
from weightcache.config_checks import parse_address
from weightcache.config_decode import DecodeError, check_names, decode, shown
from weightcache.errors import ConfigError, UsageError
from weightcache.sglang_options import DEFAULT_HOST, Given, why_no_socket
from weightcache.standby.places import config_dir, engine_name

Lever = Literal["caches", "graphs", "warmup", "workers"]
OnMismatch = Literal["fallback", "evict", "error"]
LEAST_HANG = 30.0
"""Seconds. An event loop may be in one step for long: a long prefill, a compilation."""
MOST = {
    "wait_seconds": 86400,
    "hang_seconds": 86400,
    "drain_seconds": 86400,
    "own_seconds": 3600,
    "reserve_gigabytes": 65536,
    "kv_gigabytes": 65536,
}
"""More than anybody needs, and less than timers, units and the driver have room for."""
MOST_PRIORITY = 10**6


@dataclass(frozen=True, slots=True)
class EngineTable:
    """[engine]: ``arguments`` are SGLang's. ``listen`` (HOST:PORT) may be left out where they name the port.

    ``priority``: a higher one is the more important. ``python``: of the SGLang environment, as for --wcache-python.
    ``on_mismatch`` and ``without``: as for --wcache-on-mismatch and --wcache-without; an engine whose weights are not
    shared would take the active one's memory, so that it does not start by default. ``wait_seconds``: for a load that
    is under way, as after a boot. ``environment`` is added to both engines' environment.
    """

    arguments: tuple[str, ...]
    listen: str = ""
    priority: int = 0
    python: str = ""
    on_mismatch: OnMismatch = "error"
    wait_seconds: float = 600.0
    without: tuple[Lever, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StandbyTable:
    """[standby]. Seconds: ``hang_seconds``: an event loop that has not come round for so long counts as hung.

    ``drain_seconds``: how long requests may go on when an engine retires. ``own_seconds``: how long a promotion may
    wait until the processes of the engine before are gone, and map KV memory.

    ``reserve_gigabytes`` (2**30 bytes): GPU memory that an active engine leaves to a standby, for its context, graphs
    and workspaces. ``kv_gigabytes``: KV memory on each GPU; 0: what is free when the first engine starts, less that.
    ``unproven``: take kinds of KV memory that no run on a GPU has shown to come back as it was.
    """

    hang_seconds: float = 60.0
    drain_seconds: float = 30.0
    own_seconds: float = 60.0
    reserve_gigabytes: float = 8.0
    kv_gigabytes: float = 0.0
    unproven: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole file. ``host`` and ``port``: where both engines take requests, from ``listen`` or the arguments."""

    name: str
    engine: EngineTable
    standby: StandbyTable
    host: str
    port: int
    path: Path

    @property
    def sglang(self) -> tuple[str, ...]:
        """SGLang's arguments, which name host and port."""
        given = sglang_options.given(self.engine.arguments).values
        host = () if "host" in given else ("--host", self.host)
        port = () if "port" in given else ("--port", str(self.port))
        return (*self.engine.arguments, *host, *port)

    @property
    def digest(self) -> str:
        """Of all that may change how much memory an engine needs: 32 hex digits."""
        said = [self.sglang, self.engine.python, sorted(self.engine.environment.items()), self.engine.without]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]

    @property
    def listen(self) -> str:
        """HOST:PORT, or [IPV6]:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def model(self) -> str:
        """The model's path or name."""
        return sglang_options.given(self.engine.arguments).text("model_path")


def names() -> tuple[str, ...]:
    """The engines that have a file, in alphabetical order. Raises ConfigError."""
    found, problem = look()
    if problem:
        raise ConfigError(problem)
    return found


def look() -> tuple[tuple[str, ...], str]:
    """The engines that have a file, in alphabetical order, and in one sentence why that may not be all, or nothing."""
    directory, problem = config_dir(), ""
    try:
        files = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return (), ""
    except OSError as error:
        return (), f"{shown_path(directory)}: cannot be read ({error.strerror})"
    found = []
    for file in files:
        if file.suffix == ".toml" and not file.name.startswith("."):
            try:
                found.append(engine_name(file.stem))
            except UsageError as error:
                problem = problem or f"{shown_path(file)}: {error.message}"
    return tuple(found), problem


def load(name: str) -> EngineConfig:
    """The file of the engine ``name``. Raises ConfigError, and UsageError for a name that is none."""
    path = config_dir() / f"{engine_name(name)}.toml"
    try:
        return parse(read_text(path), name, path)
    except FileNotFoundError:
        raise ConfigError(f"{shown_path(path)}: there is no such file, which an engine is described by") from None


def parse(text: str, name: str, path: Path) -> EngineConfig:
    """What ``text`` stands for; ``path`` is what the sentences call it. Raises ConfigError."""
    try:
        return _build(toml_table(text), name, path)
    except DecodeError as error:
        raise ConfigError(f"{shown_path(path)}: {error}") from None


def _build(data: dict[str, Any], name: str, path: Path) -> EngineConfig:
    check_names(data, ("engine", "standby"), "")
    if "engine" not in data:
        raise DecodeError("engine", "this table is missing: arguments = [...] says what SGLang is started with")
    engine = decode(EngineTable, data["engine"], "engine")
    standby = decode(StandbyTable, data.get("standby", {}), "standby")
    _check_standby(standby)
    given = sglang_options.given(engine.arguments)
    _check_engine(engine, given)
    _check_most(engine, "engine")
    _check_most(standby, "standby")
    host, port = _address(engine, given)
    return EngineConfig(name, engine, standby, host, port, path)


def _check_standby(standby: StandbyTable) -> None:
    if standby.hang_seconds < LEAST_HANG:
        text = f"must be {LEAST_HANG:g} or greater, since one step of an engine may take long"
        raise DecodeError("standby.hang_seconds", f"{text}, got {standby.hang_seconds:g}")
    if standby.drain_seconds < 0:
        raise DecodeError("standby.drain_seconds", f"must be 0 or greater, got {standby.drain_seconds:g}")
    if standby.own_seconds <= 0:
        raise DecodeError("standby.own_seconds", f"must be greater than 0, got {standby.own_seconds:g}")
    for name in ("reserve_gigabytes", "kv_gigabytes"):
        if getattr(standby, name) < 0:
            raise DecodeError(f"standby.{name}", f"must be 0 or greater, got {getattr(standby, name):g}")


def _check_most(table: EngineTable | StandbyTable, key: str) -> None:
    for name, most in MOST.items():
        if (value := getattr(table, name, 0)) > most:
            raise DecodeError(f"{key}.{name}", f"must be {most} or less, got {shown(value)}")


def _check_engine(engine: EngineTable, given: Given) -> None:
    for i, argument in enumerate(engine.arguments):
        name = argument.partition("=")[0]
        if name.startswith(("--weight-cache", "--wcache")):
            raise DecodeError(f"engine.arguments[{i}]", f"{shown(name)} is set by weightcache itself: remove it")
    if not given.text("model_path") and not given.opaque:
        raise DecodeError("engine.arguments", "--model-path is missing: which model should be served?")
    for variable in engine.environment:
        if not variable or "=" in variable or "\0" in variable:
            raise DecodeError("engine.environment", f"{shown(variable)} is no name for an environment variable")
    if engine.python and not engine.python.startswith("/"):
        raise DecodeError("engine.python", f"expected an absolute path, got {shown(engine.python)}")
    if abs(engine.priority) > MOST_PRIORITY:
        text = f"must be from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        raise DecodeError("engine.priority", f"{text}, got {shown(engine.priority)}")
    if engine.wait_seconds < 0:
        raise DecodeError("engine.wait_seconds", f"must be 0 or greater, got {engine.wait_seconds:g}")
    if why := why_no_socket(given, engine.environment) or _why_not_twice(given):
        raise DecodeError("engine.arguments", f"no engine with a standby can have these: {why}")


def _why_not_twice(given: Given) -> str:
    """Why two engines with these arguments cannot live on one host, besides the port that they share."""
    if (given.number("nnodes") or 1) > 1:
        return "with --nnodes the engine is on several hosts, and a lock of one host says nothing about the others"
    if given.flag("enable_dp_attention") or (given.number("attn_dp_size") or 1) > 1:
        return "--enable-dp-attention makes both engines bind the same ports"
    for name in ("nccl_port", "dist_init_addr", "kv_events_config", "gated_launch_port", "grpc_port"):
        if given.text(name):
            return f"--{name.replace('_', '-')} names a port that both engines would bind"
    # SGLang serves on without that socket when its port is taken: nobody would be told of the load after a take-over.
    if given.text("load_publish_endpoint").strip().lower() not in ("", "off"):
        return "--load-publish-endpoint makes both engines bind the same ports"
    if given.text("warmups"):
        return "--warmups runs requests before an engine has all of its KV memory"
    return ""


def _address(engine: EngineTable, given: Given) -> tuple[str, int]:
    host, port = given.text("host"), given.text("port")
    if port and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise DecodeError("engine.arguments", f"--port {shown(port)} is no port that clients could know")
    if not engine.listen:
        if not port:
            raise DecodeError("engine.arguments", "--port is missing: where should the engine listen? (or set listen)")
        return _checked(host or DEFAULT_HOST, "engine.arguments"), int(port)
    try:
        wanted = parse_address(engine.listen)
    except ValueError as error:
        raise DecodeError("engine.listen", str(error)) from None
    if not wanted[1]:
        raise DecodeError("engine.listen", "0 is no port that clients could know")
    for option, said, own in (("--host", host, wanted[0]), ("--port", port, str(wanted[1]))):
        if said and said != own:
            raise DecodeError("engine.listen", f"the arguments say {option} {shown(said)}, and this says {shown(own)}")
    return _checked(wanted[0], "engine.listen"), wanted[1]


def _checked(host: str, key: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise DecodeError(key, f"a socket unit takes IP addresses, such as 0.0.0.0, and not {shown(host)}") from None
    return host
