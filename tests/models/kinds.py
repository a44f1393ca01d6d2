"""A small random checkpoint of every kind of model that weightcache is meant to share, in its real format on disk.

``KINDS[name].make(OUT)`` writes one; ``arguments(OUT)`` are what SGLang needs beside ``--model-path``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from tests.models import companions, compressed, families, families_more, families_vision, formats, mxfp4
from tests.models.checkpoint import write_tokenizer
from tests.models.companions import Companion
from tests.models.draw import draw
from tests.models.families import VOCAB, Family
from tests.models.formats import Format, Tensors


@dataclass(frozen=True, slots=True)
class Kind:
    """``proves`` says what a comparison of it shows; ``capability`` is the least compute capability of a GPU for it.

    ``on_cpu``: SGLang's CPU engine serves it soon, without kernels that no registry has. ``needs``: packages that
    a GPU's environment has alone (triton_kernels comes in the wheel of sglang-kernel); without them it does not load.
    """

    proves: str
    family: Callable[[], Family]
    format: Callable[[], Format] | None = None
    companion: Companion | None = None
    options: tuple[str, ...] = ()
    capability: str = "8.0"
    on_cpu: bool = False
    needs: tuple[str, ...] = ()

    def arguments(self, model: Path) -> list[str]:
        """SGLang's arguments for the checkpoint in ``model``, apart from its path."""
        return [option.replace("{model}", str(model)) for option in self.options]

    def make(self, out: Path) -> None:
        """Write the checkpoint into the folder ``out``."""
        out.mkdir(parents=True, exist_ok=True)
        family = self.family()
        config = dict(family.config)
        tensors: Tensors = draw(family.sizes)
        if self.format is not None:
            form = self.format()
            tensors = form.apply(tensors)
            config["torch_dtype"] = form.dtype
            if form.config:
                config["quantization_config"] = form.config
            for name, content in form.files.items():
                (out / name).write_text(json.dumps(content, indent=2))
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(config, indent=2))
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        (out / "generation_config.json").write_text(json.dumps(ends))
        write_tokenizer(out, VOCAB - len(families_vision.VISION_TOKENS))
        if self.companion is not None:
            self.companion(out)


def _speculative(algorithm: str) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", "{model}/draft"),
        *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    )


_LORA = ("--enable-lora", "--lora-paths", "adapter={model}/adapter", "--max-loras-per-batch", "1")
_STATES = ("--max-mamba-cache-size", "16")
_PICTURES = ("--mm-attention-backend", "sdpa")
_W8A8_INT8 = ("--quantization", "w8a8_int8")

KINDS: dict[str, Kind] = {
    "dense": Kind("bfloat16", families.dense, on_cpu=True),
    "tied": Kind("one tensor under two names", lambda: families.dense(tied=True), on_cpu=True),
    "deep": Kind("3,004 tensors", families_more.deep),
    "moe": Kind("fused experts", families.moe, on_cpu=True),
    "mla": Kind("matrices that loading derives from kv_b_proj", families.mla),
    "fp8-block": Kind("blocks of 128 by 128", families.dense, formats.fp8_block),
    "fp8-block-moe": Kind("the same in experts", families.moe, formats.fp8_block),
    "fp8-block-mla": Kind("the same, and what is derived from it", families.mla, formats.fp8_block),
    "fp8-static": Kind(
        "transposed weights, one scale of three, calibrated inputs",
        families.dense,
        lambda: formats.fp8_tensor("static"),
        capability="8.9",
    ),
    "fp8-dynamic": Kind(
        "transposed weights, no input scale", families.dense, lambda: formats.fp8_tensor("dynamic"), capability="8.9"
    ),
    "fp8-static-moe": Kind(
        "experts quantized again to one scale", families.moe, lambda: formats.fp8_tensor("static"), capability="8.9"
    ),
    "fp8-online": Kind("quantized while loading", families.dense, options=("--quantization", "fp8"), capability="8.9"),
    "w8a8-int8": Kind("transposed int8 weights", families.dense, compressed.w8a8_int8, options=_W8A8_INT8),
    "ct-fp8-tensor": Kind(
        "compressed-tensors, one scale a weight", families.dense, compressed.w8a8_fp8_tensor, capability="8.9"
    ),
    "ct-fp8-channel": Kind(
        "compressed-tensors, a scale for each output", families.dense, compressed.w8a8_fp8_channel, capability="8.9"
    ),
    "ct-int8": Kind("compressed-tensors, absent scales", families.dense, compressed.w8a8_int8),
    "ct-wna16": Kind("compressed-tensors on Marlin: a workspace on the scheme", families.dense, compressed.wna16),
    "awq": Kind("Marlin: repacked weights and zeros, a workspace on the layer", families.dense, formats.awq),
    "gptq": Kind("Marlin: a workspace on the kernel", families.dense, lambda: formats.gptq(desc_act=False)),
    "gptq-desc-act": Kind("the same with sorted inputs", families.dense, lambda: formats.gptq(desc_act=True)),
    "mxfp4": Kind(
        "weights that only the method holds",
        families_more.gpt_oss,
        mxfp4.gpt_oss,
        options=("--moe-runner-backend", "triton_kernel"),
        needs=("triton_kernels",),
    ),
    "modelopt-fp8": Kind("ModelOpt's own configuration", families.llama, formats.modelopt_fp8, capability="8.9"),
    "fp8-kv": Kind(
        "calibrated scales of the KV cache",
        families.llama,
        formats.fp8_tensor_kv,
        options=("--kv-cache-dtype", "fp8_e4m3"),
        capability="8.9",
    ),
    "gated-delta": Kind("linear attention whose layers share tensors", families_more.gated_delta, options=_STATES),
    "mamba": Kind("a state-space layer beside attention", families_more.mamba, options=_STATES),
    "vision": Kind(
        "a tower for pictures", families_vision.vision, companion=companions.pictures, options=_PICTURES, on_cpu=True
    ),
    "lora": Kind("adapters beside shared weights", families.llama, companion=companions.adapter, options=_LORA),
    "eagle": Kind(
        "a draft with the target's embedding", families.llama, companion=companions.eagle, options=_speculative("EAGLE")
    ),
    "standalone": Kind(
        "a draft of its own", families.llama, companion=companions.standalone, options=_speculative("STANDALONE")
    ),
}

DIFFERENT = [kind for kind in KINDS if kind != "deep"]
"""Kinds that differ in more than their size."""
