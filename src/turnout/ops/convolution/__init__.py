"""The code that conv2d, conv3d, causal_conv3d and upsample_conv2d share.

Here: the problem, guards, costs, and methods in plain torch. `gpu/`: routes by our own GPU kernels. `cpu/`:
by our own CPU kernels. A reader of one need not read the other.
"""
