"""weightcache.toml as frozen values, and its reader; docs/weightcache.toml is the commented example.

Whatever is wrong with a file is a ConfigError of one sentence: file, key, what is wrong and, for a key that does not
exist, the nearest one that does.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from weightcache import paths
from weightcache.config_checks import check
from weightcache.config_decode import DecodeError, check_names, decode, parse_size
from weightcache.deployment import Deployment
from weightcache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_FILE = 2**20
DEFAULT_DEPLOYMENT = Deployment()


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """[agent]: where sockets live, and the group whose members may attach (empty: leave the group alone)."""

    runtime_dir: Path | None = None
    socket_group: str = ""


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """[loader]: the command that runs weightcache.loader in the operator's SGLang environment, and its limits.

    ``timeout_seconds`` bounds one load; ``stall_seconds`` is how long a loader may show no progress (bytes, CPU time
    or I/O). ``environment`` is added to the loader's environment.
    """

    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timeout_seconds: float = 7200.0
    stall_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """[model]: the SGLang arguments of the model to hold, exactly as sglang.launch_server takes them."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """[memory]: ``cuda`` or ``host``; ``arena_bytes`` 0 chooses by the size of the set."""

    backend: Literal["cuda", "host"] = "cuda"
    arena_bytes: Annotated[int, parse_size] = 0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """[policy]: what clients may do, and what happens to weights that may be damaged.

    ``publishers`` are user names that may donate, besides root and the agent's. ``verify_adopted`` says when sets that
    outlived an agent are checked, ``damaged`` whether a damaged set is replaced or held back, ``unproven`` whether a
    load is refused or checked on the spot when no run has proven its methods.
    """

    clients_may_evict_unleased: bool = False
    donation: bool = True
    publishers: tuple[str, ...] = ()
    verify_adopted: Literal["background", "before-ready"] = "background"
    damaged: Literal["reload", "hold"] = "reload"
    unproven: Literal["refuse", "check"] = "refuse"


@dataclass(frozen=True, slots=True)
class ExporterConfig:
    """[exporter]: ``listen`` is where metrics are served, ``HOST:PORT`` or ``[IPV6]:PORT``."""

    listen: str = "127.0.0.1:9464"


@dataclass(frozen=True, slots=True)
class CompiledConfig:
    """[compiled]: what is kept of the kernels that engines compiled, for each user that starts engines.

    A stamp is the directory of one environment: it goes when it was not used for ``keep_days``, and the oldest ones
    while all together take more than ``max_bytes``; never the last used one, nor one in use.
    """

    max_bytes: Annotated[int, parse_size] = 20 * 2**30
    keep_days: float = 30.0


@dataclass(frozen=True, slots=True)
class RankConfig:
    """[[rank]]: one rank and the UUID of its GPU (empty on the host backend)."""

    rank: int
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file.

    ``ranks`` are those of [[rank]] tables. A file with [deployment] and without them has none here: its ranks are the
    deployment's, on the GPUs that each host finds (weightcache.placement).
    """

    agent: AgentConfig = AgentConfig()
    loader: LoaderConfig = LoaderConfig()
    model: ModelConfig | None = None
    deployment: Deployment = DEFAULT_DEPLOYMENT
    memory: MemoryConfig = MemoryConfig()
    policy: PolicyConfig = PolicyConfig()
    exporter: ExporterConfig = ExporterConfig()
    compiled: CompiledConfig = CompiledConfig()
    ranks: tuple[RankConfig, ...] = (RankConfig(0),)
    path: Path | None = None


SECTIONS: Mapping[str, type] = {
    "agent": AgentConfig,
    "loader": LoaderConfig,
    "model": ModelConfig,
    "deployment": Deployment,
    "memory": MemoryConfig,
    "policy": PolicyConfig,
    "exporter": ExporterConfig,
    "compiled": CompiledConfig,
    "rank": RankConfig,
}
"""The tables of the file; ``rank`` is a list of tables."""


def load(path: Path | None) -> Config:
    """Read ``path``; None means /etc/weightcache/weightcache.toml where it exists, else the defaults.

    Raises ConfigError.
    """
    if path is None:
        try:
            return parse(read_text(paths.CONFIG_FILE), paths.CONFIG_FILE)
        except FileNotFoundError:
            return Config()
    try:
        return parse(read_text(path), path)
    except FileNotFoundError:
        raise ConfigError(f"{shown_path(path)}: there is no such file") from None


def parse(text: str, path: Path) -> Config:
    """The Config that ``text`` stands for; ``path`` is what the sentences call it. Raises ConfigError."""
    try:
        data = toml_table(text)
    except DecodeError as error:
        raise ConfigError(f"{shown_path(path)}: {error}") from None
    return from_data(data, path)


def from_data(data: dict[str, Any], path: Path) -> Config:
    """The Config that the parsed TOML ``data`` stands for. Raises ConfigError."""
    try:
        return _build(data, path)
    except DecodeError as error:
        raise ConfigError(f"{shown_path(path)}: {error}") from None


def read_text(path: Path) -> str:
    """The file's text. Raises FileNotFoundError, and ConfigError for whatever else is wrong."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"{shown_path(path)}: larger than {MAX_FILE} bytes, which is no configuration file")
        return data.decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{shown_path(path)}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown_path(path)}: line {line}: a byte that is no UTF-8 text") from None
    except ValueError:
        raise ConfigError(f"{shown_path(path)}: no usable file name") from None


def toml_table(text: str) -> dict[str, Any]:
    """The TOML document ``text``. Raises DecodeError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rpartition(" (at ")
        if match := re.fullmatch(r"line (\d+), column (\d+)\)", where):
            line, column = int(match[1]), int(match[2])
        else:  # "at end of document"
            line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
        raise DecodeError(f"line {line}, column {column}", f"not TOML: {what or error}") from None
    except RecursionError:
        raise DecodeError("", "lists or tables are nested too deeply") from None
    except ValueError as error:  # such as a whole number of thousands of digits
        raise DecodeError("", f"not TOML: {error}") from None


def _build(data: dict[str, Any], path: Path) -> Config:
    check_names(data, SECTIONS, "")
    model = data.get("model")
    config = Config(
        agent=decode(AgentConfig, data.get("agent", {}), "agent"),
        loader=decode(LoaderConfig, data.get("loader", {}), "loader"),
        model=None if model is None else decode(ModelConfig, model, "model"),
        deployment=decode(Deployment, data.get("deployment", {}), "deployment"),
        memory=decode(MemoryConfig, data.get("memory", {}), "memory"),
        policy=decode(PolicyConfig, data.get("policy", {}), "policy"),
        exporter=decode(ExporterConfig, data.get("exporter", {}), "exporter"),
        compiled=decode(CompiledConfig, data.get("compiled", {}), "compiled"),
        ranks=_ranks(data),
        path=path,
    )
    return check(config, deployed="deployment" in data, explicit_ranks="rank" in data)


def _ranks(whole: dict[str, Any]) -> tuple[RankConfig, ...]:
    if "rank" not in whole:
        return () if "deployment" in whole else Config().ranks
    data = whole["rank"]
    if not isinstance(data, list):
        raise DecodeError("rank", "expected a list of tables: write [[rank]], in double brackets")
    if not data:
        raise DecodeError("rank", "at least one [[rank]] is needed")
    return tuple(decode(RankConfig, entry, f"rank[{i}]") for i, entry in enumerate(data))


def shown_path(path: Path) -> str:
    """A file's name in a sentence, safe to print on a terminal."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
