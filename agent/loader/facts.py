"""What has to be equal on all nodes of one launch, and the sentence about the first thing that is not."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

from weightcache import __version__

OWN_OF_A_NODE = ("--node-rank", "--base-gpu-id", "--gpu-id-step", "--host", "--port", "--nccl-port", "--dist-init-addr")
"""Options that may differ between nodes: where a node's GPUs and ports are."""
SECRET = ("--api-key", "--admin-api-key")
"""Options that change no weights and belong into no message."""
SHOWN = 200
"""Characters of an argument that an operator gets to see."""

NAMES = {"weightcache": "weightcache", "sglang": "SGLang", "torch": "torch", "python": "Python"}


@dataclass(frozen=True, slots=True)
class Facts:
    """Versions, and SGLang's arguments without those of a node's own."""

    weightcache: str
    sglang: str
    torch: str
    python: str
    arguments: tuple[str, ...]


def gather(arguments: Sequence[str]) -> Facts:
    """The facts of this interpreter; nothing is imported for it."""
    kept = (option for option in _options(arguments) if option[0] not in OWN_OF_A_NODE + SECRET)
    return Facts(
        weightcache=__version__,
        sglang=_installed("sglang"),
        torch=_installed("torch"),
        python=platform.python_version(),
        arguments=tuple(word for option in kept for word in option),
    )


def difference(one: str, ones: Facts, other: str, others: Facts) -> str:
    """The sentence about the first fact that differs between two nodes, by their names; an empty text if none does."""
    for field in fields(Facts):
        left, right = getattr(ones, field.name), getattr(others, field.name)
        if left == right:
            continue
        if field.name != "arguments":
            what = f"{one} runs {NAMES[field.name]} {left}, {other} {right}"
            return f"{what}: all nodes need the same versions"
        left, right = _apart(left, right)
        return f"{one} is configured with {left}, {other} with {right}: all nodes need the same configuration"
    return ""


def _apart(ones: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """The first option that differs, as each side has it."""
    left, right = ({option[0]: option for option in _options(arguments)} for arguments in (ones, others))
    for name in (*left, *right):
        if left.get(name) != right.get(name):
            return _shown(left.get(name), name), _shown(right.get(name), name)
    return _shown(tuple(ones), ""), _shown(tuple(others), "")  # the same options in another order, or repeated


def _shown(option: tuple[str, ...] | None, name: str) -> str:
    return f"no {name}" if option is None else shlex.join(option)[:SHOWN]


def _options(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Each option with its values; ``--name=value`` is the same as ``--name value``."""
    options: list[tuple[str, ...]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            options.append((name, value) if equals else (name,))
        elif options:
            options[-1] += (argument,)
        else:
            options.append((argument,))
    return options


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
