"""``python -m weightcache.server``: the resident agent of one rank."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import weightcache
from weightcache.errors import WeightcacheError
from weightcache.server import listen, notify, process
from weightcache.server.server import Server
from weightcache.server.settings import Options, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightcache.server.listen import Handed

log = logging.getLogger("weightcache")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line as a value."""
    parser = argparse.ArgumentParser(prog="weightcache.server", description="Hold one rank's model weights.")
    parser.add_argument("--version", action="version", version=weightcache.__version__)
    parser.add_argument("--rank", type=int, required=True, help="the rank to serve")
    parser.add_argument("--config", type=Path, help="configuration file (default: /etc/weightcache/weightcache.toml)")
    parser.add_argument("--runtime-dir", type=Path, help="where the sockets live, instead of the configured directory")
    parser.add_argument("--listen", type=Path, help="where to bind the public socket, instead of RANK.sock there")
    parser.add_argument("--load", action="store_true", help="load the configured model at once")
    parser.add_argument("--loader-socket", type=Path, help="ask here for loaders instead of starting them")
    parser.add_argument("--publish-group", default="", help="group of the publish socket, for loaders of another user")
    parser.add_argument("--observer", default="", metavar="USER", help="a user that may see the status and no more")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; returns the exit status."""
    handed = listen.handed_in(os.environ)
    options = parse(arguments)
    process.start_log(options.rank)
    process.protect()
    process.raise_descriptor_limit()
    try:
        asyncio.run(_serve(options, handed))
    except WeightcacheError as error:
        log.error("%s", error.message)  # noqa: TRY400 - a sentence for an operator, no traceback
        return error.exit_status
    return 0


async def _serve(options: Options, handed: Handed) -> None:
    await Server(resolve(options), notify.manager(os.environ), handed).serve()


if __name__ == "__main__":
    sys.exit(main())
