"""Guards of the routes in plain torch: which convolutions each cannot take.

`problem` is that of one convolution; ops whose own problem holds more pass its convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from turnout.ops.convolution.problem import ON_TORCHS_OWN_LOOP, Convolution
from turnout.ops.needs import HALF_AND_SINGLE, needs_dtype, needs_numba
from turnout.routing.device import Device

HALVES = (torch.float16, torch.bfloat16)
# Products that are added up in one go. Torch 2.13's error is that of its other kernels at 288, 1.4 times that
# at 432, 2.4 times at 864.
LONGEST_SUM = 288
SHORT_SUM = 128  # products that are added up as exactly as by any kernel of torch
# The same for kernels of one pixel in height and width: 1.6 times the error at 192, 1.8 times at 240.
LONGEST_OF_PIXELS = 144


def needs_one_dnn(problem: Convolution, device: Device, dtype: torch.dtype | None = None) -> Iterator[str]:
    """Need, on a CPU, a oneDNN kernel for the dtype, and outputs that see some input.

    Without such an input oneDNN crashes in some layouts (torch 2.13).
    """
    if device.type != "cpu":
        return
    if (dtype or problem.dtype) not in device.one_dnn:
        yield (
            f"no oneDNN kernel for {str(problem.dtype).removeprefix('torch.')} on this CPU, "
            "this route needs one"
        )
    reach = [d * (k - 1) for d, k in zip(problem.dilation, problem.weight[2:], strict=False)]
    if any(p > r for p, r in zip(problem.padding, reach, strict=False)):
        yield (
            f"padding {problem.padding} around a kernel that reaches {reach}, "
            "this route needs outputs that see some input"
        )
    if any(
        n < d and k > 1
        for n, d, k in zip(problem.input[2:], problem.dilation, problem.weight[2:], strict=False)
    ):
        yield (
            f"dilation {problem.dilation} of an input {list(problem.input[2:])}, "
            "this route needs outputs that see some input"
        )


def on_torchs_own_loop(problem: Convolution, device: Device) -> bool:
    """Whether torch runs a call on a CPU without oneDNN.

    It does so for few pixels of a single image in float32, and for dtypes that oneDNN has no kernel for.
    """
    if problem.dtype is not torch.float32:
        return problem.dtype not in device.one_dnn
    large_kernel = all(k > 3 for k in problem.weight[-2:])
    return (
        problem.groups == 1
        and problem.input[0] == 1
        and not large_kernel
        and prod(problem.input[:4]) <= ON_TORCHS_OWN_LOOP
    )


def needs_sums_as_careful(problem: Convolution, device: Device, at_once: int, longest: int) -> Iterator[str]:
    """Need at most `longest` products at once where torch's own loop adds up shorter sums."""
    if (
        problem.dtype is torch.float32
        and at_once > longest
        and on_torchs_own_loop(problem, device)
        and device.loop_adds_carefully
    ):
        yield (
            f"{at_once} products added up in one go where torch adds more carefully on this CPU, "
            f"this route needs at most {longest}"
        )


def needs_sums_as_exact(
    problem: Convolution, device: Device, length: int, longest: int | None = None
) -> Iterator[str]:
    """Need sums of at most `longest` products, where oneDNN would be less exact than torch.

    In float32 with channels last oneDNN adds up in one go, with up to four times the error of torch's other
    kernels.
    """
    keeps_layout = problem.output_channels_last and not on_torchs_own_loop(problem, device)
    longest = longest or (LONGEST_OF_PIXELS if prod(problem.weight[-2:]) == 1 else LONGEST_SUM)
    if device.type == "cpu" and problem.dtype is torch.float32 and not keeps_layout and length > longest:
        yield f"sums of {length} products where torch adds more carefully, this route needs at most {longest}"


def refuses_anywhere(problem: Convolution, *dtypes: torch.dtype) -> Iterator[str]:
    why = problem.invalid()
    if why is not None:
        yield why
    yield from needs_dtype(problem.dtype, *dtypes)
    for name, dtype in (("weight", problem.weight_dtype), ("bias", problem.bias_dtype)):
        if dtype not in (problem.dtype, None):
            yield f"a {name} of {str(dtype).removeprefix('torch.')}, this route needs the input's dtype"


def needs_even_channels(problem: Convolution, device: Device) -> Iterator[str]:
    """Need an even number of bfloat16 channels on a CPU, as oneDNN multiplies them in pairs.

    With channels last the last odd one is paired with the next pixel's first channel, times zero: NaN where
    that is not finite (torch 2.13, AVX-512 with bf16).
    """
    if (
        device.type == "cpu"
        and problem.dtype is torch.bfloat16
        and problem.weight[1:2]
        and problem.weight[1] % 2
    ):
        yield (
            f"{problem.weight[1]} channels in bfloat16, which let NaN pass to the next pixel, "
            "this route needs an even number"
        )


def refuses_channels_last(problem: Convolution, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, *HALF_AND_SINGLE)
    yield from needs_one_dnn(problem, device)
    yield from needs_even_channels(problem, device)
    yield from needs_pixels_in_groups(problem, device)
    yield from needs_sums_as_exact(problem, device, prod(problem.weight[1:]))
    if device.type == "cpu":
        yield from needs_sums_as_careful(problem, device, prod(problem.weight[1:]), SHORT_SUM)
    if (
        problem.channels_last
        and problem.weight_channels_last
        and not (device.type == "cpu" and on_torchs_own_loop(problem, device))
    ):
        yield "input and weight are channels last already, this route needs one that is not"


