"""What conv2d, conv3d, causal_conv3d and upsample_conv2d share: the problem, guards, costs, methods in plain torch, and GPU kernels."""
