"""Only layers whose methods are proven are carried; the error names method and layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightcache.engine import evidence, gate, methods
from weightcache.errors import ConfigError, UnsupportedMethod

V = "0.5.17"
UNQUANT = "sglang.srt.layers.quantization.unquant"
FP8 = "sglang.srt.layers.quantization.fp8"


class UnquantizedLinearMethod:
    """Stands for SGLang's."""

    __module__ = UNQUANT


class Fp8LinearMethod:
    """Stands for SGLang's."""

    __module__ = FP8

    def __init__(self, block_quant: bool = True) -> None:
        self.block_quant = block_quant
        self.sizes = [128, 128]


def model(attribute: str, method: Any) -> nn.Module:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Module(), nn.Module()])
    root.layers[0].quant_method = UnquantizedLinearMethod()
    setattr(root.layers[1], attribute, method)
    return root


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's evidence, which is not there yet."""
    path = tmp_path / "evidence.toml"
    monkeypatch.setenv(evidence.VARIABLE, str(path))
    return path


@pytest.mark.parametrize("attribute", ["quant_method", "scheme"])
@pytest.mark.parametrize(("capability", "where"), [("", "CPUs"), ("9.0", "compute capability 9.0")])
def test_a_method_that_is_not_proven(attribute: str, capability: str, where: str) -> None:
    sentence = (
        rf"layer layers\.1 uses Fp8LinearMethod, which is not proven for sharing on {where}: `wcache parity --rec"
    )
    with pytest.raises(UnsupportedMethod, match=sentence):
        gate.check(model(attribute, Fp8LinearMethod()), V, capability)


def test_a_refusal_says_where_the_same_layout_is_proven(own: Path) -> None:
    block = model("quant_method", Fp8LinearMethod())
    for capability in ("9.0", "8.9"):
        evidence.record(own, methods.count(block), V, capability, "r")
    with pytest.raises(UnsupportedMethod, match=r"on compute capability 10\.0, but on 8\.9 and 9\.0: `wcache"):
        gate.check(block, V, "10.0")
    with pytest.raises(UnsupportedMethod, match=r"for sharing on CPUs, but on 8\.9 and 9\.0: `wcache"):
        gate.check(block, V, "")
    with pytest.raises(UnsupportedMethod, match=r"for sharing on compute capability 9\.0: `wcache"):
        gate.check(block, "0.5.23", "9.0")


@pytest.mark.parametrize("method", [None, UnquantizedLinearMethod(), "fp8"])
@pytest.mark.parametrize("capability", ["", "8.0", "9.0"])
def test_what_may_pass(method: Any, capability: str) -> None:
    gate.check(model("quant_method", method), V, capability)


def test_a_subclass_is_another_method() -> None:
    class Better(UnquantizedLinearMethod):
        pass

    with pytest.raises(UnsupportedMethod, match="Better"):
        gate.check(model("quant_method", Better()), V, "9.0")


def test_what_a_comparison_recorded_passes_and_nothing_beside_it(own: Path) -> None:
    block = model("quant_method", Fp8LinearMethod())
    new = evidence.record(own, methods.count(block), V, "9.0", 'a "run"')
    assert [evidence.literal(name) for name in methods.count(block)] == [proof.method for proof in new]
    gate.check(block, V, "9.0")
    another = model("scheme", Fp8LinearMethod(False))
    for other, version, capability in (
        (block, V, "8.9"),
        (block, V, ""),
        (block, "0.5.23", "9.0"),
        (another, V, "9.0"),
    ):
        with pytest.raises(UnsupportedMethod):
            gate.check(other, version, capability)
    text = own.read_text()
    assert evidence.record(own, methods.count(block), V, "9.0", "again") == []
    assert own.read_text() == text
    assert own.stat().st_mode & 0o777 == 0o644
    evidence.record(own, methods.count(block), V, "", "on a CPU")
    gate.check(block, V, "")
    assert {proof.run for proof in evidence.all_known()} >= {'a "run"', "on a CPU"}


def test_signs_of_a_pattern_in_a_recorded_method_are_meant_literally(own: Path) -> None:
    evidence.record(own, ["M(a=*, b=[x])"], V, "9.0", "r")
    known = evidence.all_known()
    assert evidence.find(known, "M(a=*, b=[x])", V, "9.0")
    assert not evidence.find(known, "M(a=1, b=[x])", V, "9.0")
    assert not evidence.find(known, "M(a=*, b=x)", V, "9.0")


@pytest.mark.parametrize("text", ["[", "proven = 1", "[[proven]]\nmethod = 'x'", "[[proof]]", "\x00"])
def test_broken_evidence_is_one_sentence_and_proves_nothing(own: Path, text: str) -> None:
    own.write_text(text)
    with pytest.raises(ConfigError, match=r"evidence\.toml"):
        gate.check(model("quant_method", None), V, "9.0")
    with pytest.raises(ConfigError, match=r"evidence\.toml"):
        evidence.record(own, ["M()"], V, "9.0", "r")
    assert own.read_text() == text


def test_evidence_that_cannot_be_read_or_written(own: Path, tmp_path: Path) -> None:
    own.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        evidence.all_known()
    with pytest.raises(ConfigError, match="cannot be written"):
        evidence.record(tmp_path / "none" / "e.toml", ["M()"], V, "9.0", "r")
    with pytest.raises(ConfigError, match="cannot be written"):
        evidence.check_writable(tmp_path / "none" / "e.toml")
    evidence.check_writable(tmp_path / "e.toml")
    assert not (tmp_path / "e.toml").exists()


class Scheme:
    """Stands for a helper of SGLang's."""

    __module__ = "sglang.schemes"

    def __init__(self, group: int = 128) -> None:
        self.strategy = "channel"
        self.is_static = False
        self.group = group
        self.bits: Any = [4, group]
        self.dtype = torch.float16
        self.kernel = max
        self.table: Any = {"a": 1}
        self.path = "/somewhere/else"
        self.layer_id = 7
        self.num_experts = 8
        self.weight_shape = (1, 2)
        self.tensor = torch.zeros(1)
        self.nothing: Any = None
        self.empty: Any = {}
        self.owner: Any = self


class Foreign:
    """Somebody else's."""

    def __init__(self) -> None:
        self.value = 1


def test_a_signature_names_what_tells_layouts_apart() -> None:
    class Method:
        __module__ = FP8
        __qualname__ = "Method"

        def __init__(self, scheme: Any) -> None:
            self.scheme = scheme
            self.foreign = Foreign()

    scheme = Scheme()
    scheme.owner = None
    assert methods.signature(Method(scheme)) == (
        f"{FP8}.Method(scheme=Scheme(bits=[4 128], dtype=torch.float16, group=128, is_static=False, "
        "kernel=builtins.max, strategy=channel, table=[a]:[1]))"
    )
    assert methods.signature(Method(Scheme(64))) != methods.signature(Method(Scheme()))
    assert len(methods.signature(Method(Scheme()))) < 2000  # it refers to itself


def test_the_package_proves_something_for_a_reason() -> None:
    rows = evidence.packaged()
    assert rows
    assert all(row.run and not row.method.startswith("*") for row in rows)
    assert {row.capability for row in rows if row.proof == "tokens"} <= {"*"}
