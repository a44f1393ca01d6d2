"""Every rule holds, and every rule is needed."""

from __future__ import annotations

import pytest

from tests.unit.export.rules import RULES


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    RULES[name].check()


@pytest.mark.parametrize("name", RULES)
def test_rule_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[name].broken(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        RULES[name].check()
