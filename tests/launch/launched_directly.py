"""Run by test_direct.py in a process of its own: ordinary launches and direct ones, as a stand-in driver sees
them.

Prints a line for each kernel: its name, and "same" or how the two launches differ. Then a line for each
prepared route: "prepared", its name, how many launches a call has, and the same.
"""

import ctypes
import functools

import torch
from torch.utils._pytree import tree_leaves

STREAM = 7777


def pretend_a_card():
    """torch without CUDA asks nobody which card is current."""
    from turnout.routing import torch_private

    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch_private.cuda_stream = torch._C._cuda_getCurrentRawStream = lambda index: STREAM
    torch_private.cuda_device = torch._C._cuda_getDevice = lambda: 0


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


PREPARED = {
    "dot": ("single-launch", "two-stage"),
    "rms_norm_silu": ("planes",),
    "rms_norm_silu_into": ("rows",),
    "norm_rope": ("one-pass",),
    "layer_norm_modulate": ("rows",),
    "gated_add": ("rows",),
    "add_repeated": ("pixels",),
    "group_norm_silu": ("rows", "planes"),
    "group_norm_silu_pad": ("gapped-rows",),
    "spatial_norm_silu": ("gapped-rows",),
    "causal_conv1d_update": ("one-launch",),
    "selective_scan_update": ("one-launch",),
    "selective_scan": ("one-launch",),
    "causal_conv1d": ("channel-first", "channel-last"),
    "attention": ("flash-triton", "wide-head-hopper"),
}


def convolutions():
    """An op, a route and arguments that lie as its kernel takes them."""

    def image(*shape):
        return torch.zeros(shape[0], *shape[2:], shape[1], dtype=torch.bfloat16).movedim(-1, 1)

    bias = torch.zeros(96, dtype=torch.bfloat16)
    small, film, taps = image(1, 64, 20, 30), image(1, 64, 3, 20, 30), image(96, 64, 3, 3, 3)
    yield "conv2d", "implicit-gemm-hopper", (small, image(96, 64, 3, 3), bias, 1, 1)
    yield "conv2d", "implicit-gemm", (small, image(96, 64, 3, 3), bias, 2, 1)
    yield "conv2d", "narrow-out-hopper", (small, image(3, 64, 3, 3), None, 1, 1)
    yield "conv2d", "narrow-out", (small, image(3, 64, 3, 3), None, 1, 1)
    yield "conv3d", "implicit-gemm", (film, taps, bias, 2, 1, 1, 1, image(1, 96, 2, 10, 15))
    yield "causal_conv3d", "narrow-out", (film, image(3, 64, 3, 3, 3), None, image(1, 64, 2, 20, 30), 1, 1)
    yield "conv3d", "implicit-gemm-hopper", (film, taps, None, 1, 1, 1, 1, image(1, 96, 3, 20, 30))
    yield "causal_conv3d", "implicit-gemm-hopper", (film, taps, bias, image(1, 64, 2, 20, 30), 1, 1)
    yield "upsample_conv2d", "implicit-gemm-hopper", (small, image(96, 64, 3, 3), bias, 2, 1)


def parameter_sizes(compiled):
    """Bytes of each parameter of a compiled kernel, scratch memory at the end."""
    sizes = []
    for kind in tree_leaves(tuple(compiled.src.signature.values())):
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
        expect(library, compiled)
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


def expect(library, compiled):
    sizes = parameter_sizes(compiled)
    library.recording_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))


class Watched:
    """Prepared calls, each launch of which is noted, in tensors that stay where they are."""

    def __init__(self, library):
        from turnout.launch import plans
        from turnout.ops.dot import contraction

        self.library, self.start, self.noted = library, plans.start, []
        card = torch.device("cuda", 0)
        room = torch.zeros(1 << 16, dtype=torch.float64)
        contraction.counters_and_room = lambda where, size: room
        plans.card_of = lambda tensor: card
        plans._allocator = self.allocator
        plans.start = self.noting_start
        watched, self.plan = self, None

        class PreparedPlan(plans._PreparedPlan):
            def __init__(self, *args):
                super().__init__(*args)
                watched.plan = self

        plans._PreparedPlan = PreparedPlan

    @staticmethod
    def allocator(x):
        place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return lambda: place

    def noting_start(self, request):
        """In Triton's own way."""
        from turnout.launch import launcher, operands

        with operands.compiling(request.options) as known:
            named = {**request.constants, **launcher.compile_options(request.warps, known)}
            compiled = request.kernel.warmup(
                *request.tensors, *request.numbers, **named, grid=(request.programs,)
            )
        expect(self.library, compiled)
        started = launcher._start_in_triton(request)
        self.noted.append(last(self.library))
        return started._replace(run=self.noting_run(started))

    def noting_run(self, started):
        def run(*args):
            expect(self.library, started.kernel)
            started.run(*args)
            self.noted.append(last(self.library))

        return run

    def launches(self, run, args):
        self.noted.clear()
        run(*args)
        return list(self.noted)

    def compare(self, op, route, args, device):
        """Calls with the tensors that were there when the call was prepared, and with others."""
        from tests.walk import elsewhere
        from turnout.launch.recording import recorded

        self.plan = None
        with recorded(device):
            prepared = route.prepared(args, route.configs(op.problem(*args), device)[0])
        if self.plan is None:
            return None
        results = []
        for arguments in (args, elsewhere(args), elsewhere(args), args):
            ordinary = self.launches(self.plan.launch_by_triton, arguments)
            direct = self.launches(prepared.call, arguments)
            results.append(ordinary == direct)
        if len({self.launches(prepared.call, arguments)[0] for arguments in (args, elsewhere(args))}) == 1:
            return "the same for other addresses"
        return f"{len(direct)} same" if all(results) else f"{len(direct)} differs: {results}"


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

    compare_prepared(Watched(library), device)


def compare_prepared(watched, device):
    from tests.walk import calls
    from turnout.ops.convolution.gpu import launching
    from turnout.ops.convolution.layout import LAST
    from turnout.routing.op import OPS

    launching.torch_format = lambda input, *rest: LAST[input.dim()]  # cuDNN's
    for name, routes in PREPARED.items():
        for route in routes:
            op = OPS[name]
            several = calls(op, op.routes[route], torch.device("cpu"), device, 40)
            results = (watched.compare(op, op.routes[route], args, device) for args in several)
            print("prepared", name, route, next(filter(None, results), "never"), flush=True)
    for name, route, call in convolutions():
        op = OPS[name]
        print(
            "prepared",
            name,
            route,
            watched.compare(op, op.routes[route], op.arguments(*call), device),
            flush=True,
        )


if __name__ == "__main__":
    main()
