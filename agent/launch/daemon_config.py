"""The configuration that daemon mode writes for the agents it starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from weightcache import paths
from weightcache.config import DEFAULT_DEPLOYMENT
from weightcache.config_layout import layout_key
from weightcache.errors import PermissionRefused, UsageError, WeightcacheError
from weightcache.launch.server_only import without
from weightcache.spellings import FLAGS, SPELLINGS, find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightcache.config import RankConfig
    from weightcache.deployment import Deployment

NAME = "weightcache.toml"


def model_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """SGLang's arguments as the loader gets them: nothing secret, the model's directory by its absolute path.

    What says the layout is left out: that is [deployment]'s business.
    """
    result = _without_layout(without(arguments))
    for i, token in enumerate(result):
        name, equals, value = token.partition("=")
        if name in SPELLINGS["model_path"]:
            if equals:
                result[i] = f"{name}={_absolute(value)}"
            elif i + 1 < len(result):
                result[i + 1] = _absolute(result[i + 1])
    return tuple(result)


def render(
    python: str,
    arguments: Sequence[str],
    backend: str,
    ranks: Sequence[RankConfig],
    unproven: bool = False,
    deployment: Deployment = DEFAULT_DEPLOYMENT,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The file's text. ``unproven``: methods without evidence are checked in every load instead of refused.

    ``environment`` is added to the loader's.
    """
    variables = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in (environment or {}).items())
    lines = [
        "# Written by wcache-launch --weight-cache-mode daemon for the launch that started these agents.",
        "[loader]",
        f"command = {_list((python, '-m', 'weightcache.loader'))}",
        *([f"environment = {{ {variables} }}"] if variables else []),
        "[model]",
        f"arguments = {_list(arguments)}",
        "[memory]",
        f"backend = {_text(backend)}",
    ]
    lines += ["[policy]", 'unproven = "check"'] if unproven else []
    lines += _deployment(deployment)
    for entry in ranks:
        lines += ["[[rank]]", f"rank = {entry.rank}"]
        lines += [f"gpu = {_text(entry.gpu)}"] if entry.gpu else []
    return "\n".join(lines) + "\n"


def private_directory(path: Path) -> Path:
    """Make ``path`` for this user alone, or check that it is. Raises PermissionRefused."""
    try:
        return paths.own_directory(path, 0o700, private=True)
    except WeightcacheError as error:
        raise PermissionRefused(f"the runtime directory: {error.message} (--wcache-runtime-dir)") from None


def write(directory: Path, text: str) -> Path:
    """Put the file into ``directory``, whole or not at all, readable for this user alone."""
    target = directory / NAME
    fd, name = tempfile.mkstemp(dir=directory, prefix=f".{NAME}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _without_layout(arguments: Sequence[str]) -> list[str]:
    result, dropping = [], False
    for token in arguments:
        name, equals, _ = token.partition("=")
        if dropping and not token.startswith("--"):
            dropping = False
        elif layout_key(name):
            dropping = not equals and find(FLAGS, name) is None
        else:
            dropping = False
            result.append(token)
    return result


def _deployment(layout: Deployment) -> list[str]:
    """The table; nothing for a single rank. The GPUs are in [[rank]] tables."""
    sizes = {name: getattr(layout, name) for name in ("tp_size", "pp_size", "dp_size", "ep_size")}
    lines = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
    lines += ["attention_dp = true"] if layout.attention_dp else []
    return ["[deployment]", *lines] if lines else []


def _absolute(value: str) -> str:
    return os.path.realpath(value) if Path(value).is_dir() else value


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the argument {value!r} is no UTF-8 text and cannot be written to a configuration") from None
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'
