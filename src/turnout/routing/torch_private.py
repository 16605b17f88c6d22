"""Every name that torch calls private and turnout uses, in one place: an upgrade of torch is checked here.

A name that this torch has not got stands for a function that raises `MissingName` when it is first called, so
that everything else goes on; `missing()` lists such names, and a test fails where there is one. Names with a
stand-in are those that only some supported versions have. Operators (`torch.ops`) are not listed: they have
schemas that torch keeps.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])

_missing: list[str] = []


class MissingName(AttributeError):
    """turnout needs a private name of torch that this version has not got."""


def missing() -> list[str]:
    """The private names that this torch has not got, each as "module:name"."""
    return list(_missing)


def find(name: str, stand_in: Any = None) -> Any:
    """What torch has under "module:name"; else the stand-in, or a function that raises `MissingName`."""
    module, _, attributes = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        if stand_in is not None:
            return stand_in
        _missing.append(name)

        def fail(*args: Any, **kwargs: Any) -> NoReturn:
            raise MissingName(
                f"torch {torch.__version__} has no {name.replace(':', '.')}, which turnout needs here; "
                "install a version of torch that turnout supports, or a newer turnout"
            )

        return fail
    return value


# Transforms, modes and traces, which rewrite the running program.
functorch_level: Callable[[], Any] = find("torch:_C._functorch.peek_interpreter_stack")
functorch_levels: Callable[[], Any] = find("torch:_C._functorch.get_interpreter_stack")
tracing_state: Callable[[], Any] = find("torch:_C._get_tracing_state")
count_dispatch_modes: Callable[[], int] = find("torch:_C._len_torch_dispatch_stack")
current_dispatch_mode: Callable[[], Any] = find("torch.utils._python_dispatch:_get_current_dispatch_mode")
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = find(
    "torch.utils._python_dispatch:_disable_current_modes"
)
in_function_mode: Callable[[], bool] = find("torch:_C._is_torch_function_mode_enabled")
count_function_modes: Callable[[], int] = find("torch:_C._len_torch_function_stack")
function_mode_at: Callable[[int], Any] = find("torch:_C._get_function_stack_at")
without_function_modes: Callable[[], AbstractContextManager[Any]] = find("torch:_C.DisableTorchFunction")
FakeTensor: Any = find("torch._subclasses.fake_tensor:FakeTensor")
FakeTensorMode: Any = find("torch._subclasses.fake_tensor:FakeTensorMode")
TracingContext: Any = find("torch._guards:TracingContext")
autocasting: Callable[[], bool] = find("torch:_C._is_any_autocast_enabled")


def is_default_device(mode: Any) -> bool:
    """Whether a function mode is that of `with torch.device(...)` or `torch.set_default_device`."""
    from torch.utils._device import DeviceContext

    return isinstance(mode, DeviceContext)


# As text too, for code that is generated: a call would take longer than the comparison.
IN_FORWARD_AD = "forward_ad._current_level >= 0"


def in_forward_ad() -> bool:
    """Whether forward-mode derivatives are being computed."""
    return forward_ad._current_level >= 0


def constant_in_graphs(function: F) -> F:
    """Mark a function whose result a traced graph keeps from when it was traced.

    As `torch.compiler.assume_constant_result` does, which also imports the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


