"""Compile what a call will launch before it is launched: all of it together, on all cores, on any machine.

planning: find every launch of a call, without running it. compiling: hand them to a process of its own.
worker: that process, which forks one for each kernel. warmed: what became of them. progress: a bar.
`turnout.models.warm` and `turnout.models.first_calls` do all of it for models.
"""

from turnout.warming.warmed import Kernel, Warmed

__all__ = ["Kernel", "Warmed"]
