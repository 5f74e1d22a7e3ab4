"""Makes tensors and generators report and obey their labels: `device`, `to`, `numpy`, `save`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, serialization

from megakit.runtime.patching import require_attribute

from .machine import CPU, HOST, Machine, is_pinned, label_of, replace, tensors_in


def device_of(tensor: Tensor) -> torch.device:
    """Returns the device that a tensor's label names."""
    real: torch.device = torch._C.TensorBase.device.__get__(tensor)
    label = label_of(tensor)
    return real if label == HOST else torch.device("cuda", label)


def replace_properties() -> None:
    """Replaces the properties and methods that return a tensor's device."""
    tensor_type = Tensor.type

    def type_(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = tensor_type(self) if dtype is None else tensor_type(self, dtype, *args, **kwargs)
        is_on_gpu = dtype is None and label_of(self) != HOST
        return name.replace("torch.", "torch.cuda.", 1) if is_on_gpu else name

    replace(
        Tensor,
        device=property(device_of),
        is_cuda=property(lambda self: label_of(self) != HOST),
        is_cpu=property(lambda self: device_of(self).type == "cpu"),
        get_device=label_of,
        type=type_,
        is_pinned=lambda self, device=None: is_pinned(self),
    )


def replace_moves(machine: Machine) -> None:
    """Replaces the methods that copy a tensor between host and GPU."""
    original_to = Tensor.to
    original_deepcopy: Any = Tensor.__deepcopy__

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        elif args and isinstance(args[0], int):
            args = (torch.device("cuda", args[0]), *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        target = machine.index_of(device)
        if target in (None, label_of(self)):  # also meta
            device = torch._C.TensorBase.device.__get__(self) if target is not None else device
            return original_to(self, device, dtype, non_blocking, copy, memory_format=layout)
        if target != HOST:
            machine.initialize()
        machine.thread.target = target
        return torch.ops.aten._to_copy.default(
            self, dtype=dtype, non_blocking=non_blocking, memory_format=layout
        )

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return to(self, "cuda" if device is None else device, non_blocking=non_blocking, **kwargs)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if label_of(self) != HOST:
            raise RuntimeError("cannot pin a GPU's tensor: only dense CPU tensors can be pinned")
        machine.initialize()
        copy = self if is_pinned(self) else self.clone()
        vars(copy.untyped_storage())["_pinned"] = True
        return copy

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        is_known = id(self) in memo
        copy = original_deepcopy(self, memo)
        return copy if is_known else machine.label(copy, label_of(self))

    replace(
        Tensor,
        to=to,
        cuda=cuda,
        cpu=lambda self, **kwargs: to(self, "cpu", **kwargs),
        pin_memory=pin_memory,
        __deepcopy__=deepcopy,
    )


def replace_reads(machine: Machine) -> None:
    """Replaces the methods that return a tensor's values to Python without the dispatcher."""

    def checked(original: Callable[..., Any], on_gpu: Callable[[Tensor], None]) -> Any:
        @functools.wraps(original)
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if label_of(self) != HOST:
                on_gpu(self)
            return original(self, *args, **kwargs)

        return read

    def refuse(tensor: Tensor) -> None:
        raise TypeError(
            f"can't convert {device_of(tensor)} device type tensor to numpy. Use "
            "Tensor.cpu() to copy the tensor to host memory first."
        )

    replace(
        Tensor,
        numpy=checked(Tensor.numpy, refuse),
        __array__=checked(Tensor.__array__, refuse),
        tolist=checked(Tensor.tolist, machine.wait),
    )


def replace_factories(machine: Machine) -> None:
    """Replaces the factories that read Python values without the dispatcher."""

    def moved(factory: Callable[..., Any], keeps_device: bool) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            target = machine.index_of(kwargs.pop("device", None))
            if isinstance(data, Tensor) and target is None:
                target = label_of(data)
            is_pinned_result = kwargs.pop("pin_memory", False)
            requires_grad = kwargs.pop("requires_grad", False)
            if isinstance(data, Tensor) and keeps_device:
                tensor = data.to(kwargs.get("dtype") or data.dtype)
            else:
                for part in tensors_in(data):  # C++ calls item() for each
                    if label_of(part) != HOST:
                        machine.wait()
                tensor = factory(data, *args, **kwargs)
            if target is not None and target != label_of(tensor):
                tensor = tensor.to("cpu" if target == HOST else f"cuda:{target}")
            tensor = tensor.pin_memory() if is_pinned_result else tensor
            return tensor.requires_grad_() if requires_grad else tensor

        return make

    replace(torch, tensor=moved(torch.tensor, False), as_tensor=moved(torch.as_tensor, True))


def replace_generators(machine: Machine) -> None:
    """Replaces `torch.Generator` by a CPU generator that can have the label of a GPU."""
    original: Any = torch.Generator

    class Generator(original):
        def __new__(cls, device: Any = "cpu") -> Any:
            generator = original.__new__(cls)
            label = machine.index_of(device)
            machine.gpu_of_generator[generator._cdata] = HOST if label is None else label
            return generator

        def __init__(self, device: Any = "cpu") -> None: ...

        @property
        def device(self) -> torch.device:
            label = machine.gpu_of_generator[self._cdata]
            return CPU if label == HOST else torch.device("cuda", label)

    def outside_a_capture(name: str) -> Any:
        method = require_attribute(original, name)

        @functools.wraps(method)
        def checked(self: Generator, *args: Any) -> Any:
            if machine.thread.capture is not None and self.device.type == "cuda":
                raise RuntimeError(f"Cannot call {name} of a generator during CUDA graph capture")
            return method(self, *args)

        return checked

    for name in ("get_state", "set_state", "manual_seed", "seed", "initial_seed"):
        setattr(Generator, name, outside_a_capture(name))
    replace(torch, Generator=Generator)
    machine.generators = tuple(Generator(f"cuda:{k}") for k in range(len(machine.gpus)))


def register_files(machine: Machine) -> None:
    """Makes `torch.save` and `torch.load` preserve the labels."""

    def location_of(storage: Any) -> str | None:
        label = getattr(storage, "__dict__", {}).get("_gpu", HOST)
        return None if label == HOST else f"cuda:{label}"

    def put(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        storage._gpu = machine.index_of(location)
        return storage

    serialization.register_package(0, location_of, put)


def install_tensors(machine: Machine) -> None:
    """Makes all of these replacements, for the rest of the process."""
    replace_properties()
    for install in (replace_moves, replace_reads, replace_factories, replace_generators):
        install(machine)
    register_files(machine)
