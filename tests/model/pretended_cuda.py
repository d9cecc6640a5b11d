"""A CUDA device that is not there: tensors on the CPU that say they are on it, and refuse what torch refuses there.

It finds tensors of two devices in one call, and reads of device memory as if it were the host's. What it does not show
is that a CUDA call only queues work: its events and streams merely write down, in `log`, what was asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("cuda", 0)
FREE_BYTES = 1 << 30

_HOST_ONLY = {"numpy", "__array__"}
_MAY_MIX = {"to", "copy_", "cpu", "cuda"}
_INDEXING = {"__getitem__", "__setitem__"}


class _OnDevice(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class MixedDevices(AssertionError):
    pass


class PretendedCuda(TorchFunctionMode):
    """Sees every call of torch made from Python while it is entered."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) in (Tensor.device, Tensor.is_cuda):
            return _property(func, args[0])
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        is_on_device = any(isinstance(tensor, _OnDevice) for tensor in tensors)
        if is_on_device:
            _refuse(name, args, kwargs)
        args, kwargs, target = _without_device(func, name, args, kwargs)
        result = func(*tree_map_only(_OnDevice, _plain, args), **tree_map_only(_OnDevice, _plain, kwargs))
        if name == "cpu" or (target is not None and target.type == "cpu"):
            return result
        if is_on_device or target is not None:
            return tree_map_only(Tensor, lambda tensor: tensor.as_subclass(_OnDevice), result)
        return result


@contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields what events and streams were asked, in order, as "record 0", "synchronize 0", "synchronize stream"."""
    log: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.number = sum(entry.startswith("record") for entry in log)

        def record(self, stream: object) -> None:
            log.append(f"record {self.number}")

        def synchronize(self) -> None:
            log.append(f"synchronize {self.number}")

    class Stream:
        def synchronize(self) -> None:
            log.append("synchronize stream")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE_BYTES, FREE_BYTES))
    with PretendedCuda():
        yield log


def _plain(tensor: _OnDevice) -> Tensor:
    return tensor.as_subclass(Tensor)


def _property(func: Callable[..., Any], tensor: Tensor) -> Any:
    is_device = getattr(func, "__self__", None) is Tensor.device
    if isinstance(tensor, _OnDevice):
        return DEVICE if is_device else True
    return func(tensor)


def _refuse(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if name in _HOST_ONLY:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if name in _MAY_MIX:
        return
    operands = (args[0], *args[2:]) if name in _INDEXING else args  # torch takes an index from the host
    for leaf in tree_flatten((operands, kwargs))[0]:
        if isinstance(leaf, Tensor) and not isinstance(leaf, _OnDevice) and leaf.dim():
            raise MixedDevices(f"{name}: a tensor {list(leaf.shape)} is on the CPU, others are on {DEVICE}")


def _without_device(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], torch.device | None]:
    """The arguments of the same call on the CPU, and the device that was named."""
    if func is torch.device or name == "type":
        return args, kwargs, None
    named = kwargs.pop("device", None)
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.device | str):
        named, args = args[1], (args[0], *args[2:])
        if len(args) == 1 and not kwargs:
            args = (args[0], args[0].dtype)
    return args, kwargs, None if named is None else torch.device(named)
