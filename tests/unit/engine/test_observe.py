"""The fingerprint of live objects: every input that matters shows in its field, and in no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engine.fakes import load_config, model_config, topology
from weightcache.engine import adapter, observe
from weightcache.fingerprint import Fingerprint, diff
from weightcache.manifest import SCHEMA


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


CPU = torch.device("cpu")


@dataclasses.dataclass
class Inputs:
    """Everything that observe() looks at."""

    model: Any
    load: Any
    server: Any
    topology: Any
    monkeypatch: pytest.MonkeyPatch
    device: torch.device = CPU
    version: str = "0.5.23"

    def fingerprint(self) -> Fingerprint:
        self.monkeypatch.setattr(adapter, "parallel", lambda: self.topology)
        self.monkeypatch.setattr(adapter, "version", lambda: self.version)
        return observe.observe(self.model, self.load, self.server, self.device)


@pytest.fixture
def inputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    import os

    for name in list(os.environ):
        if name.startswith(("SGLANG", "SGL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(adapter, "resolved", lambda server, name: getattr(server, name, None))
    server = SimpleNamespace(
        json_model_override_args="{}", dp_size=1, enable_dp_attention=True, moe_runner_backend="auto"
    )
    return Inputs(model_config(model), load_config(), server, topology(), monkeypatch)


def hf(inputs: Inputs, **changes: Any) -> None:
    inputs.model.hf_config = SimpleNamespace(**(vars(inputs.model.hf_config) | changes))


def other_path(inputs: Inputs) -> None:
    path = Path(inputs.model.model_path)
    path.rename(path.with_name("elsewhere"))
    inputs.model.model_path = str(path.with_name("elsewhere"))


def touch(inputs: Inputs) -> None:
    (Path(inputs.model.model_path) / "model.safetensors").write_bytes(b"\3\0\0\0\0\0\0\0{ }")


class Quantization:
    """A configuration object as transformers makes them."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def to_dict(self) -> dict[str, int]:
        return {"bits": self.bits}


class RemoteFormat:
    """A load format that is a class."""


CHANGES: list[tuple[str, Callable[[Inputs], Any]]] = [
    ("role", lambda i: (setattr(i.model, "is_draft_model", True), setattr(i.load, "draft_model_idx", 2))),
    ("model_path", other_path),
    ("model_arch", lambda i: hf(i, architectures=["Y", "Z"])),
    ("revision", lambda i: setattr(i.model, "revision", "main")),
    ("checkpoint", touch),
    ("override_args", lambda i: setattr(i.server, "json_model_override_args", '{"rope_theta": 1}')),
    ("override_args", lambda i: setattr(i.server, "json_model_override_args", {"rope_theta": 1})),
    ("load_format", lambda i: setattr(i.load, "load_format", "dummy")),
    ("load_format", lambda i: setattr(i.load, "load_format", SimpleNamespace(value="gguf"))),
    ("load_format", lambda i: setattr(i.load, "load_format", RemoteFormat)),
    ("tp_size", lambda i: setattr(i.topology, "tp_size", 2)),
    ("tp_rank", lambda i: setattr(i.topology, "tp_rank", 1)),
    ("pp_size", lambda i: setattr(i.topology, "pp_size", 2)),
    ("pp_rank", lambda i: setattr(i.topology, "pp_rank", 1)),
    ("dp_size", lambda i: setattr(i.server, "dp_size", 2)),
    ("ep_size", lambda i: setattr(i.topology, "moe_ep_size", 2)),
    ("ep_rank", lambda i: setattr(i.topology, "moe_ep_rank", 1)),
    ("attention_dp", lambda i: setattr(i.topology, "attn_dp_size", 2)),
    ("attention_cp_size", lambda i: setattr(i.topology, "attn_cp_size", 2)),
    ("moe_dp_size", lambda i: setattr(i.topology, "moe_dp_size", 2)),
    ("quant_method", lambda i: setattr(i.model, "quantization", "fp8")),
    ("quant_config_hash", lambda i: hf(i, quantization_config={"bits": 4})),
    ("quant_config_hash", lambda i: hf(i, quantization_config=Quantization(4))),
    ("dtype", lambda i: setattr(i.model, "dtype", torch.float16)),
    ("device", lambda i: setattr(i, "device", torch.device("xpu"))),
    ("torch_version", lambda i: i.monkeypatch.setattr(torch, "__version__", "9.9")),
    ("sglang_version", lambda i: setattr(i, "version", "0.5.17")),
    ("kernel_versions", lambda i: i.monkeypatch.setattr(observe, "KERNEL_PACKAGES", ("pytest",))),
    ("backends", lambda i: setattr(i.server, "moe_runner_backend", "triton")),
    ("backends", lambda i: setattr(i.server, "enable_dp_lm_head", True)),
    ("environment", lambda i: i.monkeypatch.setenv("SGLANG_USE_FP8_GEMM", "1")),
    ("plugins", lambda i: i.monkeypatch.setenv("SGLANG_PLATFORM", "mine")),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CHANGES)])
