"""The families with layers of their own kind: gpt-oss, two hybrids, and very many layers."""

from __future__ import annotations

from tests.models.families import (
    COMMON,
    EXPERT,
    EXPERTS,
    HEAD,
    HEADS,
    HIDDEN,
    VOCAB,
    Family,
    Sizes,
    around,
    attention,
    experts,
    gated,
    norms,
)


def gpt_oss() -> Family:
    """gpt-oss; its experts' projections are one tensor each, as [experts, outputs, inputs] before quantization."""
    head = 64
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **COMMON,
        "head_dim": head,
        "intermediate_size": HIDDEN,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "swiglu_limit": 7.0,
        "pad_token_id": 0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    sizes: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        sizes |= norms(layer) | attention(f"{layer}.self_attn", head=head, bias=True)
        sizes |= {
            f"{layer}.self_attn.o_proj.bias": (HIDDEN,),
            f"{layer}.self_attn.sinks": (HEADS,),
            f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN),
            f"{layer}.mlp.router.bias": (EXPERTS,),
            f"{layer}.mlp.experts.gate_up_proj": (EXPERTS, 2 * HIDDEN, HIDDEN),
            f"{layer}.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN),
            f"{layer}.mlp.experts.down_proj": (EXPERTS, HIDDEN, HIDDEN),
            f"{layer}.mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
        }
    return Family(config, around(sizes))


def gated_delta() -> Family:
    """Qwen3-Next: three layers of linear attention to one of full attention, experts with a gated shared one."""
    full = {3}
    keys, values, kernel = 2, 4, 4
    state = 2 * keys * HEAD + values * HEAD
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **COMMON,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": kernel,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": EXPERT,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    sizes: Sizes = {}
    for index in range(4):
        layer = f"model.layers.{index}"
        linear = f"{layer}.linear_attn"
        sizes |= norms(layer) | experts(f"{layer}.mlp") | gated(f"{layer}.mlp.shared_expert", EXPERT)
        sizes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
        if index in full:
            sizes |= attention(f"{layer}.self_attn", queries=2 * HEADS, norms=True)
            continue
        sizes |= {
            f"{linear}.in_proj_qkvz.weight": (state + values * HEAD, HIDDEN),
            f"{linear}.in_proj_ba.weight": (2 * values, HIDDEN),
            f"{linear}.conv1d.weight": (state, 1, kernel),
            f"{linear}.A_log": (values,),
            f"{linear}.dt_bias": (values,),
            f"{linear}.norm.weight": (HEAD,),
            f"{linear}.out_proj.weight": (HIDDEN, values * HEAD),
        }
    return Family(config, around(sizes))


def mamba() -> Family:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    inner, heads, groups, state, kernel = 512, 8, 1, 128, 4
    mixed = inner + 2 * groups * state
    config = {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **COMMON,
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": kernel,
        "mamba_expand": 1,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
    }
    sizes: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        sizes |= attention(f"{layer}.self_attn") | gated(f"{layer}.feed_forward")
        sizes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.pre_ff_layernorm.weight": (HIDDEN,),
            f"{layer}.mamba.in_proj.weight": (inner + mixed + heads, HIDDEN),
            f"{layer}.mamba.conv1d.weight": (mixed, 1, kernel),
            f"{layer}.mamba.conv1d.bias": (mixed,),
            f"{layer}.mamba.A_log": (heads,),
            f"{layer}.mamba.D": (heads,),
            f"{layer}.mamba.dt_bias": (heads,),
            f"{layer}.mamba.norm.weight": (inner,),
            f"{layer}.mamba.out_proj.weight": (HIDDEN, inner),
        }
    renamed = {name.replace("model.norm", "model.final_layernorm"): size for name, size in around(sizes).items()}
    return Family(config, renamed)


def deep(layers: int = 375) -> Family:
    """Qwen3 with as many tensors as the largest models have (3,004 in SGLang, eight a layer), all of them small."""
    width = HEAD
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **COMMON,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    square = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    vectors = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    sizes: Sizes = {"model.embed_tokens.weight": (VOCAB, width)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        sizes |= {f"{layer}.{name}.weight": (width, width) for name in square}
        sizes |= {f"{layer}.{name}.weight": (width,) for name in vectors}
    return Family(config, {**sizes, "model.norm.weight": (width,), "lm_head.weight": (VOCAB, width)})
