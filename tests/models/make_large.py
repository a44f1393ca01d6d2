"""Write a large random checkpoint on a GPU machine: make_large [OPTIONS] OUT.

The defaults are Qwen3-8B's shape: 16.4 GB of bf16 in about 20 s. The numbers are drawn on the GPU, one file a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models.checkpoint import Shape, write_config, write_tokenizer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--intermediate", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def files(shape: Shape) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file: one file a layer, and one for what belongs to none."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in shape.tensors("qwen3").items():
        part = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        groups.setdefault(f"model-{part:05d}.safetensors", {})[name] = size
    return groups


def main() -> None:
    """Write the checkpoint, and say how large it is and how long it took."""
    options = arguments()
    shape = Shape(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        vocab_size=options.vocab,
        tie_word_embeddings=False,
    )
    start = time.monotonic()
    generator = torch.Generator(options.device).manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    total = 0
    for file, sizes in files(shape).items():
        tensors = {}
        for name, size in sizes.items():
            noise = torch.randn(size, generator=generator, device=options.device) * 0.02
            tensors[name] = (noise + (1 if len(size) == 1 else 0)).to(torch.bfloat16).cpu()
        save_file(tensors, options.out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (options.out / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(options.out, "qwen3", shape)
    write_tokenizer(options.out)
    print(f"{options.out}: {len(places)} tensors, {total / 1e9:.1f} GB, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
