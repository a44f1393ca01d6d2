"""What an H200 proved is covered by the package's evidence, and what is next to it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weightcache.engine import evidence, methods
from weightcache.engine.evidence import Proof

RUN: dict[str, Any] = json.loads(Path(__file__).with_name("proven-h200.json").read_text())
_ATTRIBUTE = re.compile(r"(\w+)=[^,()]*(?:, )?")
_EARLIER = re.compile(r", (?=\))")

SAME_IN_0_5_23 = {
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "W8A8Int8LinearMethod",
    "CompressedTensorsLinearMethod",
    "CompressedTensorsW8A8Int8",
    "CompressedTensorsWNA16",
    "AWQLinearMethod",
    "AWQMarlinLinearScheme",
    "GPTQMarlinLinearMethod",
    "GPTQMarlinLinearScheme",
}
"""Methods whose code that lays weights out is the same in both releases."""


def as_now(printed: str) -> str:
    """A signature that was printed when signatures still named more."""
    short = _ATTRIBUTE.sub(lambda found: "" if methods.left_out(found[1]) else found[0], printed)
    return _EARLIER.sub("", short)


def proof_of(signature: str, sglang: str = "0.5.17", capability: str = "9.0") -> Proof | None:
    return evidence.find(evidence.packaged(), signature, sglang, capability)


PROVEN: dict[str, list[str]] = {
    kind: [as_now(RUN["signatures"][number]) for number in numbers] for kind, numbers in RUN["kinds"].items()
}
SIGNATURES = sorted({signature for signatures in PROVEN.values() for signature in signatures})


def name_of(signature: str) -> str:
    return signature.partition("(")[0].rpartition(".")[2]


@pytest.mark.parametrize("kind", PROVEN)
def test_every_kind_that_was_equal_may_be_shared(kind: str) -> None:
    for signature in PROVEN[kind]:
        proof = proof_of(signature, RUN["sglang"], RUN["capability"])
        assert proof is not None
        assert (proof.proof, proof.capability) == ("parity", "9.0")
        assert "NVIDIA H200" in proof.run


def test_each_row_has_something_that_was_proven() -> None:
    rows = [row for row in evidence.packaged() if row.capability == "9.0"]
    assert {id(row) for row in rows} == {
        id(evidence.find(rows, signature, RUN["sglang"], RUN["capability"])) for signature in SIGNATURES
    }


@pytest.mark.parametrize("signature", SIGNATURES)
def test_another_release_is_covered_where_its_code_is_the_same(signature: str) -> None:
    assert (proof_of(signature, "0.5.23") is not None) == (name_of(signature) in SAME_IN_0_5_23)
    unquantized = name_of(signature) in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    for version in ("0.5.18", "0.6.0"):
        assert (proof_of(signature, version) is not None) == unquantized


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0", "90", ""])
def test_another_gpu_is_not_covered(signature: str, capability: str) -> None:
    proof = proof_of(signature, capability=capability)
    assert proof is None or "Unquantized" in signature
    assert proof is None or proof.capability in ("*", "")


OTHERS = [
    ("Fp8LinearMethod", "use_mxfp8=False", "use_mxfp8=True"),
    ("Fp8LinearMethod", "use_marlin=False", "use_marlin=True"),
    ("Fp8LinearMethod", "cutlass_fp8_supported=True", "cutlass_fp8_supported=False"),
    ("Fp8LinearMethod", "use_per_token_if_dynamic=False", "use_per_token_if_dynamic=True"),
    ("Fp8LinearMethod", "convert_mxfp8_to_block=False", "convert_mxfp8_to_block=True"),
    ("Fp8LinearMethod", "is_fp4_experts=False", "is_fp4_experts=True"),
    ("Fp8LinearMethod", "[128 128]", "[1 32]"),
    ("Fp8LinearMethod", "fp8_utils.triton_w8a8", "fp8_utils.cutlass_w8a8"),
    ("Fp8LinearMethod", "fp8_utils.deepgemm_w8a8", "fp8_utils.flashinfer_gemm_w8a8"),
    ("Fp8LinearMethod", "activation_scheme=static", "activation_scheme=other"),
    ("Fp8LinearMethod", "Fp8Config(", "HybridFp8NvFp4Config("),
    ("Fp8MoEMethod", "runner_backend=TRITON,", "runner_backend=DEEP_GEMM,"),
    ("Fp8MoEMethod", "runner_backend=TRITON,", "runner_backend=FLASHINFER_TRTLLM,"),
    ("Fp8MoEMethod", "fused_experts_none_to_triton", "fused_experts_none_to_other"),
    ("Fp8MoEMethod", "is_fp4_expert=False", "is_fp4_expert=True"),
    ("Fp8MoEMethod", "with_bias=False", "with_bias=True"),
    ("Fp8MoEMethod", "[128 128]", "[64 128]"),
    ("Fp8MoEMethod", "is_gated=True", "is_gated=False"),
    ("Fp8MoEMethod", "params_dtype=torch.bfloat16", "params_dtype=torch.float16"),
    ("UnquantizedFusedMoEMethod", "use_flashinfer_cutlass=False", "use_flashinfer_cutlass=True"),
    ("UnquantizedFusedMoEMethod", "use_flashinfer_trtllm_moe=False", "use_flashinfer_trtllm_moe=True"),
    ("UnquantizedFusedMoEMethod", "forward_cuda", "forward_npu"),
    ("UnquantizedFusedMoEMethod", "lora_enabled=False", "lora_enabled=True"),
    ("Mxfp4MoEMethod", "use_triton_kernels=True", "use_triton_kernels=False"),
    ("Mxfp4MoEMethod", "use_flashinfer=False", "use_flashinfer=True"),
    ("Mxfp4MoEMethod", "use_marlin=False", "use_marlin=True"),
    ("Mxfp4MoEMethod", "runner_backend=TRITON_KERNELS", "runner_backend=MARLIN"),
    ("AWQMarlinLinearScheme", "weight_bits=4", "weight_bits=8"),
    ("AWQMarlinLinearScheme", "zero_point=True", "zero_point=False"),
    ("AWQMarlinLinearScheme", "group_size=128", "group_size=-1"),
    ("AWQMarlinLinearScheme", "AWQMarlinLinearKernel", "AWQLinearKernel"),
    ("GPTQMarlinLinearScheme", "is_sym=True", "is_sym=False"),
    ("GPTQMarlinLinearScheme", "is_k_full=True", "is_k_full=False"),
    ("GPTQMarlinLinearScheme", "has_g_idx=False", "has_g_idx=True"),
    ("GPTQMarlinLinearScheme", "zero_points=False", "zero_points=True"),
    ("GPTQMarlinLinearScheme", "pack_factor=8", "pack_factor=4"),
    ("CompressedTensorsWNA16", "strategy=group", "strategy=channel"),
    ("CompressedTensorsWNA16", "symmetric=True", "symmetric=False"),
    ("CompressedTensorsWNA16", "group_size=128", "group_size=-1"),
    ("CompressedTensorsW8A8Fp8", "strategy=channel", "strategy=block"),
    ("CompressedTensorsW8A8Fp8", "is_static_input_scheme=False", "is_static_input_scheme=True"),
    ("CompressedTensorsW8A8Int8", "input_symmetric=True", "input_symmetric=False"),
    ("W8A8Int8LinearMethod", "is_dynamic=False", "is_dynamic=True"),
    ("UnquantizedLinearMethod", "UnquantizedLinearMethod", "BetterUnquantizedLinearMethod"),
]


@pytest.mark.parametrize(("name", "switch", "other"), OTHERS)
def test_another_switch_is_another_layout(name: str, switch: str, other: str) -> None:
    with_it = [signature for signature in SIGNATURES if name_of(signature) == name and switch in signature]
    assert with_it
    for signature in with_it:
        assert proof_of(signature.replace(switch, other)) is None
        assert proof_of(signature.replace(switch, other, 1)) is None


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_switch_more_is_another_layout(signature: str) -> None:
    if "KVCacheMethod" in signature or "UnquantizedLinear" in signature or "UnquantizedEmbedding" in signature:
        return  # nothing that they hold matters
    assert proof_of(signature[:-1] + ", zz_switch=True)") is None
    assert proof_of(signature.replace("(", "(aa_switch=True, ", 1)) is None


@pytest.mark.parametrize(
    ("name", "size", "other"),
    [
        ("AWQMarlinLinearScheme", "group_size=128", "group_size=64"),
        ("GPTQMarlinLinearScheme", "group_size=128", "group_size=32"),
        ("GPTQMarlinLinearScheme", "torch.float16", "torch.bfloat16"),
        ("CompressedTensorsWNA16", "group_size=128", "group_size=32"),
        ("CompressedTensorsWNA16", "torch.bfloat16", "torch.float16"),
        ("Fp8KVCacheMethod", "activation_scheme=static", "activation_scheme=dynamic"),
    ],
)
def test_what_makes_no_difference(name: str, size: str, other: str) -> None:
    with_it = [signature for signature in SIGNATURES if name_of(signature) == name and size in signature]
    assert with_it
    assert all(proof_of(signature.replace(size, other)) for signature in with_it)


def test_signatures_say_nothing_of_sizes_and_routing() -> None:
    assert "top_k" in "".join(RUN["signatures"])
    text = "".join(SIGNATURES)
    assert not [name for name in ("top_k", "routing_method", "logical_widths", "packed_modules") if name in text]
    assert ", )" not in text
    assert "(, " not in text


def test_a_refusal_on_another_gpu_says_where_it_is_proven() -> None:
    """Block FP8 on Blackwell would pack its scales in another way; the sentence is the gate's."""
    known = evidence.packaged()
    assert {tuple(evidence.elsewhere(known, signature, "0.5.17")) for signature in SIGNATURES} <= {
        ("*", "9.0"),
        ("9.0",),
    }
    block = next(signature for signature in SIGNATURES if "Fp8LinearMethod(block_quant=True" in signature)
    assert proof_of(block, capability="10.0") is None
    assert evidence.elsewhere(known, block, "0.5.17") == ["9.0"]
    assert evidence.elsewhere(known, block, "0.5.23") == []
