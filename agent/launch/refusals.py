"""SGLang options that rewrite, move or hide weights, so that shared read-only weights cannot serve them.

Named here because the launcher can say so before anything starts; the engine checks its live objects again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcache.sglang_options import Given


def refused(given: Given) -> str:
    """The reason why this launch cannot use resident weights, in one sentence, or an empty text."""
    for option, present, why in (
        ("--cpu-offload-gb", _above(given, "cpu_offload_gb", 0), "it moves weights to host memory"),
        ("--offload-group-size", _above(given, "offload_group_size", 0), "it moves weights to host memory"),
        ("--enable-eplb", given.flag("enable_eplb"), "it rewrites expert weights while serving"),
        ("--elastic-ep-backend", given.text("elastic_ep_backend", "none") != "none", "it rewrites expert weights"),
        ("--elastic-ep-join-mode", bool(given.text("elastic_ep_join_mode")), "it rewrites expert weights"),
        ("--elastic-ep-rejoin", given.flag("elastic_ep_rejoin"), "it rewrites expert weights"),
        (
            "--enable-elastic-expert-backup",
            given.flag("enable_elastic_expert_backup"),
            "it reads and rewrites expert weights by a path of its own",
        ),
        ("--dwdp-size", _above(given, "dwdp_size", 1), "it gives expert weights another home"),
        ("--torchao-config", bool(given.text("torchao_config")), "it replaces the weights after loading"),
        (
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
            given.flag("remote_instance_seed"),
            "it serves weights out of SGLang's own allocations",
        ),
        (
            "--load-format remote_instance",
            given.text("load_format").lower() == "remote_instance",
            "it fetches the weights from another server",
        ),
        (
            "--startup-weight-load-mode overlap",
            given.text("startup_weight_load_mode").lower() == "overlap",
            "it loads by a path that cannot be replaced",
        ),
        ("--enable-paged-experts", given.flag("enable_paged_experts"), "it pages expert weights in and out"),
        ("--load-format expert_pack", given.text("load_format").lower() == "expert_pack", "it pages expert weights"),
        (
            "--enable-amd-monokernel",
            given.flag("enable_amd_monokernel") or bool(given.text("monokernel_backend")),
            "it has to watch the weights being loaded",
        ),
        ("--encoder-only", given.flag("encoder_only"), "its processes load no plugins"),
        ("--use-ray", given.flag("use_ray"), "its workers do not inherit from this launch"),
    ):
        if present:
            return f"weightcache cannot serve {option} ({why})"
    return ""


def _above(given: Given, field: str, limit: float) -> bool:
    try:
        return float(given.text(field, str(limit))) > limit
    except ValueError:
        return False
