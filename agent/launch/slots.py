"""`wcache-launch --wcache-slot NAME-a`: an engine's file in place of a command line, and the slot that it is for."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from weightcache.errors import UsageError
from weightcache.launch import layout, listener
from weightcache.launch.board import Board
from weightcache.launch.notify import Manager
from weightcache.launch.reports import MAX_SOCKET_PATH
from weightcache.launch.slot import Slot
from weightcache.launch.world import START_SECONDS, Limits
from weightcache.paths import runtime_dir
from weightcache.sglang_options import why_no_socket
from weightcache.standby import engine_config, fence
from weightcache.standby.places import EnginePaths
from weightcache.standby.status import SlotStatus

HOST = "host"
"""In the place of a GPU, where memory of the host is the device's."""

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightcache.launch.arguments import Options
    from weightcache.sglang_options import Given
    from weightcache.standby.engine_config import EngineConfig
    from weightcache.standby.places import SlotName


def completed(options: Options, name: SlotName) -> tuple[Options, EngineConfig]:
    """The options with all that the engine's file says, whose environment is this process's from now on.

    Raises ConfigError.
    """
    config = engine_config.load(name.engine)
    table = config.engine
    os.environ.update(table.environment)
    return replace(
        options,
        sglang=config.sglang,
        python=table.python,
        on_mismatch=table.on_mismatch,
        wait_seconds=table.wait_seconds,
        # No warm workers: the other slot's engine is warmer, and they would take memory twice.
        without=tuple({*table.without, "workers"}),
        restart=True,
    ), config


@contextmanager
def opened(name: SlotName, config: EngineConfig, launch: Given, directory: Path | None = None) -> Iterator[Slot]:
    """The slot, as long as this launcher has it; its files are below ``directory``, where that is given.

    Raises UsageError.
    """
    manager = Manager.of(os.environ)
    # As for `wcache engines --runtime-dir`: agents that a configuration puts elsewhere take no engine along.
    paths = EnginePaths(runtime_dir(directory) / "engines", name.engine)
    paths.prepare()
    _check_paths(paths, name)
    if why := why_no_socket(launch, os.environ):
        raise UsageError(f"this engine cannot be in a slot: {why}")
    handed = listener.handed_in(os.environ, config.port)
    if handed is None:
        raise UsageError(
            f"{name} was given no listening socket: it takes requests from weightcache-http@{name.engine}.socket, "
            f"which systemd hands to weightcache-engine@{name}.service"
        )
    initial = SlotStatus(
        name.engine,
        name.slot,
        "starting",
        0.0,
        fence.identify(os.getpid()),
        priority=config.engine.priority,
        model=config.model,
        listen=config.listen,
        gpus=_gpus(launch),
        size=len(layout.ranks(launch)),
    )
    board = Board(paths.status(name.slot), initial)
    with (
        handed,
        closing(board),
        Slot(name, paths, handed, limits(config), len(layout.ranks(launch)), board, manager) as slot,
    ):
        yield slot


def limits(config: EngineConfig) -> Limits:
    """What the engine's file says to the director. An engine that waits for a load has the more time to start."""
    standby = config.standby
    return Limits(
        standby.own_seconds,
        standby.drain_seconds,
        standby.hang_seconds,
        start=START_SECONDS + config.engine.wait_seconds,
        reserve_bytes=int(standby.reserve_gigabytes * 2**30),
        kv_bytes=int(standby.kv_gigabytes * 2**30),
        unproven=standby.unproven,
        engine=config.digest,
    )


def _gpus(launch: Given) -> tuple[str, ...]:
    """Whose memory this engine shares with others."""
    _, ranks = layout.rank_configs(launch)
    return tuple(sorted({rank.gpu or HOST for rank in ranks}))


def _check_paths(paths: EnginePaths, name: SlotName) -> None:
    for path in (paths.control(name.slot), paths.private(name.slot)):
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise UsageError(
                f"{path} is too long for a socket: choose a shorter directory by --wcache-runtime-dir or "
                "$WEIGHTCACHE_RUNTIME_DIR"
            )