# Autograd.
increment_version: Callable[[Sequence[Tensor]], None] = find("torch:_C._increment_version")
saved_tensors_hooks: Callable[..., Any] = find("torch:_C._autograd._top_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], Any] = find("torch:_C._autograd._pop_saved_tensors_default_hooks")
push_saved_tensors_hooks: Callable[..., Any] = find("torch:_C._autograd._push_saved_tensors_default_hooks")
without_dispatch_keys: Callable[[Any], AbstractContextManager[Any]] = find(
    "torch:_C._ExcludeDispatchKeyGuard"
)
recording_key: Any = find("torch:_C.DispatchKey.ADInplaceOrView")  # views, and versions of written tensors
key_set: Callable[[Any], Any] = find("torch:_C.DispatchKeySet")


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Inside this block no hooks see the tensors that are saved for backward: `torch.func` takes none."""
    hooks = []
    while (top := saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_hooks(pack, unpack)


# Modules and storages.
GLOBAL_HOOKS: list[Any] = [
    find(f"torch.nn.modules.module:_global{kind}_hooks")
    for kind in ("_forward_pre", "_forward", "_backward_pre", "_backward")
]
tree_leaves: Callable[[Any], list[Any]] = find("torch.utils._pytree:tree_leaves")
TensorBase: Any = find("torch:_C.TensorBase")  # has what Tensor inherits
TensorGuards: Any = find("torch._C._dynamo.guards:TensorGuards", False) or None
version_of_dict: Callable[[dict], int] | None = find("torch._C._dynamo.guards:dict_version", False) or None


def storage_id(tensor: Tensor) -> int:
    """Which storage a tensor lies in. Its address would not tell: empty tensors, and those on meta, have
    none."""
    return tensor.untyped_storage()._cdata


def uncompiled(module: nn.Module) -> nn.Module | None:
    """The module inside the one that `torch.compile(module)` returned; None for any other module."""
    return getattr(module, "_orig_mod", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run a compiled program: `torch.compile(module)` or `module.compile()`."""
    return uncompiled(module) is not None or module._compiled_call_impl is not None


# Convolutions and float32. A precision is "ieee", "tf32", "bf16", or "none", which means ieee.
get_precision: Callable[[str, str], str] = find("torch:_C._get_fp32_precision_getter")
set_precision: Callable[[str, str, str], object] = find("torch:_C._set_fp32_precision_setter")
cudnn_enabled: Callable[[], bool] = find("torch:_C._get_cudnn_enabled")
convolution_backend: Callable[..., Any] = find("torch:_C._select_conv_backend")
convolution_format: Callable[..., torch.memory_format] = find(
    "torch:_C._conv_determine_backend_memory_format"
)
cpu_multiplies_bfloat16: Callable[[], bool] = find("torch.cpu:_is_avx512_bf16_supported")
cpu_multiplies_float16: Callable[[], bool] = find("torch.cpu:_is_amx_fp16_supported")

# Functions under other names than the public ones: these stay where somebody has replaced the public ones.
scaled_dot_product_attention: Callable[..., Tensor] = find("torch:_C._nn.scaled_dot_product_attention")
pad: Callable[..., Tensor] = find("torch:_C._nn.pad")
addmm_gelu: Callable[..., Tensor] = find("torch:_addmm_activation")
copy_all: Callable[[list[Tensor], list[Tensor]], object] = find("torch:_foreach_copy_")

# Which of its backends torch's attention may use. It may use one that has no such flag.
attention_flags: list[Callable[[], bool]] = [
    find(f"torch:_C._get_{name}_sdp_enabled", lambda: True)
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
]
# Whether FlashAttention 3, 4 and so on was put in the place of torch's own: torch 2.15 knows these two.
attention_replacements: list[Callable[[], bool]] = [
    find(f"torch:_C.{name}") for name in dir(torch._C) if re.fullmatch(r"_get_fa\d+_sdp_enabled", name)
]
attention_order: Callable[[], list[int]] = find("torch:_C._get_sdp_priority_order", list)
# Flags that may change which kernels a call runs. A newer torch has more of them: 2.15 can be told to take
# FlashAttention 4. TF32 is left to `get_precision`: it never raises.
_ABOUT_KERNELS = re.compile(
    r"_get_(?!.*tf32).*(enabled|allow|prefer|benchmark|deterministic|native_aot|carveout|immediate|depthwise)"
)
kernel_flags: list[Callable[[], Any]] = [
    find(f"torch:_C.{name}") for name in dir(torch._C) if _ABOUT_KERNELS.match(name)
]

# CUDA. A build of torch without it has none of these.
_without_cuda = None if torch.version.cuda or torch.version.hip else lambda *_: None
cuda_device: Callable[[], int] = find("torch:_C._cuda_getDevice", _without_cuda)
cuda_stream: Callable[[int], int] = find("torch:_C._cuda_getCurrentRawStream", _without_cuda)
is_capturing: Callable[[], bool] = find("torch:_C._cuda_isCurrentStreamCapturing", _without_cuda)
end_allocate_to_pool: Callable[..., None] = find("torch:_C._cuda_endAllocateToPool", lambda *_: None)
release_pool: Callable[..., None] = find("torch:_C._cuda_releasePool", lambda *_: None)


def default_store() -> Any:
    """The store of torch.distributed's default group. One of our own would need an address that all ranks
    know."""
    return torch.distributed.distributed_c10d._get_default_store()
