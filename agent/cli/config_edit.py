"""Changing one key of weightcache.toml: comments and order kept, checked before it is written, replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcache import config
from weightcache.errors import ConfigError, PermissionRefused, UsageError

if TYPE_CHECKING:
    from weightcache.cli.config_keys import Key


def parse_value(text: str) -> Any:
    """``text`` as a TOML value, or as text when it is none."""
    try:
        data = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # Text with line breaks could smuggle in further keys; it is then no single value.
    return data["value"] if list(data) == ["value"] else text


def change(path: Path, key: Key, value: Any) -> bool:
    """Set ``key`` in the file. False when it had that value already. Nothing is written unless the result is valid."""
    # A symbolic link stays one: the file behind it is replaced.
    path = Path(os.path.realpath(path))
    old = _read(path)
    new = _edited(path, old, key, value)
    config.parse(new, path)
    if key.find(tomllib.loads(new)) != value:
        raise ConfigError(f"{path}: {key.text} could not be changed in place; edit the file by hand")
    if new == old:
        return False
    _replace(path, new)
    return True


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read(config.MAX_FILE + 1)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        config.load(path)  # raises the sentence for it
        raise


def _edited(path: Path, text: str, key: Key, value: Any) -> str:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ImportError:
        raise ConfigError(
            "`wcache config set` needs tomlkit, which this Python lacks: install python3-tomlkit, "
            f"or edit {path} by hand"
        ) from None
    try:
        document: Any = tomlkit.parse(text)
    except (TOMLKitError, ValueError, RecursionError) as error:
        config.parse(text, path)  # raises the usual sentence, with line and column
        raise ConfigError(f"{path}: cannot be edited in place ({error})") from None
    try:
        _assign(document, key, value)
        return tomlkit.dumps(document)
    except (TOMLKitError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {key.text} cannot be set to this value ({error})") from None


def _assign(document: Any, key: Key, value: Any) -> None:
    import tomlkit

    at = document
    for step, following in zip(key.steps, key.steps[1:], strict=False):
        if isinstance(step, int):
            if step >= len(at):
                raise UsageError(f"{key.text}: there are only {len(at)} [[rank]] tables")
        elif step not in at:
            at[step] = tomlkit.aot() if isinstance(following, int) else tomlkit.table()
        at = at[step]
    last = key.steps[-1]
    if not isinstance(last, int):
        if isinstance(value, dict) and len(key.steps) == 1:
            # A whole section stays a [section], not one long line.
            table = tomlkit.table()
            table.update(value)
            value = table
        at[last] = value
    elif last < len(at):
        at[last] = value
    elif last == len(at) and isinstance(value, dict):
        table = tomlkit.table()
        table.update(value)
        at.append(table)
    else:
        raise UsageError(f"{key.text}: a table is expected, and the next free one is rank[{len(at)}]")


def _replace(path: Path, text: str) -> None:
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            _keep_owner(path, file.fileno())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        temporary = None
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except PermissionError:
        raise PermissionRefused(f"this user may not change {path}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _keep_owner(path: Path, fd: int) -> None:
    try:
        old = path.stat()
    except FileNotFoundError:
        os.fchmod(fd, 0o644)
        return
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, old.st_mode & 0o7777)
