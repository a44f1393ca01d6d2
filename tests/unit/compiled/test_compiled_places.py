"""Where compilers are told to write, and what is left as the operator wants it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import VERSIONS, Environments
from weightcache.compiled import places
from weightcache.engine import observe

NAMES = {place.variable for place in places.PLACES}


def test_every_compiler_has_a_folder_of_its_own(tmp_path: Path) -> None:
    made = places.variables(tmp_path / "stamp", {"HOME": str(tmp_path)})
    assert set(made) == {*NAMES, places.CUDA_SIZE}
    folders = {made[name] for name in NAMES}
    assert len(folders) == len(NAMES)
    assert all(Path(folder).parent == tmp_path / "stamp" for folder in folders)
    assert made[places.CUDA_SIZE] == str(4 << 30)
    (tmp_path / "stamp").mkdir()
    places.make(tmp_path / "stamp")
    assert all(Path(folder).is_dir() for folder in folders)
    (tmp_path / "stamp" / "triton").rmdir()
    (tmp_path / "stamp" / "triton").write_text("no folder")
    places.make(tmp_path / "stamp")
    places.make(tmp_path / "gone")


def test_the_operators_own_variables_are_left_alone(tmp_path: Path) -> None:
    own = {"HOME": str(tmp_path), "TRITON_CACHE_DIR": "/mine", "CUDA_CACHE_PATH": "", places.CUDA_SIZE: "5"}
    made = places.variables(tmp_path, own)
    assert set(made) == NAMES - {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert dict(places.operators(own)) == {name: name for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
    assert places.variables(tmp_path, {places.CUDA_SIZE: "5"}).keys() == NAMES


def test_an_operators_sglang_cache_dir_stands_for_what_sglang_puts_there(tmp_path: Path) -> None:
    own = {"HOME": str(tmp_path), "SGLANG_CACHE_DIR": str(tmp_path)}
    made = places.variables(tmp_path / "stamp", own)
    assert "TRITON_CACHE_DIR" not in made
    assert {"SGLANG_JIT_CACHE_DIR", "TORCH_EXTENSIONS_DIR"} <= set(made)
    assert dict(places.operators(own))["TRITON_CACHE_DIR"] == "SGLANG_CACHE_DIR"
    assert places.elsewhere(own, ()) == (tmp_path,)


def test_full_caches_are_seen_where_they_usually_are(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "USER": "ann"}
    assert places.in_use_before(environment) == ()
    (tmp_path / ".triton/cache").mkdir(parents=True)
    assert places.in_use_before(environment) == ()
    (tmp_path / ".triton/cache/kernel").touch()
    (tmp_path / "tmp/torchinductor_ann/x").mkdir(parents=True)
    assert places.in_use_before(environment) == ("TRITON_CACHE_DIR",)  # what is temporary is not worth staying for
    (tmp_path / ".cache/sglang/inductor/x").mkdir(parents=True)
    stay = places.in_use_before(environment)
    assert stay == ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert not set(stay) & set(places.variables(tmp_path, environment, stay))
    elsewhere = (".triton/cache", ".cache/sglang/inductor", "tmp/torchinductor_ann")
    assert places.elsewhere(environment, stay) == tuple(tmp_path / path for path in elsewhere)
    # What the operator decided about is not looked for.
    assert places.in_use_before({**environment, "TRITON_CACHE_DIR": "/mine"}) == ("TORCHINDUCTOR_CACHE_DIR",)


def test_downloaded_cubins_stay_unless_a_package_brings_them(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert places.CUBINS not in places.variables(tmp_path, environment)
    cubins = tmp_path / ".cache/flashinfer/cubins"
    (cubins / "x").mkdir(parents=True)
    assert places.variables(tmp_path, environment)[places.CUBINS] == str(cubins)
    assert places.CUBINS not in places.variables(tmp_path, environment, packaged_cubins=True)
    assert places.CUBINS not in places.variables(tmp_path, environment, ("FLASHINFER_WORKSPACE_BASE",))
    assert places.CUBINS not in places.variables(tmp_path, {**environment, places.CUBINS: "/mine"})


def test_no_variable_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with caches attaches to a set that was loaded without them."""
    for name in (*NAMES, places.CUDA_SIZE, places.CUBINS):
        monkeypatch.delenv(name, raising=False)
    before = observe._environment()
    for name in (*NAMES, places.CUDA_SIZE, places.CUBINS):
        monkeypatch.setenv(name, str(tmp_path / "moe-fp8-gemm-quant"))
    assert observe._environment() == before
    monkeypatch.setenv("SGLANG_FP8_GEMM", "1")
    assert observe._environment() != before


@pytest.mark.parametrize("version", VERSIONS)
def test_sglang_knows_its_variables(envs: Environments, version: str) -> None:
    """Those that a release reads itself; the others are read by packages that it brings, or by the other release."""
    folder = next((envs.engine(version).parent.parent / "lib").glob("python*/site-packages/sglang"))
    text = "".join(path.read_text() for path in (folder / "srt/environ.py", *(folder / "kernels/jit").rglob("*.py")))
    text += (folder / "srt/layers/deep_gemm_wrapper/compile_utils.py").read_text()
    assert "SGLANG_DG_CACHE_DIR" in text
    later = {"SGLANG_JIT_CACHE_DIR", "SGLANG_CUTE_AOT_CACHE_DIR", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}
    assert {name for name in later if name in text} == (set() if version == "0.5.17" else later)
    assert ("TVM_FFI_CACHE_DIR" in text) == (version == "0.5.17")
