"""Where a rank's sockets and files are.

The runtime directory is nobody's RuntimeDirectory= (systemd.exec(5)), so that stopping one rank removes nothing of
the others: a tmpfiles.d entry makes /run/weightcache, and a user without it gets one below $XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightcache.errors import ConfigError, WeightcacheError

SYSTEM_RUNTIME_DIR = Path("/run/weightcache")
CONFIG_FILE = Path("/etc/weightcache/weightcache.toml")
EVIDENCE_FILE = Path("/etc/weightcache/evidence.toml")


@dataclass(frozen=True, slots=True)
class RankPaths:
    """The sockets and files of one rank below one runtime directory."""

    directory: Path
    rank: int

    @classmethod
    def of(cls, public: Path) -> RankPaths:
        """Those of the rank whose public socket is at ``public``."""
        return cls(public.parent, int(public.name.partition(".")[0]))

    @property
    def public(self) -> Path:
        """The socket that activates the agent: hello, attach, load."""
        return self.directory / f"{self.rank}.sock"

    @property
    def publish(self) -> Path:
        """The socket that takes arenas from loaders and donors."""
        return self.directory / f"{self.rank}.publish.sock"

    @property
    def status(self) -> Path:
        """The socket that answers status and lease renewals and never starts the agent."""
        return self.directory / f"{self.rank}.status.sock"

    @property
    def status_file(self) -> Path:
        """The last known status, for readers while the agent is down."""
        return self.directory / f"{self.rank}.json"

    @property
    def drain_marker(self) -> Path:
        """Exists while the rank is drained."""
        return self.directory / f"{self.rank}.drained"

    @property
    def failed_marker(self) -> Path:
        """Exists after a load failed, so that a restarted agent does not load again by itself."""
        return self.directory / f"{self.rank}.failed"

    @property
    def damage_marker(self) -> Path:
        """Names a resident set that must not be given out, so that a restarted agent knows it too."""
        return self.directory / f"{self.rank}.damaged"


def runtime_dir(option: Path | None = None, configured: Path | None = None) -> Path:
    """A command line's option, else agent.runtime_dir of the configuration, else $WEIGHTCACHE_RUNTIME_DIR, else
    /run/weightcache where it exists, else a directory of this user. The same order everywhere, or clients would look
    elsewhere than agents serve.
    """
    if named := option or configured:
        return named
    if chosen := os.environ.get("WEIGHTCACHE_RUNTIME_DIR"):
        return Path(chosen)
    if SYSTEM_RUNTIME_DIR.is_dir():
        return SYSTEM_RUNTIME_DIR
    return user_runtime_dir()


def user_runtime_dir() -> Path:
    """A runtime directory of this user: below $XDG_RUNTIME_DIR, or below the temporary directory."""
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "weightcache"
    return Path(tempfile.gettempdir()) / f"weightcache-{os.getuid()}"


def own_directory(path: Path, mode: int = 0o755, private: bool = False) -> Path:
    """Make ``path``, or take what is there if nobody else can put other files in its place.

    Where everybody may make files, as below /tmp, whoever came first made it: there, each directory on the way has to
    be this user's own or root's, and the last one this user's alone. ``private``: the last one has to be that anywhere.
    Raises ConfigError for what is somebody else's, WeightcacheError where it cannot be made.
    """
    path = path.absolute()
    try:
        for directory in (*reversed(path.parents), path):
            last = directory == path
            with contextlib.suppress(FileExistsError):
                if not os.path.lexists(directory):
                    directory.mkdir(mode if last else 0o755)
            if (last and private) or directory.parent.stat().st_mode & stat.S_IWOTH:
                _require_own(directory, last)
        if not path.is_dir():
            raise ConfigError(f"{path} is no directory: remove it or choose another one")
    except OSError as error:
        raise WeightcacheError(f"{path} cannot be made ({error.strerror})") from None
    return path


def _require_own(directory: Path, last: bool) -> None:
    found = directory.lstat()
    owners = (os.geteuid(),) if last else (os.geteuid(), 0)
    # Below one like /tmp itself, with the sticky bit, nobody replaces what is another user's.
    closed = not found.st_mode & 0o022 or (not last and found.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or not closed:
        raise ConfigError(
            f"{directory} must be a directory that belongs to uid {os.geteuid()} and that nobody else may write: "
            "remove it or choose another one"
        )


def state_dir() -> Path:
    """What launches of one user remember of each other: $WEIGHTCACHE_STATE_DIR, else a unit's StateDirectory=, else
    below $XDG_STATE_HOME.
    """
    return _own("WEIGHTCACHE_STATE_DIR", "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """What can be made again at the price of time, such as compiled code, which nobody else may be able to write:
    $WEIGHTCACHE_CACHE_DIR, else a unit's CacheDirectory=, else below $XDG_CACHE_HOME.
    """
    return _own("WEIGHTCACHE_CACHE_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache")


def _own(variable: str, unit: str, xdg: str, below_home: str) -> Path:
    for name in (variable, unit):
        if chosen := os.environ.get(name, "").partition(":")[0]:
            return Path(chosen).absolute()
    base = os.environ.get(xdg, "")
    return (Path(base) if base.startswith("/") else Path.home() / below_home) / "weightcache"
