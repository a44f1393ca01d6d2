"""Whether a configuration's [deployment], [[rank]] tables and model arguments go together. Raises DecodeError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcache.config_decode import DecodeError
from weightcache.deployment import LayoutError
from weightcache.spellings import FLAGS, SPELLINGS, find

if TYPE_CHECKING:
    from weightcache.config import Config

MAX_RANK = 65535

DEPLOYMENT = {
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "dp_size": "dp_size",
    "ep_size": "ep_size",
    "attn_dp_size": "dp_size and attention_dp",
    "enable_dp_attention": "attention_dp",
    "nnodes": "nodes",
    "node_rank": "nodes",
    "dist_init_addr": "port",
    "nccl_port": "port",
    "base_gpu_id": "base_gpu_id",
    "gpu_id_step": "gpu_id_step",
}
"""Options of SGLang by which key of [deployment] says the same."""


def check_deployment(config: Config) -> None:
    """Whether there can be such a deployment."""
    try:
        config.deployment.check()
    except LayoutError as error:
        raise DecodeError(f"deployment.{error.key}", error.text) from None
    if len(config.deployment.ranks) > MAX_RANK + 1:
        raise DecodeError("deployment", f"{len(config.deployment.ranks)} ranks are more than {MAX_RANK + 1}")


def check_tables(config: Config) -> None:
    """Whether [[rank]] tables fit [deployment]: what is loaded together is on one host, or on none."""
    deployment, listed = config.deployment, {entry.rank for entry in config.ranks}
    for i, entry in enumerate(config.ranks):
        if entry.rank not in deployment.ranks:
            last = deployment.ranks[-1]
            raise DecodeError(f"rank[{i}].rank", f"the deployment has ranks 0 to {last}, not {entry.rank}")
        for other in deployment.launch_of(entry.rank):
            if other not in listed:
                text = f"rank {entry.rank} is loaded together with rank {other}, which has no [[rank]] table"
                raise DecodeError(f"rank[{i}].rank", text)


def layout_key(name: str) -> str:
    """The key of [deployment] that says the same as SGLang's option ``name``, or an empty text."""
    return DEPLOYMENT.get(find(FLAGS, name) or find(SPELLINGS, name) or "", "") if name.startswith("--") else ""
