"""Run by test_direct.py in a process of its own: ordinary launches and direct ones, as a stand-in driver sees them.

Prints a line for each kernel: its name, and "same" or how the two launches differ.
"""

import ctypes
import functools

import torch

STREAM = 7777


def pretend_a_card():
    """torch without CUDA asks nobody which card is current."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda index: STREAM
    torch._C._cuda_getDevice = lambda: 0


ROUTES = {
    "dot": "two-stage",
    "rms_norm_silu": "rows",
    "norm_rope": "one-pass",
    "group_norm_silu": "planes",
    "causal_conv1d_update": "one-launch",
    "conv2d": "implicit-gemm-hopper",
    "conv3d": "narrow-out-hopper",
    "attention": "wide-head-hopper",
}


def parameter_sizes(compiled):
    """Bytes of each parameter of a compiled kernel, scratch memory at the end."""
    sizes = []
    for kind in compiled.src.signature.values():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            sizes += [128] + [4] * rank + [8] * rank
        else:
            sizes.append(8 if kind.startswith("*") else {"i32": 4, "i64": 8, "fp32": 4, "u64": 8}[kind])
    return [*sizes, 8, 8]


def last(library):
    into = ctypes.create_string_buffer(1 << 16)
    length = library.recording_last(into)
    return into.raw[:length]


def compare(launch, library):
    from turnout.launch import launcher, operands
    from turnout.launch.direct import direct_launcher

    with operands.compiling(launch.options) as known:
        named = {**launch.constants, **launcher.compile_options(launch.warps, known)}
        compiled = launch.kernel.warmup(*launch.tensors, *launch.numbers, **named, grid=(launch.programs,))
        sizes = parameter_sizes(compiled)
        library.recording_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        launch.kernel[(launch.programs,)](*launch.tensors, *launch.numbers, **named)
    ordinary = last(library)
    arguments = (*launcher._arguments(launch.tensors, compiled), *launch.numbers, *launch.constants.values())
    direct = direct_launcher(compiled, len(arguments))
    if direct.run is None:
        return "not launched directly"
    direct.run(launch.programs + 1, 1, arguments)  # another grid and stream, so that nothing old is compared
    if last(library) == ordinary:
        return "was not launched again"
    direct.run(launch.programs, STREAM, arguments)
    return "same" if last(library) == ordinary else f"differs: {ordinary.hex()} {last(library).hex()}"


def main():
    pretend_a_card()
    import triton
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from tests.walk import calls
    from turnout.launch.direct import launcher_kind
    from turnout.launch.recording import recorded
    from turnout.routing.device import Device
    from turnout.routing.op import OPS

    library, device = ctypes.CDLL("libcuda.so.1"), Device.named("h200")
    driver.set_active(CudaDriver())
    print("kind", launcher_kind(), "triton", triton.__version__)
    for name, route in ROUTES.items():
        op = OPS[name]
        [args] = calls(op, op.routes[route], torch.device("cpu"), device, 1)
        config = op.routes[route].configs(op.problem(*args), device)[0]
        with recorded(device) as launches:
            functools.partial(op.routes[route].run, **config)(*args)
        for launch in launches:
            print(name, launch.kernel.fn.__name__, compare(launch, library), flush=True)


if __name__ == "__main__":
    main()
