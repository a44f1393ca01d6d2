"""Only layers whose methods are proven are carried; the error names method and layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from weightcache.engine import evidence, gate, methods
from weightcache.errors import ConfigError, UnsupportedMethod


class UnquantizedLinearMethod:
    """Stands for SGLang's."""


class Fp8LinearMethod:
    """Stands for SGLang's."""

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
        gate.check(model(attribute, Fp8LinearMethod()), capability)


@pytest.mark.parametrize("method", [None, UnquantizedLinearMethod(), "fp8"])
@pytest.mark.parametrize("capability", ["", "8.0", "9.0"])
def test_what_may_pass(method: Any, capability: str) -> None:
    gate.check(model("quant_method", method), capability)


def test_a_subclass_is_another_method() -> None:
    class Better(UnquantizedLinearMethod):
        pass

    with pytest.raises(UnsupportedMethod, match="Better"):
        gate.check(model("quant_method", Better()), "9.0")


def test_what_a_comparison_recorded_passes_and_nothing_beside_it(own: Path) -> None:
    block = model("quant_method", Fp8LinearMethod())
    new = evidence.record(own, methods.count(block), "9.0", 'a "run"')
    assert [proof.method for proof in new] == ["UnquantizedLinearMethod()", "Fp8LinearMethod(block_quant=True)"]
    gate.check(block, "9.0")
    for other, capability in ((block, "8.9"), (block, ""), (model("scheme", Fp8LinearMethod(False)), "9.0")):
        with pytest.raises(UnsupportedMethod):
            gate.check(other, capability)
    text = own.read_text()
    assert evidence.record(own, methods.count(block), "9.0", "again") == []
    assert own.read_text() == text
    assert own.stat().st_mode & 0o777 == 0o644
    evidence.record(own, methods.count(block), "", "on a CPU")
    gate.check(block, "")
    assert {proof.run for proof in evidence.all_known()} >= {'a "run"', "on a CPU"}


def test_signs_of_a_pattern_in_a_recorded_method_are_meant_literally(own: Path) -> None:
    evidence.record(own, ["M(a=*, b=[x])"], "9.0", "r")
    known = evidence.all_known()
    assert evidence.find(known, "M(a=*, b=[x])", "9.0")
    assert not evidence.find(known, "M(a=1, b=[x])", "9.0")
    assert not evidence.find(known, "M(a=*, b=x)", "9.0")


@pytest.mark.parametrize("text", ["[", "proven = 1", "[[proven]]\nmethod = 'x'", "[[proof]]", "\x00"])
def test_broken_evidence_is_one_sentence_and_proves_nothing(own: Path, text: str) -> None:
    own.write_text(text)
    with pytest.raises(ConfigError, match=r"evidence\.toml"):
        gate.check(model("quant_method", None), "9.0")
    with pytest.raises(ConfigError, match=r"evidence\.toml"):
        evidence.record(own, ["M()"], "9.0", "r")
    assert own.read_text() == text


def test_evidence_that_cannot_be_read_or_written(own: Path, tmp_path: Path) -> None:
    own.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        evidence.all_known()
    with pytest.raises(ConfigError, match="cannot be written"):
        evidence.record(tmp_path / "none" / "e.toml", ["M()"], "9.0", "r")
    with pytest.raises(ConfigError, match="cannot be written"):
        evidence.check_writable(tmp_path / "none" / "e.toml")
    evidence.check_writable(tmp_path / "e.toml")
    assert not (tmp_path / "e.toml").exists()


def test_a_signature_names_what_tells_layouts_apart() -> None:
    class Scheme:
        def __init__(self) -> None:
            self.strategy = "channel"
            self.is_static = False
            self.count = 3
            self.path = "/somewhere/else"

    class Method:
        def __init__(self) -> None:
            self.scheme = Scheme()
            self.tensor = None

    assert methods.signature(Method()) == "Method(scheme=Scheme(is_static=False, strategy=channel))"


def test_the_package_proves_something_for_a_reason() -> None:
    rows = evidence.packaged()
    assert rows
    assert all(row.run and not row.method.startswith("*") for row in rows)
    assert {row.capability for row in rows if row.proof == "tokens"} <= {"*"}
