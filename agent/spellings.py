"""How SGLang spells the options that weightcache reads, without SGLang.

Spellings and shortest abbreviations are those of 0.5.17 and 0.5.23 (argparse accepts unambiguous abbreviations, so
``--tp 2`` is ``--tp-size 2``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "host": {"--host": "--ho"},
    "port": {"--port": "--po"},
    "tokenizer_worker_num": {"--tokenizer-worker-num": "--tokenizer-w"},
    "nnodes": {"--nnodes": "--nn"},
    "node_rank": {"--node-rank": "--nod"},
    "dist_init_addr": {"--dist-init-addr": "--dist-i", "--nccl-init-addr": "--nccl-i"},
    "nccl_port": {"--nccl-port": "--nccl-p"},
    "kv_events_config": {"--kv-events-config": "--kv-e"},
    "load_publish_endpoint": {"--load-publish-endpoint": "--load-p"},
    "gated_launch_port": {"--gated-launch-port": "--ga"},
    "grpc_port": {"--grpc-port": "--grpc-p"},
    "warmups": {"--warmups": "--war"},
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
    "enable_http2": {"--enable-http2": "--enable-ht"},
    "grpc_mode": {"--grpc-mode": "--grpc-m", "--smg-grpc-mode": "--smg-g"},
    "enable_dp_attention": {"--enable-dp-attention": "--enable-dp-attention"},
    "remote_instance_seed": {
        "--remote-instance-weight-loader-start-seed-via-transfer-engine": "--remote-instance-weight-loader-st"
    },
    "help": {"--help": "--he", "-h": "-h"},
}


def find(table: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    """The field of ``table`` that the option ``name`` (without a value) stands for."""
    for field, spellings in table.items():
        for spelling, shortest in spellings.items():
            if name.startswith(shortest) and spelling.startswith(name):
                return field
    return None
