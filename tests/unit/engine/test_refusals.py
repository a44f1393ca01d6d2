"""Verbs that would write answer with a failure of their own type; everything else goes through."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcache.engine import refusals, state


@dataclass
class Output:
    """An answer of SGLang's."""

    success: bool | None = None
    message: str = ""
    rid: str | None = None


@pytest.fixture
def io_struct(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """sglang.srt.managers.io_struct, as far as the hooks know it."""
    parent = ""
    for name in ("sglang", "srt", "managers", "io_struct"):
        parent = f"{parent}.{name}" if parent else name
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = sys.modules[parent]
    sys.modules["sglang.srt.managers"].io_struct = module  # type: ignore[attr-defined]
    for name in refusals.OUTPUTS.values():
        setattr(module, name, type(name, (Output,), {}))
    return module


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "process", state.ProcessState(shares_weights=True))


def call(verb: str, **request: Any) -> Any:
    return refusals.hook(verb)(lambda manager, obj: "passed", object(), SimpleNamespace(**request))


WRITING = [verb for verb in refusals.OUTPUTS if not verb.endswith("memory_occupation") and verb != "check_weights"]


@pytest.mark.parametrize("verb", WRITING)
@pytest.mark.usefixtures("shared")
def test_a_writing_verb_fails_in_its_own_type(io_struct: ModuleType, verb: str) -> None:
    answer = call(verb)
    assert type(answer) is getattr(io_struct, refusals.OUTPUTS[verb])
    assert answer.success is False
    assert verb in answer.message
    assert "--weight-cache-mode off" in answer.message


@pytest.mark.usefixtures("shared")
def test_checking_is_allowed_and_resetting_is_not(io_struct: ModuleType) -> None:
    assert call("check_weights", action="checksum") == "passed"
    assert call("check_weights", action="snapshot") == "passed"
    assert call("check_weights", action="reset_tensors").success is False


@pytest.mark.parametrize("verb", ["release_memory_occupation", "resume_memory_occupation"])
@pytest.mark.usefixtures("shared")
def test_memory_of_the_weights_stays(io_struct: ModuleType, verb: str) -> None:
    for tags in (None, [], ["weights"], ["kv_cache", "weights"]):
        answer = call(verb, tags=tags)
        assert type(answer) is getattr(io_struct, refusals.OUTPUTS[verb])
        assert answer.rid.startswith(refusals.MARK)
        assert 'tags=["kv_cache"]' in answer.rid
    assert call(verb, tags=["kv_cache"]) == "passed"
    assert call(verb, tags=["kv_cache", "cuda_graph"]) == "passed"


@pytest.mark.parametrize("verb", refusals.OUTPUTS)
def test_an_engine_with_weights_of_its_own_does_everything(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "process", state.ProcessState())
    assert call(verb, action="reset_tensors", tags=None) == "passed"


def released(answers: list[Any]) -> None:
    class Manager:
        looped = False

        def auto_create_handle_loop(self) -> None:
            self.looped = True

        async def release_memory_occupation_communicator(self, obj: Any) -> list[Any]:
            assert self.looped
            assert obj == "request"
            return answers

    hook = refusals.released("release_memory_occupation")
    asyncio.run(hook(None, Manager(), "request"))  # type: ignore[arg-type]


def test_the_http_side_turns_a_refusal_into_an_error() -> None:
    released([Output(), Output(rid=None), Output(rid="plain"), object()])
    with pytest.raises(ValueError, match=r"^because$"):
        released([Output(), Output(rid=f"{refusals.MARK}because")])
