"""Compile what a model's call will launch before the call: all of it together, on all cores, on any machine.

planning: find every launch of a call, without running it. compiling: hand them to a process of its own.
worker: that process, which forks one for each kernel. warmed: `turnout.warm`, and what it reports.
"""

from turnout.warming.warmed import Kernel, Warmed, warm

__all__ = ["Kernel", "Warmed", "warm"]
