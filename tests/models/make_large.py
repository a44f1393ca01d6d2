"""Write a large random checkpoint on a GPU machine: make_large [OPTIONS] OUT.

The sizes are those of Qwen3-8B by default: 16.4 GB of bf16 in about 20 s. ``--like 32b`` is for four GPUs and more,
``--like 72b`` for eight with a disk for it. The numbers are drawn on the GPU, one file a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models.checkpoint import Shape, write_config, write_tokenizer

OPTIONS = {
    "--hidden": "hidden_size",
    "--layers": "num_hidden_layers",
    "--intermediate": "intermediate_size",
    "--heads": "num_attention_heads",
    "--kv-heads": "num_key_value_heads",
    "--head-dim": "head_dim",
    "--vocab": "vocab_size",
}
LIKE = {
    "8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, tie_word_embeddings=False),
    "32b": Shape(5120, 25600, 64, 64, 8, 128, 151936, tie_word_embeddings=False),
    "72b": Shape(8192, 29568, 80, 64, 8, 128, 152064, tie_word_embeddings=False),
}
"""16.4, 65.5 and 145 GB. The heads and all widths can be cut into eight."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", choices=LIKE, default="8b")
    for option, name in OPTIONS.items():
        parser.add_argument(option, type=int, dest=name, help="instead of what --like says")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def shape_of(options: argparse.Namespace) -> Shape:
    """The chosen sizes."""
    said = {name: value for name in OPTIONS.values() if (value := getattr(options, name)) is not None}
    return replace(LIKE[options.like], **said)


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
    shape = shape_of(options)
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
    write_config(options.out, "qwen3", shape, max_position_embeddings=40960)
    write_tokenizer(options.out)
    print(f"{options.out}: {len(places)} tensors, {total / 1e9:.1f} GB, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
