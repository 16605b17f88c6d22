"""How a kernel reaches a card. Every private name of Triton's is here, one module per concern.

launcher: launch a kernel. plans: plan the launches of a route once, for calls with other addresses. direct:
Triton's launcher in C. descriptors: blocks of tensors for TMA. gluon: names of Gluon that changed. recording:
find out what would be launched.
crosscompile: compile that for a card that is not here. support: which Tritons and cards all of this works
with.
"""

from turnout.launch.launcher import Launch, launch, start
from turnout.launch.plans import LaunchPlan, Workspace, prepare_from_plan, run_plan, runs_plan
from turnout.launch.specialization import unspecialized

__all__ = [
    "Launch",
    "LaunchPlan",
    "Workspace",
    "launch",
    "prepare_from_plan",
    "run_plan",
    "runs_plan",
    "start",
    "unspecialized",
]
