"""Read single values out of SGLang's arguments without SGLang.

Spellings and shortest abbreviations are those of 0.5.17 and 0.5.23 (argparse accepts unambiguous abbreviations, so
``--tp 2`` is ``--tp-size 2``). A YAML file given with ``--config`` is read as far as plain ``key: value`` lines go;
arguments win over it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "model_path": {"--model-path": "--model-p", "--model": "--model"},
    "tp_size": {"--tp-size": "--tp", "--tensor-parallel-size": "--te"},
    "pp_size": {"--pp-size": "--pp-s", "--pipeline-parallel-size": "--pi"},
    "dp_size": {"--dp-size": "--dp", "--data-parallel-size": "--da"},
    "ep_size": {"--ep-size": "--ep-s", "--expert-parallel-size": "--expert-p", "--ep": "--ep"},
    "attn_dp_size": {"--attn-dp-size": "--attn-d", "--attention-data-parallel-size": "--attention-d"},
    "moe_a2a_backend": {"--moe-a2a-backend": "--moe-a"},
    "dtype": {"--dtype": "--dt"},
    "quantization": {"--quantization": "--quantization"},
    "revision": {"--revision": "--rev"},
    "override_args": {"--json-model-override-args": "--j"},
    "load_format": {"--load-format": "--load-f"},
    "device": {"--device": "--dev"},
    "base_gpu_id": {"--base-gpu-id": "--bas"},
    "gpu_id_step": {"--gpu-id-step": "--gp"},
    "port": {"--port": "--po"},
    "nnodes": {"--nnodes": "--nn"},
    "node_rank": {"--node-rank": "--nod"},
    "cpu_offload_gb": {"--cpu-offload-gb": "--cpu"},
    "offload_group_size": {"--offload-group-size": "--offload-g"},
    "elastic_ep_backend": {"--elastic-ep-backend": "--elastic-ep-b"},
    "elastic_ep_join_mode": {"--elastic-ep-join-mode": "--elastic-ep-join-m"},
    "dwdp_size": {"--dwdp-size": "--dw"},
    "torchao_config": {"--torchao-config": "--torcha"},
    "startup_weight_load_mode": {"--startup-weight-load-mode": "--sta"},
    "monokernel_backend": {"--monokernel-backend": "--mon"},
    "config": {"--config": "--config"},
}
"""Options with a value: field -> spelling -> its shortest abbreviation."""

FLAGS: Mapping[str, Mapping[str, str]] = {
    "enable_eplb": {"--enable-eplb": "--enable-ep"},
    "enable_elastic_expert_backup": {"--enable-elastic-expert-backup": "--enable-el"},
    "elastic_ep_rejoin": {"--elastic-ep-rejoin": "--elastic-ep-r"},
    "encoder_only": {"--encoder-only": "--encoder-o"},
    "use_ray": {"--use-ray": "--us"},
    "enable_paged_experts": {"--enable-paged-experts": "--enable-paged"},
    "enable_amd_monokernel": {"--enable-amd-monokernel": "--enable-am"},
    "enable_dp_attention": {"--enable-dp-attention": "--enable-dp-attention"},
    "remote_instance_seed": {
        "--remote-instance-weight-loader-start-seed-via-transfer-engine": "--remote-instance-weight-loader-st"
    },
    "help": {"--help": "--he", "-h": "-h"},
}

MAX_YAML = 1 << 20


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
        if field := _find(FLAGS, name):
            values[field] = "true"
        elif field := _find(SPELLINGS, name):
            following = "".join(arguments[i + 1 : i + 2])
            values[field] = value if equals else following
    opaque = False
    if path := values.get("config"):
        from_file, opaque = _yaml(Path(path))
        values = {**from_file, **values}
    return Given(values, opaque)


def _find(table: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    for field, spellings in table.items():
        for spelling, shortest in spellings.items():
            if name.startswith(shortest) and spelling.startswith(name):
                return field
    return None


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
        field = _find(FLAGS, name) or _find(SPELLINGS, name)
        if field:
            values[field] = next((text for text in match.groups()[1:] if text is not None), "")
    return values, opaque
