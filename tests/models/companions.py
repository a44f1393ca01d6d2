"""What stands beside a checkpoint: an adapter, a draft model, the files with which pictures are prepared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from tests.models.checkpoint import write_tokenizer
from tests.models.draw import draw
from tests.models.families import COMMON, HIDDEN, VOCAB, Family, Sizes, attention, gated, llama
from tests.models.families_vision import VISION_TOKENS

Companion = Callable[[Path], None]

ADAPTED = ("q_proj", "v_proj", "o_proj", "down_proj")
"""The projections that the adapter changes."""


def save(out: Path, family: Family) -> None:
    """Write config.json and the weights of a model in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(family.config, indent=2))
    save_file(draw(family.sizes), out / "model.safetensors", metadata={"format": "pt"})


def adapter(out: Path) -> None:
    """A LoRA adapter in peft's form, on the attention and the feed-forward layers."""
    rank = 8
    folder = out / "adapter"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ADAPTED),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    sizes: Sizes = {}
    for index in range(COMMON["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, (outputs, inputs) in {**attention(f"{layer}.self_attn"), **gated(f"{layer}.mlp")}.items():
            target = name.removesuffix(".weight")
            if target.rpartition(".")[2] in ADAPTED:
                place = f"base_model.model.{target}"
                sizes |= {f"{place}.lora_A.weight": (rank, inputs), f"{place}.lora_B.weight": (outputs, rank)}
    save_file(draw(sizes), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def eagle(out: Path) -> None:
    """A draft of the EAGLE kind: one layer and a projection; embedding and head are those of the target."""
    config = {**llama().config, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    sizes: Sizes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    sizes |= attention("layers.0.self_attn") | gated("layers.0.mlp")
    sizes |= {"layers.0.post_attention_layernorm.weight": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}
    save(out / "draft", Family(config, sizes))
    write_tokenizer(out / "draft")


def standalone(out: Path) -> None:
    """A draft that is a small model of its own, with the target's vocabulary."""
    whole = llama()
    sizes = {name: size for name, size in whole.sizes.items() if ".layers.1." not in name}
    save(out / "draft", Family({**whole.config, "num_hidden_layers": 1}, sizes))
    write_tokenizer(out / "draft")


DRAFTS = (eagle, standalone)
"""These write the draft into the folder ``draft`` of the target."""


def pictures(out: Path) -> None:
    """What Qwen2.5-VL's processor reads: sizes of pictures, and the tokens that stand for them."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (out / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    (out / "video_preprocessor_config.json").write_text(
        json.dumps({**settings, "video_processor_type": "Qwen2VLVideoProcessor"}, indent=2)
    )
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    for number, token in enumerate(VISION_TOKENS, VOCAB - len(VISION_TOKENS)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (out / "chat_template.json").write_text(json.dumps({"chat_template": template}))
