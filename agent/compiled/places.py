"""Which compilers write where at run time, and the variable that moves each. Nothing else of SGLang's is moved.

Read in SGLang 0.5.17 and 0.5.23 and in the packages that they ask for. 0.5.23 sends five of these below
SGLANG_CACHE_DIR itself (srt/environ.py, redirect_third_party_caches), with setdefault, so what is set before wins.

SGLANG_CACHE_DIR stays where it is: besides FlashInfer's tuning results and the torch.compile back end's own cache, both
of which SGLang keeps apart by version, it holds downloads and tables of models, and a path below it can be a model's
path, which loader and engine have to see alike.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SGLANG_CACHE_DIR = "SGLANG_CACHE_DIR"
CUDA_SIZE = "CUDA_CACHE_MAXSIZE"
CUDA_BYTES = 4 << 30
"""The most that the driver takes. By default it keeps 1 GiB, on older ones 256 MiB, and drops what is oldest."""
CUBINS = "FLASHINFER_CUBIN_DIR"


@dataclass(frozen=True, slots=True)
class Place:
    """One compiler's files. ``follows``: 0.5.23 puts them below SGLANG_CACHE_DIR unless ``variable`` is set.

    ``usual``: where they are without the variable, relative to the home or absolute, the one of 0.5.23 first.
    """

    variable: str
    folder: str
    usual: tuple[str, ...]
    follows: bool = False


PLACES: tuple[Place, ...] = (
    # triton/knobs.py
    Place("TRITON_CACHE_DIR", "triton", (".cache/sglang/triton", ".triton/cache"), follows=True),
    # torch/_inductor/runtime/cache_dir_utils.py
    Place(
        "TORCHINDUCTOR_CACHE_DIR", "inductor", (".cache/sglang/inductor", "{tmp}/torchinductor_{user}"), follows=True
    ),
    # CUDA Programming Guide, environment variables
    Place("CUDA_CACHE_PATH", "cuda", (".cache/sglang/nv", ".nv/ComputeCache"), follows=True),
    # tilelang/env.py
    Place("TILELANG_CACHE_DIR", "tilelang", (".cache/sglang/tilelang", ".tilelang/cache"), follows=True),
    # flashinfer/jit/env.py: it adds .cache/flashinfer to this
    Place(
        "FLASHINFER_WORKSPACE_BASE",
        "flashinfer",
        (".cache/sglang/.cache/flashinfer", ".cache/flashinfer"),
        follows=True,
    ),
    # DeepGEMM: srt/layers/deep_gemm_wrapper/compile_utils.py makes DG_JIT_CACHE_DIR of it, in both
    Place("SGLANG_DG_CACHE_DIR", "deep_gemm", (".cache/sglang/deep_gemm", ".cache/deep_gemm"), follows=True),
    # 0.5.23: kernels/jit/cute_aot_cache.py
    Place("SGLANG_CUTE_AOT_CACHE_DIR", "cute_aot", (".cache/sglang/cute_aot",), follows=True),
    # SGLang's own kernels. 0.5.23: kernels/jit/utils/compile/cache.py; 0.5.17 has them built by tvm-ffi
    # (kernels/jit/utils/compile.py), as other packages do in both (tvm_ffi/cpp/extension.py)
    Place("SGLANG_JIT_CACHE_DIR", "sglang_jit", (".cache/sglang/jit",)),
    Place("TVM_FFI_CACHE_DIR", "tvm_ffi", (".cache/tvm-ffi",)),
    # torch/utils/cpp_extension.py: hash functions of the KV cache, prefill kernels of linear attention, 3FS
    Place("TORCH_EXTENSIONS_DIR", "torch_extensions", (".cache/torch_extensions",)),
    # CUTLASS's Python compiler, and packages that keep what it made: flash-attn-4 (0.5.17 has a copy of it), quack
    Place("CUTE_DSL_CACHE_DIR", "cute_dsl", ("{tmp}/{user}/cutlass_python_cache",)),
    Place("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "flash_attention", ("{tmp}/{user}/flash_attention_cute_dsl_cache",)),
    Place("QUACK_CACHE_DIR", "quack", ("{tmp}/{user}/quack_cache",)),
    # humming/utils: kernels for weights of few bits
    Place("HUMMING_CACHE_DIR", "humming", (".humming/cache",)),
)


def variables(
    directory: Path, environment: Mapping[str, str], stay: Collection[str] = (), packaged_cubins: bool = False
) -> dict[str, str]:
    """What the server's environment gets so that compilers write below ``directory``.

    The operator's own variables are left alone, and those in ``stay``. ``packaged_cubins``: flashinfer-cubin is
    installed, which CUBINS would hide.
    """
    own = {name for name, _ in operators(environment)}
    result = {
        place.variable: str(directory / place.folder)
        for place in PLACES
        if place.variable not in own and place.variable not in stay
    }
    if "CUDA_CACHE_PATH" in result and CUDA_SIZE not in environment:
        result[CUDA_SIZE] = str(CUDA_BYTES)
    if "FLASHINFER_WORKSPACE_BASE" in result and CUBINS not in environment and not packaged_cubins:
        # Downloads, which a host without a network could not repeat.
        found = [path / "cubins" for path in _usual(_place("FLASHINFER_WORKSPACE_BASE"), environment)]
        if cubins := next(filter(_used, found), None):
            result[CUBINS] = str(cubins)
    return result


def make(directory: Path) -> None:
    """Make the compilers' folders: whether each of them would make its own is not documented for all."""
    for place in PLACES:
        with contextlib.suppress(OSError):
            (directory / place.folder).mkdir(mode=0o700, exist_ok=True)


