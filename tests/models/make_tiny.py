"""Write a random checkpoint of a few million parameters, with a tokenizer: make_tiny [OPTIONS] OUT.

The defaults divide by 4 in every direction that tensor parallelism splits. The bytes depend on the options alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models.checkpoint import ARCHITECTURES, Shape, write_config, write_tokenizer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    options = arguments()
    shape = Shape(
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        vocab_size=options.vocab,
        tie_word_embeddings=options.tied,
    )
    generator = torch.Generator().manual_seed(options.seed)
    tensors = {}
    for name, size in shape.tensors(options.family).items():
        # Norms are drawn around one: all ones would hide two norms that changed places.
        noise = torch.randn(size, generator=generator) * 0.05
        tensors[name] = (noise + (1 if len(size) == 1 else 0)).to(torch.bfloat16)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})
    write_config(options.out, options.family, shape)
    write_tokenizer(options.out, min(options.vocab, 1024))


if __name__ == "__main__":
    main()
