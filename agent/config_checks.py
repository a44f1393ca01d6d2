"""Which values of a configuration make sense together. Raises DecodeError, whose key says where to look."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING

from weightcache.config_decode import DecodeError, shown
from weightcache.config_layout import MAX_RANK as MAX_RANK, check_deployment, check_tables, layout_key

if TYPE_CHECKING:
    from weightcache.config import Config, RankConfig

GRANULARITY = 2 * 2**20
"""Arenas are whole multiples of this: the allocation granularity of CUDA's virtual memory management."""

MAX_ARENA = 2**44
MAX_DIRECTORY = 107 - len(f"/{MAX_RANK}.publish.sock")
"""The path of a Unix socket has at most 107 bytes (unix(7))."""

MAX_PORT = 65535

_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+)):(\d{1,5})", re.ASCII | re.IGNORECASE)

_UUID_HINT = "`nvidia-smi -L` prints the UUIDs"
_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID = re.compile(rf"(?:(GPU-|MIG-)({_HEX})|(MIG-GPU-)({_HEX}/\d+/\d+))", re.ASCII | re.IGNORECASE)


def check(config: Config, deployed: bool, explicit_ranks: bool) -> Config:
    """``config`` with its GPU names in one spelling.

    ``deployed``, ``explicit_ranks``: the file has a table [deployment], and [[rank]] tables.
    """
    _check_values(config)
    check_deployment(config)
    _check_model(config, deployed or explicit_ranks)
    if not explicit_ranks:
        return config
    ranks = _checked_ranks(config)
    if deployed:
        check_tables(config)
    return dataclasses.replace(config, ranks=ranks)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ValueError with what was expected."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > MAX_PORT:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:9464 or [::1]:9464, got {shown(text)}")
    return match[1] or match[2], int(match[3])


def _check_values(config: Config) -> None:
    directory = config.agent.runtime_dir
    if directory is not None and not directory.is_absolute():
        raise DecodeError("agent.runtime_dir", f"expected an absolute path, got {shown(str(directory))}")
    if directory is not None and len(os.fsencode(directory)) > MAX_DIRECTORY:
        raise DecodeError("agent.runtime_dir", f"too long for socket paths: at most {MAX_DIRECTORY} bytes")
    for name in ("timeout_seconds", "stall_seconds"):
        if getattr(config.loader, name) <= 0:
            raise DecodeError(f"loader.{name}", f"must be greater than 0, got {getattr(config.loader, name):g}")
    if config.loader.command and not config.loader.command[0]:
        raise DecodeError("loader.command[0]", "the program's name is empty")
    for name in config.loader.environment:
        if not name or "=" in name or "\0" in name:
            raise DecodeError("loader.environment", f"{shown(name)} is no name for an environment variable")
    for i, user in enumerate(config.policy.publishers):
        if not user:
            raise DecodeError(f"policy.publishers[{i}]", "a user name is empty")
    try:
        parse_address(config.exporter.listen)
    except ValueError as error:
        raise DecodeError("exporter.listen", str(error)) from None
    for name in ("max_bytes", "keep_days"):
        if getattr(config.compiled, name) < 0:
            raise DecodeError(f"compiled.{name}", f"must be 0 or greater, got {getattr(config.compiled, name):g}")
    size = config.memory.arena_bytes
    if size < 0 or size % GRANULARITY:
        raise DecodeError("memory.arena_bytes", f"must be 0 (automatic) or a multiple of 2 MiB, got {size}")
    if size > MAX_ARENA:
        raise DecodeError("memory.arena_bytes", f"{size} bytes are more than any device has")


def _check_model(config: Config, located: bool) -> None:
    if config.model is None:
        return
    if not config.loader.command:
        raise DecodeError(
            "loader.command",
            "a [model] is configured and no command to load it: set it to the Python of your SGLang environment, "
            'such as ["/opt/sglang/bin/python", "-m", "weightcache.loader"]',
        )
    arguments = config.model.arguments
    for i, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        if name.startswith(("--weight-cache", "--wcache")):
            raise DecodeError(f"model.arguments[{i}]", f"{shown(name)} is set by weightcache itself: remove it")
    path = model_path(arguments)
    if path is None:
        raise DecodeError("model.arguments", "--model-path is missing: which model should be held?")
    if not path or path.startswith("--"):
        raise DecodeError("model.arguments", "--model-path has no value")
    for i, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        if key := layout_key(name):
            text = f"{shown(name)} is what {key} in [deployment] says: write it there, and remove it here"
            raise DecodeError(f"model.arguments[{i}]", text)
    if config.memory.backend == "cuda" and not located:
        raise DecodeError("rank", f"backend cuda needs a [[rank]] with its gpu ({_UUID_HINT}), or a [deployment]")


def model_path(arguments: tuple[str, ...]) -> str | None:
    """The value of --model-path (or --model); None without the option, empty without a value."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--model-path", "--model"):
            return value if equals else "".join(arguments[i + 1 : i + 2])
    return None


def _checked_ranks(config: Config) -> tuple[RankConfig, ...]:
    checked: list[RankConfig] = []
    for i, entry in enumerate(config.ranks):
        if not 0 <= entry.rank <= MAX_RANK:
            raise DecodeError(f"rank[{i}].rank", f"expected 0 to {MAX_RANK}, got {shown(entry.rank)}")
        if any(other.rank == entry.rank for other in checked):
            raise DecodeError(f"rank[{i}].rank", f"rank {entry.rank} is configured twice")
        entry = dataclasses.replace(entry, gpu=_gpu(entry.gpu, config.memory.backend, f"rank[{i}].gpu"))
        for other in checked:
            if entry.gpu and other.gpu == entry.gpu:
                raise DecodeError(f"rank[{i}].gpu", f"ranks {other.rank} and {entry.rank} are on one GPU ({entry.gpu})")
        checked.append(entry)
    return tuple(checked)


def _gpu(gpu: str, backend: str, key: str) -> str:
    if backend == "host":
        if gpu:
            raise DecodeError(key, "the host backend uses no GPU: remove this key, or set memory.backend to cuda")
        return ""
    if not gpu:
        raise DecodeError(key, f"backend cuda needs the UUID of this rank's GPU ({_UUID_HINT})")
    match = _UUID.fullmatch(gpu)
    if match is None:
        # An ordinal means another device as soon as CUDA_VISIBLE_DEVICES or the bus order changes.
        raise DecodeError(key, f"expected a GPU's whole UUID (GPU-... or MIG-...), got {shown(gpu)} ({_UUID_HINT})")
    prefix, rest = match[1] or match[3], match[2] or match[4]
    return prefix.upper() + rest.lower()
