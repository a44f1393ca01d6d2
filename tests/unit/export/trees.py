"""A module tree with everything that real models do to their weights, and what each part of it does while loading.

Every class constructs itself in ``__init__`` (which an engine repeats on meta) and changes itself in ``load`` (which
only a loader runs).
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import nn

SEED = torch.Generator().manual_seed(20)


def fill(model: nn.Module) -> None:
    """Random bytes for everything that has none yet, as reading a checkpoint does: in place."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            noise(tensor)


def noise(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` with values that are the same in no other one."""
    if tensor.numel():
        values = torch.randint(0, 100, tensor.shape, generator=SEED)
        tensor.copy_(values.remainder(2) if tensor.dtype is torch.bool else values)
    return tensor


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor with random content."""
    return noise(torch.zeros(*shape, dtype=dtype))


class Mode(enum.Enum):
    """What a method chose."""

    PLAIN = 1
    PACKED = 2


class Pair(NamedTuple):
    """Two values with names."""

    left: Any
    right: Any


class Helper:
    """A helper object such as a quantization method."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    """A helper object without a ``__dict__``."""

    __slots__ = ("__private", "packed", "scale")

    def __init__(self) -> None:
        self.scale = torch.zeros(3)
        self.packed = False
        self.__private = torch.zeros(2)

    def load(self) -> None:
        self.scale = fresh(5)
        self.packed = True
        self.__private = fresh(2)


class Weight(nn.Parameter):
    """A parameter class of its own, with attributes, as SGLang has many."""

    def __new__(cls, data: torch.Tensor, **attributes: Any) -> Self:
        made = super().__new__(cls, data, requires_grad=False)
        vars(made).update(attributes)
        return made


def a_weight_loader(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
    """What SGLang hangs on its parameters."""
    parameter.data.copy_(loaded)


class Rotary(nn.Module):
    """Shared by all layers, as SGLang's rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(8, 4), persistent=False)

    def load(self) -> None:
        pass


class Embedding(nn.Module):
    """One weight under two names, and a second parameter over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8), requires_grad=False)
        self.tied = self.weight
        self.window = nn.Parameter(self.weight.data[2:6], requires_grad=False)

    def load(self) -> None:
        self.same_memory = self.weight.data
        self.transposed = self.weight.data.t()
        self.strided = self.weight.data[1::2, ::3]


class Attention(nn.Module):
    """Slices of one large buffer, a stride-0 scale and matrices that are made after loading."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.qkv = Weight(torch.zeros(24, 8, dtype=torch.bfloat16), output_dim=0, weight_loader=a_weight_loader)
        self.kv_b_proj = nn.Parameter(torch.zeros(8, 12), requires_grad=False)
        self.register_parameter("bias", None)
        self.rotary = rotary
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None
        self.k_scale_float = 1.0

    def load(self) -> None:
        large = fresh(40, 8, dtype=torch.bfloat16)
        self.qkv.data = large[3:27]
        self.qkv.is_packed = True
        self.qkv.output_dim = 1
        self.w_kc, self.w_vc = (part.contiguous() for part in self.kv_b_proj.data.split([4, 8], dim=1))
        self.scale = nn.Parameter(fresh(1).expand(24, 6), requires_grad=False)
        self.k_scale_float = 0.25


class Experts(nn.Module):
    """Post-processing as quantized methods do it: delete, replace, rename, set to None, hang on helpers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.zeros(6, 10), weight_loader=a_weight_loader, quant={"format": "raw", "bits": 8})
        self.weight_scale = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.input_scale = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.zero_point = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("lut", torch.zeros(16, dtype=torch.uint8), persistent=False)
        self.register_buffer("absent", None)
        self.method = Helper(workspace=torch.zeros(4, dtype=torch.int32), kernel=Helper(ready=False), mode=Mode.PLAIN)
        self.slotted = Slotted()
        self.constants = [torch.zeros(2), {"a": torch.zeros(3), "n": 1, 7: (torch.zeros(1), [torch.zeros(1)])}]
        self.pair = Pair(torch.zeros(2), "raw")
        self.hidden = [nn.Linear(3, 2), nn.BatchNorm1d(2)]
        self.dtype = torch.float32
        self.stages = ["created"]
        self.loose = torch.zeros(5)
        self.stale = torch.zeros(5)
        self.note: str | None = "raw"
        self.apply_to = functools.partial(a_weight_loader)

    def load(self) -> None:
        self.weight.quant["format"] = "packed"
        scale = nn.Parameter(fresh(6, 2).t(), requires_grad=False)  # re-registered with another shape, at the end
        del self.weight_scale
        self.weight_scale = scale
        self.input_scale = None
        del self.zero_point
        self.register_buffer("absent", fresh(3))
        self.register_buffer("flags", fresh(4, dtype=torch.bool))
        self.counter.fill_(41)
        self.method.workspace = fresh(9, dtype=torch.int32)
        self.method.alias = self.method.workspace
        self.method.kernel.ready = True
        self.method.kernel.tiles = fresh(2, 2, dtype=torch.int8)
        self.method.mode = Mode.PACKED
        self.slotted.load()
        self.constants[0] = fresh(4)
        self.constants[1]["n"] = 2
        self.constants[1]["a"] = fresh(3)[1:]
        self.constants[1][7][1][0] = fresh(1)
        self.constants[1][7] = (fresh(2), self.constants[1][7][1])
        self.pair = Pair(fresh(2), "packed")
        for module in self.hidden:
            fill(module)
        self.dtype = torch.float8_e4m3fn
        self.stages += ["loaded", "packed"]
        self.loose = noise(self.loose)
        del self.stale
        self.note = None
        self.empty = nn.Parameter(torch.zeros(4, 0), requires_grad=False)
        self.scalar = nn.Parameter(fresh(()).reshape(()), requires_grad=False)
        self.fp8 = nn.Parameter(fresh(5, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.tables = {"made": (fresh(2), [fresh(1)]), "later": OrderedDict(x=fresh(1)), "queue": deque([fresh(1)])}
        self.shapes = (torch.Size([3, 4]), {"packed"}, frozenset({1, 2}))
        self.trained = fresh(3).requires_grad_()


class Layer(nn.Module):
    """One layer."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(rotary)
        self.experts = Experts()
        self.norm = nn.LayerNorm(8)
        self.missing = None

    def load(self) -> None:
        pass


class Everything(nn.Module):
    """The whole tree."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(2))
        self.rotary = rotary
        self.head = self.embedding
        self.by_name = {"first": self.layers[0]}
        self.config = Helper(shared=Helper(factor=1.0))
        self.layers[0].config = self.config.shared
        self.training_only = nn.Parameter(torch.zeros(2), requires_grad=True)

    def load(self) -> None:
        fill(self)
        for module in list(self.modules()):
            if module is not self and hasattr(module, "load"):
                module.load()
        self.config.shared.factor = 2.0


def simple(construct: Callable[[Any], None], load: Callable[[Any], None] = lambda model: None) -> type[nn.Module]:
    """A module class from what its ``__init__`` and its ``load`` do."""

    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            construct(self)

        def load(self) -> None:
            fill(self)
            load(self)

    return Simple
