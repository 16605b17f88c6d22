"""Convolutions by our own GPU kernels, from the declaration of a route to a launch.

- `routes.py` declares routes; `declared.py` says of each kernel what it refuses and costs, in terms of a
  `Task` (`task.py`), and `tiles.py` which configurations it has
- `launching.py` takes the tensors of a call (`operands.py`) to one launch, by the `Lowering` of the kernel
  (`lowering.py`); `packing.py` brings tensors into the layouts that kernels read
- `implicit_gemm.py` and `narrow_out.py` are the lowerings; the `*kernels.py` files are what a card runs
"""
