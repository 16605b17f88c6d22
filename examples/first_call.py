"""The first useful result: one call, the route it takes and why, and what that is worth on this machine."""

import statistics
import time

import torch

import turnout

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(run, *args, rounds=7):
    run(*args)
    samples = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        run(*args)
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - before))
    return statistics.median(samples)


print("One long sum, written as a matrix product: (1, K) @ (K, 1), K = 50,000,000\n")
for dtype in (torch.float32, torch.bfloat16):
    a, b = (
        torch.randn(1, 50_000_000, device=device).to(dtype),
        torch.randn(50_000_000, 1, device=device).to(dtype),
    )
    true = torch.dot(a[0].double(), b[:, 0].double()).item()
    theirs, ours = milliseconds(torch.matmul, a, b), milliseconds(turnout.matmul, a, b)
    errors = [abs(run(a, b).item() - true) / abs(true) for run in (torch.matmul, turnout.matmul)]
    print(turnout.explain(turnout.matmul, a, b))
    print(f"\n  torch.matmul   {theirs:8.2f} ms   relative error {errors[0]:.0e}")
    print(f"  turnout.matmul {ours:8.2f} ms   relative error {errors[1]:.0e}   {theirs / ours:.1f}x\n")

print("The same question for a card that is not here:\n")
print(turnout.explain("matmul", a.to("meta"), b.to("meta"), device="h200"))
