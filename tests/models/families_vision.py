"""A model that sees: a tower for pictures before a decoder."""

from __future__ import annotations

from typing import Any

from tests.models.families import COMMON, HIDDEN, VOCAB, Family, Sizes, around, attention, gated, norms

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def vision() -> Family:
    """Qwen2.5-VL: a tower of two blocks before a Qwen2 decoder. The last tokens of the vocabulary mark pictures."""
    depth, width, inner, patch = 2, 256, 512, 14
    ids = dict(zip(VISION_TOKENS, range(VOCAB - len(VISION_TOKENS), VOCAB), strict=True))
    tower: dict[str, Any] = {
        "model_type": "qwen2_5_vl",
        "depth": depth,
        "hidden_size": width,
        "hidden_act": "silu",
        "intermediate_size": inner,
        "num_heads": 4,
        "in_chans": 3,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [1],
    }
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **COMMON,
        "vision_config": tower,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    merged = 4 * width
    sizes: Sizes = {"visual.patch_embed.proj.weight": (width, 3, 2, patch, patch)}
    for index in range(depth):
        block = f"visual.blocks.{index}"
        shapes: Sizes = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        sizes |= {f"{block}.norm1.weight": (width,), f"{block}.norm2.weight": (width,)}
        sizes |= {f"{block}.{name}.weight": size for name, size in shapes.items()}
        sizes |= {f"{block}.{name}.bias": size[:1] for name, size in shapes.items()}
    sizes["visual.merger.ln_q.weight"] = (width,)
    for name, size in {"0": (merged, merged), "2": (HIDDEN, merged)}.items():
        sizes |= {f"visual.merger.mlp.{name}.weight": size, f"visual.merger.mlp.{name}.bias": size[:1]}
    layers: Sizes = {}
    for index in range(2):
        layer = f"model.layers.{index}"
        layers |= norms(layer) | attention(f"{layer}.self_attn", bias=True) | gated(f"{layer}.mlp")
    return Family(config, {**sizes, **around(layers)})
