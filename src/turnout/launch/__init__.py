"""How a kernel reaches a card. Every private name of Triton's is here, one module per concern.

launcher: launch a kernel, once or again and again with other addresses. direct: Triton's launcher in C. descriptors:
blocks of tensors for TMA. gluon: names of Gluon that changed. recording: find out what would be launched.
crosscompile: compile that for a card that is not here. support: which Tritons and cards all of this works with.
"""

from turnout.launch.launcher import LaunchPlan, launch, one_launch, prepare_from_plan, prepare_launch

__all__ = ["LaunchPlan", "launch", "one_launch", "prepare_from_plan", "prepare_launch"]