def test_an_input_shows_in_its_field_and_nowhere_else(
    inputs: Inputs, name: str, change: Callable[[Inputs], Any]
) -> None:
    before = inputs.fingerprint()
    change(inputs)
    after = inputs.fingerprint()
    expected = {name} | ({"checkpoint"} if name == "checkpoint" else set())
    assert {row.field for row in diff(before, after)} == expected


def test_every_field_has_an_input() -> None:
    fixed = {"schema", "device_capability"}  # a constant, and a property of a GPU
    assert {name for name, _ in CHANGES} | fixed == {f.name for f in dataclasses.fields(Fingerprint)}


def test_the_same_inputs_give_the_same(inputs: Inputs) -> None:
    assert inputs.fingerprint() == inputs.fingerprint()
    assert inputs.fingerprint().schema == SCHEMA


@pytest.mark.parametrize("name", ["safetensors", "auto"])
def test_formats_that_mean_the_same(inputs: Inputs, name: str) -> None:
    inputs.load.load_format = name
    assert inputs.fingerprint().load_format == "auto"


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("SGLANG_MOE_CONFIG", True),
        ("FLASHINFER_CUTLASS_X", True),
        ("SGL_W4A8", True),
        ("SGLANG_FP8_CACHE_DIR", False),
        ("SGLANG_LOG_MOE", False),
        ("SGLANG_HOST_IP", False),
        ("PATH_MOE", False),
    ],
)
def test_which_environment_counts(inputs: Inputs, name: str, counts: bool) -> None:
    inputs.monkeypatch.setenv(name, "1")
    assert (f"{name}=1" in inputs.fingerprint().environment) is counts


def test_unset_backends_say_nothing(inputs: Inputs) -> None:
    for value in (None, "auto", "", False, {}):
        inputs.server.moe_runner_backend = value
        assert inputs.fingerprint().backends == ""


def test_a_model_that_is_not_here(inputs: Inputs) -> None:
    inputs.monkeypatch.setattr(adapter, "checkpoint_directory", lambda config: None)
    inputs.model.model_path = "organisation/model"
    found = inputs.fingerprint()
    assert (found.model_path, found.checkpoint) == ("organisation/model", "unresolved:organisation/model")


@pytest.mark.parametrize(
    ("draft", "index", "role"), [(False, None, "target"), (True, None, "draft-0"), (True, 3, "draft-3")]
)
def test_roles(draft: bool, index: int | None, role: str) -> None:
    config = SimpleNamespace(is_draft_model=draft)
    assert observe.role_of(config, SimpleNamespace(draft_model_idx=index)) == role
    assert observe.role_of(SimpleNamespace(), SimpleNamespace()) == "target"


def test_the_capability_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    assert observe.capability(torch.device("cuda", 0)) == "9.0"
    assert observe.capability(torch.device("cpu")) == ""


def test_replicas_hold_the_same(inputs: Inputs) -> None:
    inputs.server.enable_dp_attention = False
    before = inputs.fingerprint()
    inputs.server.dp_size = 2
    assert inputs.fingerprint() == before