def refuses_one_dnn(problem: Convolution, device: Device) -> Iterator[str]:
    taps = prod(problem.weight[2:])
    yield from refuses_anywhere(problem, torch.float32)
    yield from needs_one_dnn(problem, device)
    if device.type != "cpu":
        yield f"device {device.name}, this route needs a CPU"
    elif problem.invalid() is None and not on_torchs_own_loop(problem, device):
        yield "torch runs this call with oneDNN, this route needs a call that torch runs without oneDNN"
    elif not device.has_avx512:  # without it, channels first are added up in one go too
        yield from needs_sums_as_exact(problem, device, prod(problem.weight[1:]))
        yield from needs_sums_as_careful(problem, device, prod(problem.weight[1:]), SHORT_SUM)
    elif taps == 1:
        yield from needs_sums_as_careful(problem, device, problem.weight[1], 16)
    else:
        # With 192 channels and more the loop's sums are long as well: 1.2 to 1.4 times its error then, with
        # fewer up to 1.9 times.
        at_once = min(problem.weight[1], 16) * taps
        yield from needs_sums_as_exact(problem, device, at_once, 432)
        yield from needs_sums_as_careful(
            problem, device, at_once, 432 if problem.weight[1] >= 192 else LONGEST_SUM
        )


def needs_pixels_in_groups(problem: Convolution, device: Device) -> Iterator[str]:
    """Need pixels in both axes for groups on a CPU.

    Where input or output is one pixel wide or high, the strides that torch 2.13 gives the output follow no
    rule and depend on the number of threads.
    """
    if device.type != "cpu" or problem.invalid() is not None or problem.groups == 1:
        return
    if 1 in (*problem.input[-2:], *problem.output[-2:]):
        facts = f"{problem.groups} groups and an axis of size one, whose strides follow no rule"
        yield f"{facts}, this route needs longer axes or 1 group"


def refuses_upcast(problem: Convolution, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, *HALVES)
    yield from needs_one_dnn(problem, device, torch.float32)
    yield from needs_pixels_in_groups(problem, device)
    if device.type != "cpu":
        yield f"device {device.name}, this route needs a CPU"


def refuses_depth_taps(problem: Convolution, device: Device, frames: int | None = None) -> Iterator[str]:
    """Take float32 only: half types would be rounded after every tap, and are then not `close`.

    `frames` counts those that are not padding: where some depths see only padding, torch's sums are shorter.
    """
    yield from refuses_anywhere(problem, torch.float32)
    yield from needs_one_dnn(problem, device)
    if problem.spatial == 3 and problem.weight[2] < 2:
        yield f"kernel depth {problem.weight[2]}, this route needs at least 2"
    if device.type != "cpu" or problem.invalid() is not None:
        return
    pixels = prod(problem.weight[-2:])
    if problem.groups > 1:  # their channels are not added up in parts
        yield from needs_sums_as_exact(problem, device, prod(problem.weight[1:]))
        if 1 in (*problem.input[-2:], *problem.weight[-2:]):
            yield (
                f"{problem.groups} groups and an axis of size one, which torch 2.13 gets wrong in 2-D, "
                "this route needs longer axes"
            )
    elif pixels == 1 or (frames or problem.input[2]) < problem.weight[2]:
        yield from needs_sums_as_exact(
            problem, device, problem.weight[1] * pixels, 32 if pixels == 1 else SHORT_SUM
        )
    elif on_torchs_own_loop(problem, device):
        yield from needs_sums_as_exact(problem, device, problem.weight[1] * pixels)


def refuses_depth_chunks(problem: Convolution, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, *HALF_AND_SINGLE)
    yield from needs_one_dnn(problem, device)
    if problem.invalid() is None and problem.output[2] < 2:
        yield f"{problem.output[2]} output frames, this route needs at least 2"
    if device.type == "cpu" and problem.invalid() is None and on_torchs_own_loop(problem, device):
        yield "torch runs this call without oneDNN, this route needs a call that torch runs with oneDNN"
    # With groups oneDNN in bfloat16 reads outside of a clip that is part of a longer one (torch 2.13).
    if device.type == "cpu" and problem.groups > 1:
        yield f"{problem.groups} groups, this route needs 1 on a CPU"


def refuses_pointwise(problem: Convolution, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, *HALF_AND_SINGLE)
    yield from needs_one_dnn(problem._replace(padding=()), device)
    if any(k != 1 for k in problem.weight[2:]):
        yield f"kernel {list(problem.weight[2:])}, this route needs one pixel"
    if problem.groups != 1:
        yield f"{problem.groups} groups, this route needs 1"
    yield from needs_matmul_as_exact(problem)
    yield from needs_sums_as_exact(problem, device, problem.weight[1])


def refuses_winograd(problem: Convolution, device: Device) -> Iterator[str]:
    yield from refuses_anywhere(problem, *HALF_AND_SINGLE)
    yield from needs_numba(device)
    if problem.float32.conv not in ("ieee", ""):
        yield f"float32 multiplied as {problem.float32.conv}, this route needs ieee"
    if tuple(problem.weight[-2:]) != (3, 3):
        yield f"kernel {list(problem.weight[2:])}, this route needs 3 x 3 in height and width"
    if (
        any(s != 1 for s in problem.stride)
        or any(d != 1 for d in problem.dilation[-2:])
        or problem.groups != 1
    ):
        yield (
            f"stride {problem.stride}, dilation {problem.dilation}, {problem.groups} groups, "
            "this route needs 1 of all"
        )


EXACT_FIRST = ("ieee", "tf32", "bf16")  # how float32 may be multiplied


def needs_matmul_as_exact(problem: Convolution) -> Iterator[str]:
    """Torch has one flag for convolutions and one for matrix products."""
    conv, matmul = problem.float32
    if problem.dtype is torch.float32 and EXACT_FIRST.index(matmul) > EXACT_FIRST.index(conv):
        yield f"float32 matrix products as {matmul}, this route needs {conv}, as for convolutions"
