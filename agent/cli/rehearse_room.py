"""How many tokens of KV memory a rehearsal may take, beside what else is on the device."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcache.errors import NoRoom
from weightcache.text import size

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

TOKENS = (20480, 10240, 5120, 2560)
"""The first that fits. Twice SGLang's usual prefill chunk, or the most that it uses and a little; no kernel depends on
the number itself, but all are multiples of any page size."""
OTHERS = {"cuda": 4 << 30, "host": 2 << 30}
"""A guess at what an engine takes besides weights and KV memory: context, graphs, work space."""
TOKEN_BYTES = 512 << 10
"""For a model whose configuration is not at hand: more than most have."""
SECONDS = 30.0

_MOST = 16 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes of the fullest place that ranks of this launch are on. ``where`` names it."""

    where: str
    free: int
    ranks: int = 1
    """How many ranks share it."""


def tokens(room: Room | None, backend: str, token_bytes: int, asked: int | None = None) -> int:
    """How many tokens to ask for; ``asked``: what the arguments say. Raises NoRoom with the numbers."""
    choices = TOKENS if asked is None else (asked,)
    if room is None:
        return choices[0]
    for choice in choices:
        if _needed(choice, room, backend, token_bytes) <= room.free:
            return choice
    needed = _needed(choices[-1], room, backend, token_bytes)
    raise NoRoom(
        f"{room.where} has {size(room.free)} free, and a rehearsal takes about {size(needed)} there: end what else "
        "runs, or rehearse before the engines start"
    )


def _needed(count: int, room: Room, backend: str, token_bytes: int) -> int:
    return room.ranks * (OTHERS.get(backend, 0) + count * token_bytes)


def free_on_gpus(gpus: Collection[str]) -> Room | None:
    """The fullest of ``gpus`` (UUIDs) by what nvidia-smi says; None where it does not know them."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
        rows = [line.split(",") for line in answer.splitlines() if line.strip()]
        free = {uuid.strip(): int(mebibytes) << 20 for uuid, mebibytes in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    wanted = {gpu.lower() for gpu in gpus}
    found = [Room(f"GPU {uuid}", count) for uuid, count in free.items() if uuid.lower() in wanted]
    return min(found, key=lambda room: room.free) if len(found) == len(wanted) and found else None


def free_on_host(ranks: int, file: Path = Path("/proc/meminfo")) -> Room | None:
    """The host's memory, which all ranks share."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Room("this host", int(line.split()[1]) << 10, ranks)
    except (OSError, ValueError, IndexError):
        pass
    return None


def token_bytes(model: str, tp_size: int = 1, pp_size: int = 1) -> int:
    """The KV memory of one token on one rank in bytes, from the checkpoint's config.json; a high guess without it."""
    try:
        with Path(model, "config.json").open("rb") as file:
            whole = json.loads(file.read(_MOST))
        config = whole.get("text_config", whole)
        layers = _number(config, "num_hidden_layers")
        if "kv_lora_rank" in config:  # latent attention: one vector for keys and values, the same on every rank
            width = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        else:
            heads = _number(config, "num_attention_heads")
            shared = int(config.get("num_key_value_heads") or heads)
            head = int(config.get("head_dim") or _number(config, "hidden_size") // heads)
            width = 2 * max(1, -(-shared // tp_size)) * head
        return max(1, 2 * width * -(-layers // pp_size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
        return TOKEN_BYTES


def _number(config: Mapping[str, Any], name: str) -> int:
    value = int(config[name])
    if value <= 0:
        raise ValueError(name)
    return value