def operators(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables of the table that the operator decided about, each with the variable that did."""
    rows = []
    for place in PLACES:
        if place.variable in environment:
            rows.append((place.variable, place.variable))
        elif place.follows and environment.get(SGLANG_CACHE_DIR):
            rows.append((place.variable, SGLANG_CACHE_DIR))
    return tuple(rows)


def in_use_before(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables whose compilers have files of this user at their usual place, if that outlives a reboot."""
    own = {name for name, _ in operators(environment)}
    return tuple(
        place.variable
        for place in PLACES
        if place.variable not in own and any(_used(path) for path in _usual(place, environment, temporary=False))
    )


def elsewhere(environment: Mapping[str, str], stay: Collection[str]) -> tuple[Path, ...]:
    """The directories outside of weightcache's own where compilers of this start may write."""
    own = dict(operators(environment))
    found: list[Path] = []
    for place in PLACES:
        if own.get(place.variable) == place.variable:
            found += [Path(environment[place.variable])] if environment[place.variable] else []
        elif place.variable in own:
            found.append(Path(environment[SGLANG_CACHE_DIR]))
        elif place.variable in stay:
            found += _usual(place, environment)
    return tuple(dict.fromkeys(path for path in found if path.is_absolute() and path.is_dir()))


def _place(variable: str) -> Place:
    return next(place for place in PLACES if place.variable == variable)


def _usual(place: Place, environment: Mapping[str, str], temporary: bool = True) -> list[Path]:
    home = environment.get("HOME", "")
    words = {"tmp": environment.get("TMPDIR") or "/tmp", "user": environment.get("USER", "")}  # noqa: S108
    wanted = [text for text in place.usual if temporary or not text.startswith("{tmp}")]
    paths = [Path(home, text.format_map(words)) for text in wanted]
    return [path for path in paths if path.is_absolute()]


def _used(path: Path) -> bool:
    """Whether ``path`` is a directory of this user with something in it."""
    try:
        with os.scandir(path) as entries:
            return path.stat().st_uid == os.geteuid() and any(True for _ in entries)
    except OSError:
        return False
