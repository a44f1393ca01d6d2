"""Small models of the shapes that SGLang serves: each one's config.json, and name and size of all its tensors.

Sizes are the smallest that CUDA kernels take: multiples of 128 in both directions of every product, heads of 128, and
for latent attention the ranks that its kernels are written for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HIDDEN = 512
INNER = 1024
EXPERT = 256
EXPERTS = 8
HEADS = 4
KV_HEADS = 2
HEAD = 128
VOCAB = 1024

Sizes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model before its weights are drawn."""

    config: dict[str, Any]
    sizes: Sizes


def around(layers: Sizes, tied: bool = False) -> Sizes:
    """What every decoder has beside its layers."""
    found: Sizes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), **layers, "model.norm.weight": (HIDDEN,)}
    return found if tied else {**found, "lm_head.weight": (VOCAB, HIDDEN)}


def attention(prefix: str, head: int = HEAD, queries: int = HEADS, norms: bool = False, bias: bool = False) -> Sizes:
    """Grouped-query attention. ``queries``: heads of the query projection, which may hold a gate too."""
    sizes: Sizes = {
        f"{prefix}.q_proj.weight": (queries * head, HIDDEN),
        f"{prefix}.k_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{prefix}.v_proj.weight": (KV_HEADS * head, HIDDEN),
        f"{prefix}.o_proj.weight": (HIDDEN, HEADS * head),
    }
    if bias:
        sizes |= {f"{prefix}.{name}_proj.bias": (sizes[f"{prefix}.{name}_proj.weight"][0],) for name in "qkv"}
    if norms:
        sizes |= {f"{prefix}.q_norm.weight": (head,), f"{prefix}.k_norm.weight": (head,)}
    return sizes


def gated(prefix: str, inner: int = INNER) -> Sizes:
    """A gated feed-forward layer."""
    return {
        f"{prefix}.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}.up_proj.weight": (inner, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, inner),
    }


def experts(prefix: str, count: int = EXPERTS, inner: int = EXPERT) -> Sizes:
    """A router and its experts, one tensor a projection of an expert."""
    sizes: Sizes = {f"{prefix}.gate.weight": (count, HIDDEN)}
    for index in range(count):
        sizes |= gated(f"{prefix}.experts.{index}", inner)
    return sizes


def norms(prefix: str) -> Sizes:
    """The two norms of a decoder layer."""
    return {f"{prefix}.input_layernorm.weight": (HIDDEN,), f"{prefix}.post_attention_layernorm.weight": (HIDDEN,)}


def dense(tied: bool = False, layers: int = 2) -> Family:
    """Qwen3."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **COMMON, "num_hidden_layers": layers}
    sizes: Sizes = {}
    for index in range(layers):
        layer = f"model.layers.{index}"
        sizes |= norms(layer) | attention(f"{layer}.self_attn", norms=True) | gated(f"{layer}.mlp")
    return Family({**config, "tie_word_embeddings": tied}, around(sizes, tied))


def llama() -> Family:
    """Llama, for which draft models of the EAGLE kind exist."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON, "mlp_bias": False}
    sizes: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        sizes |= norms(layer) | attention(f"{layer}.self_attn") | gated(f"{layer}.mlp")
    return Family(config, around(sizes))


def moe() -> Family:
    """Qwen3-MoE."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    sizes: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        sizes |= norms(layer) | attention(f"{layer}.self_attn", norms=True) | experts(f"{layer}.mlp")
    return Family(config, around(sizes))


def mla() -> Family:
    """DeepSeek-V2: latent attention, a dense layer, then experts with a shared one."""
    queries, latent, nope, rope = 256, 512, 128, 64
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **{name: value for name, value in COMMON.items() if name != "head_dim"},
        "num_key_value_heads": HEADS,
        "q_lora_rank": queries,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": HEAD,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    }
    sizes: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        attend = f"{layer}.self_attn"
        sizes |= norms(layer) | {
            f"{attend}.q_a_proj.weight": (queries, HIDDEN),
            f"{attend}.q_a_layernorm.weight": (queries,),
            f"{attend}.q_b_proj.weight": (HEADS * (nope + rope), queries),
            f"{attend}.kv_a_proj_with_mqa.weight": (latent + rope, HIDDEN),
            f"{attend}.kv_a_layernorm.weight": (latent,),
            f"{attend}.kv_b_proj.weight": (HEADS * (nope + HEAD), latent),
            f"{attend}.o_proj.weight": (HIDDEN, HEADS * HEAD),
        }
        if index:
            sizes |= experts(f"{layer}.mlp") | gated(f"{layer}.mlp.shared_experts", EXPERT)
        else:
            sizes |= gated(f"{layer}.mlp")
    return Family(config, around(sizes))
