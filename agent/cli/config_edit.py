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
    wanted = _assigned(_parsed(old, path), key, value)
    config.from_data(wanted, path)
    new = _edited(path, old, key, wanted)
    if new == old:
        return False
    if _parsed(new, path) != wanted:
        raise _by_hand(path, key, "the edit would change something else, too")
    _replace(path, new)
    return True


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        config.parse(text, path)  # raises the sentence for it
        raise


def _assigned(data: dict[str, Any], key: Key, value: Any) -> dict[str, Any]:
    at: Any = data
    for step, following in zip(key.steps, (*key.steps[1:], None), strict=True):
        if isinstance(step, int):
            if step > len(at) or (step == len(at) and following is not None):
                raise UsageError(
                    f"{key.text}: there are {len(at)} [[rank]] tables; the next new one is rank[{len(at)}]"
                )
            if step == len(at):
                at.append(None)
        if following is None:
            at[step] = value
        elif isinstance(step, str):
            at = at.setdefault(step, [] if isinstance(following, int) else {})
        else:
            at = at[step]
        if following is not None and not isinstance(at, list if isinstance(following, int) else dict):
            raise ConfigError(f"{key.text}: the file has no table there")
    return data


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read(config.MAX_FILE + 1)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        config.load(path)  # raises the sentence for it
        raise


def _edited(path: Path, text: str, key: Key, wanted: dict[str, Any]) -> str:
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
        section = key.steps[0]
        _merge(document, section, wanted[str(section)])
        return tomlkit.dumps(document)
    except (TOMLKitError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        # tomlkit does not manage every layout of a file that is valid TOML.
        raise _by_hand(path, key, str(error)) from None


def _merge(at: Any, step: Any, wanted: Any) -> None:
    """Make ``at[step]`` equal to ``wanted`` and leave alone what is equal already: replaced tables lose comments."""
    import tomlkit

    present: Any = at[step] if isinstance(at, list) else at.get(step)
    if isinstance(wanted, dict) and isinstance(present, dict):
        for name in [name for name in present if name not in wanted]:
            del present[name]
        for name, value in wanted.items():
            _merge(present, name, value)
    elif _tables(wanted) and _tables(present):
        for i, value in enumerate(wanted):
            if i < len(present):
                _merge(present, i, value)
            else:
                present.append(_table(value, blank_line=True))
        for _ in range(len(present) - len(wanted)):
            del present[len(wanted)]
    elif present is None and _tables(wanted):
        at[step] = tomlkit.aot()
        for value in wanted:
            at[step].append(_table(value))
    elif present is None and isinstance(wanted, dict) and isinstance(at, tomlkit.TOMLDocument):
        at[step] = _table(wanted)
    elif present is None or present != wanted or type(tomlkit.item(present).unwrap()) is not type(wanted):
        at[step] = wanted


def _tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _table(value: dict[str, Any], blank_line: bool = False) -> Any:
    import tomlkit

    table = tomlkit.table()
    table.update(value)
    if blank_line:
        table.trivia.indent = "\n"
    return table


def _by_hand(path: Path, key: Key, why: str) -> ConfigError:
    return ConfigError(f"{path}: {key.text} cannot be changed in place ({why}); edit the file by hand")


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
