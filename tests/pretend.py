"""A device that is not there: CPU tensors marked as its own, and an error wherever marked and
unmarked ones meet.

What runs under `Pretend` gives the same numbers as ever; only what a real accelerator refuses is
refused: operations over tensors of both kinds (a CPU index into a marked tensor, a copy, and
tensors without dimensions are allowed, as there), and numpy. It says nothing of kernels, precision
or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

THERE = torch.device("cuda", 0)
_OF = vars(torch._C.TensorBase)
FACTORIES = frozenset(
    {
        "arange",
        "empty",
        "full",
        "linspace",
        "ones",
        "rand",
        "randn",
        "scalar_tensor",
        "tensor",
        "zeros",
        "eye",
        "as_tensor",
        "empty_like",
        "full_like",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
    }
)
APART = frozenset({"copy_", "_has_compatible_shallow_copy_type"})


class Elsewhere(Exception):
    """Two devices met."""


def marked(tensor: Tensor) -> bool:
    """Whether a tensor counts as on the other device."""
    return getattr(tensor, "_there", False)


def mark(tensor: Tensor, there: bool = True) -> Tensor:
    """The tensor, marked (modified) or with its mark taken off."""
    vars(tensor)["_there"] = there
    return tensor


def move(module: nn.Module) -> None:
    """Marks everything a module holds."""
    for tensor in (*module.parameters(), *module.buffers()):
        mark(tensor)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


class Pretend(TorchFunctionMode):
    """Inside, marked tensors say they are on `THERE`, and what is made of them is marked."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func` on the CPU, after the checks that the device would make."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == _OF["device"].__get__:
            return THERE if marked(args[0]) else func(*args)
        if func == _OF["is_cuda"].__get__:
            return marked(args[0])
        if func == _OF["data"].__set__:
            func(*args)
            mark(args[0], marked(args[1]))
            return None
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        if name in FACTORIES and "device" in kwargs:
            device = kwargs.pop("device")
            there = torch.device(device).type == THERE.type if device is not None else False
            return mark(func(*args, **kwargs), there)
        if name == "numpy" and marked(args[0]):
            raise Elsewhere("numpy of a tensor there")
        self._check(name, args, kwargs)
        there = any(map(marked, _tensors((args, kwargs))))
        result = func(*args, **kwargs)
        if there:
            for tensor in _tensors([result]):
                mark(tensor)
        return result

    def _moved(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, rest = args[0], list(args[1:])
        there = {"cpu": False, "cuda": True}.get(name, marked(tensor))
        given = [*rest, *kwargs.values()]
        for value in given:
            if isinstance(value, (torch.device, str)):
                there = torch.device(value).type == THERE.type
            elif isinstance(value, Tensor):
                there = marked(value)
        dtype = next((v for v in given if isinstance(v, torch.dtype)), None)
        dtype = next((v.dtype for v in given if isinstance(v, Tensor)), dtype)
        with torch._C.DisableTorchFunction():
            moved = tensor if dtype is None else tensor.to(dtype)
            if moved is tensor and there != marked(tensor):
                moved = tensor.clone()
        return mark(moved, there) if moved is not tensor else tensor

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(_tensors((args, kwargs)))
        here = [t for t in tensors if not marked(t) and t.dim() > 0]
        if not any(map(marked, tensors)) or not here or name in APART:
            return
        if name == "__getitem__" and marked(args[0]):
            return
        if name == "__setitem__" and marked(args[0]):
            value = args[2]
            plain = isinstance(args[1], (int, slice, tuple)) and not list(_tensors([args[1]]))
            if plain or not isinstance(value, Tensor) or marked(value) or value.dim() == 0:
                return
        raise Elsewhere(f"{name}: tensors on both devices")
