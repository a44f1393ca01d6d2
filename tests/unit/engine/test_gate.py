"""Only layers whose methods are proven are carried; the error names method and layer."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from weightcache.engine import gate
from weightcache.errors import UnsupportedMethod


class UnquantizedLinearMethod:
    """Stands for SGLang's."""


class Fp8LinearMethod:
    """Stands for SGLang's."""


def model(attribute: str, method: Any) -> nn.Module:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Module(), nn.Module()])
    root.layers[0].quant_method = UnquantizedLinearMethod()
    setattr(root.layers[1], attribute, method)
    return root


@pytest.mark.parametrize("attribute", ["quant_method", "scheme"])
def test_a_method_that_is_not_proven(attribute: str) -> None:
    with pytest.raises(UnsupportedMethod, match=r"layer layers\.1 uses Fp8LinearMethod, which weightcache does not"):
        gate.check(model(attribute, Fp8LinearMethod()))


@pytest.mark.parametrize("method", [None, UnquantizedLinearMethod(), "fp8"])
def test_what_may_pass(method: Any) -> None:
    gate.check(model("quant_method", method))


def test_a_subclass_is_another_method() -> None:
    class Better(UnquantizedLinearMethod):
        pass

    with pytest.raises(UnsupportedMethod, match="Better"):
        gate.check(model("quant_method", Better()))
