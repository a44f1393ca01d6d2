"""What every made-up checkpoint needs: a tokenizer without a network, configuration files, names of tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder, under the names of a Hugging Face config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def tensors(self, family: str) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, in the order of the layers."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if family == "qwen3":
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            found |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
        found["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            found["lm_head.weight"] = (self.vocab_size, hidden)
        return found


def write_config(out: Path, family: str, shape: Shape, **more: Any) -> None:
    """Write config.json and generation_config.json."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **asdict(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        **more,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ends))


def write_tokenizer(out: Path, vocab_size: int = 1024) -> None:
    """Train a byte-level BPE on a few words: any text can be encoded, and a random model's output decoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["weights stay where they are while engines come and go"] * 8, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
