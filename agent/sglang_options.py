"""Read single values out of SGLang's arguments without SGLang.

A YAML file given with ``--config`` is read as far as plain ``key: value`` lines go; arguments win over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache.spellings import FLAGS as FLAGS, SPELLINGS as SPELLINGS, find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_YAML = 1 << 20
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000


@dataclass(frozen=True, slots=True)
class Given:
    """The values that command line and ``--config`` file show; ``opaque``: the file holds more than plain lines."""

    values: Mapping[str, str]
    opaque: bool = False

    def text(self, field: str, default: str = "") -> str:
        """The value of ``field``."""
        return self.values.get(field, default)

    def number(self, field: str, default: int = 1) -> int | None:
        """The value of ``field`` as a whole number; None when it is none (SGLang will say so)."""
        try:
            return int(self.values.get(field, default))
        except ValueError:
            return None

    def flag(self, field: str) -> bool:
        """Whether a flag is set."""
        return self.values.get(field, "").lower() in ("true", "yes", "on")


def given(arguments: Sequence[str]) -> Given:
    """What ``arguments`` say."""
    values: dict[str, str] = {}
    for i, token in enumerate(arguments):
        name, equals, value = token.partition("=")
        if not name.startswith("-"):
            continue
        if field := find(FLAGS, name):
            values[field] = "true"
        elif field := find(SPELLINGS, name):
            following = "".join(arguments[i + 1 : i + 2])
            values[field] = value if equals else following
    opaque = False
    if path := values.get("config"):
        from_file, opaque = _yaml(Path(path))
        values = {**from_file, **values}
    return Given(values, opaque)


def why_no_socket(launch: Given, environment: Mapping[str, str]) -> str:
    """Why this launch cannot listen on a socket that it is given, or an empty text."""
    if launch.flag("enable_http2"):
        return "--enable-http2 binds a port of its own"
    if (launch.number("tokenizer_worker_num") or 1) > 1:
        return "--tokenizer-worker-num binds the port in several processes"
    if launch.flag("grpc_mode"):
        return "a server that speaks gRPC binds a port of its own"
    if environment.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        return "SGLANG_RUST_SERVER binds a port of its own"
    if launch.flag("encoder_only") or launch.flag("use_ray"):
        return "--encoder-only and --use-ray start servers that weightcache is not in"
    if (launch.number("node_rank", 0) or 0) > 0:
        return "only the first node of an engine answers requests"
    return ""


def _yaml(path: Path) -> tuple[dict[str, str], bool]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_YAML).splitlines()
    except (OSError, ValueError):
        return {}, True
    values: dict[str, str] = {}
    opaque = False
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z][\w-]*):\s*(?:'([^']*)'|\"([^\"\\]*)\"|([^'\"#{\[|>&*!]*?))\s*(?:#.*)?", line)
        if match is None:
            opaque = True
            continue
        name = "--" + match[1].replace("_", "-")
        field = find(FLAGS, name) or find(SPELLINGS, name)
        if field:
            values[field] = next((text for text in match.groups()[1:] if text is not None), "")
    return values, opaque
