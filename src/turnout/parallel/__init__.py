"""One model on several devices: frames split by rows or columns, the same bits as on one."""

from turnout.parallel.distribute import distribute
from turnout.parallel.failures import RankFailed, RanksDiffer
from turnout.parallel.fake import Fake
from turnout.parallel.lockstep import Lockstep

__all__ = ["Fake", "Lockstep", "RankFailed", "RanksDiffer", "distribute"]
