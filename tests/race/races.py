"""Races for the tests of this folder: one as on a GPU, and small ones by the command line."""

import json
import random

import torch
from typer.testing import CliRunner

from turnout.cli import app
from turnout.models.accelerate import Entry, Report
from turnout.race.kernels import (
    Kernel,
    Share,
    Trace,
)
from turnout.race.run import ACCELERATED, COMPILED, STOCK, Lane, Race

CPU = torch.device("cpu")


def race_on_a_gpu(latents=21):
    """A race as on a GPU: three lanes, thousands of kernels with gaps between them, names as long as they are
    there.
    """
    draw = random.Random(0)
    convolution = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8>(Params)"  # noqa: E501
    layer = [
        (
            "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(...)",  # noqa: E501
            0.06,
        ),
        (convolution, 0.4),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>",  # noqa: E501
            0.05,
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16>>", 0.07),
        ("void at::native::CatArrayBatchedCopy", 0.09),
    ]
    fused = [
        ("rms_rows", 0.05),
        ("implicit_gemm_hopper", 0.22),
        ("wide_head", 0.01),
        ("nvjet_hsh_128x256", 0.01),
    ]

    def trace(parts, gap):
        kernels, at = [], 100.0
        for _ in range(latents * 60):
            for name, ms in parts:
                kernels.append(Kernel(name, at, ms * draw.uniform(0.5, 1.5)))
                at += kernels[-1].length + draw.expovariate(1 / gap)
        return Trace(kernels)

    frames = torch.linspace(-1, 1, 320).expand(1, 3, 1, 180, 320).clone()

    def lane(ms, apart, host, mib, psnr, trace, output=None):
        samples = [ms - apart, ms, ms + apart]
        return Lane(
            ms,
            2 * apart,
            60e3,
            host,
            mib,
            psnr,
            trace=trace,
            output=output,
            samples=samples,
            host_samples=[host] * 3,
        )

    lanes = {
        STOCK: lane(1836.2, 3.1, 1610.0, 4486.0, 47.7, trace(layer, 0.004), frames),
        ACCELERATED: lane(582.4, 0.9, 391.0, 2532.0, 51.2, trace(fused, 0.03), frames + 0.01),
        COMPILED: lane(1102.7, 2.2, 60.5, 3920.0, 47.9, trace(layer[1:3], 0.002)),
    }
    lanes[ACCELERATED].trace.routes = [
        Share(
            "causal_conv3d",
            "implicit-gemm-hopper",
            1323,
            441.5,
            0.772,
            "measured and shipped: 2.86x as fast as the reference",
        ),
        Share(
            "rms_norm_silu",
            "rows",
            1218,
            61.0,
            0.107,
            "measured and shipped: 14.90x as fast as the reference",
        ),
        Share(
            "attention",
            "reference",
            21,
            3.0,
            0.005,
            "model: nothing is estimated to beat it by 15%; <escape & me>",
        ),
    ]
    report = Report(
        {"": "AutoencoderKLWan is known"},
        [Entry("decoder", "WanDecoder3d", "channels-last from the first convolution to the last")],
    )
    versions = {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1", "turnout": "0.1.0"}
    machine = {"cpu": "EPYC", "cores": 16, "threads": 16, "card": "NVIDIA H200", "driver": "580.1"}
    return Race(
        "wan-vae",
        "full",
        "Wan 2.1 VAE decode, full: 480 x 832 x 81",
        "bfloat16",
        "NVIDIA H200",
        lanes,
        report,
        versions,
        machine,
        "2026-03-01 12:00 UTC",
        "abc1234",
        "decoder",
    )


def run_command(*words):
    return CliRunner().invoke(app, ["race", *words, "--size", "tiny", "--device", "cpu"])


def rows_in(folder):
    return [json.loads(line) for line in (folder / "cpu" / "race.jsonl").read_text().splitlines()]
