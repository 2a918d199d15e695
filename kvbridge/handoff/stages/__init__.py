"""The handoff as a line of functions over requests:

check → align → features → translate → rotate → repair → judge → assemble

Each takes a pair and requests and returns requests in the same order (`assemble`: handoffs). It
fills in one part, modifies none of its arguments, and hands on as they are requests that were
refused or have that part already. `replan` gives a request another plan and takes back what that
plan alters.
"""

from kvbridge.handoff.stages.align import align, replan
from kvbridge.handoff.stages.assemble import assemble
from kvbridge.handoff.stages.check import check
from kvbridge.handoff.stages.features import features
from kvbridge.handoff.stages.judge import judge
from kvbridge.handoff.stages.repair import repair
from kvbridge.handoff.stages.rotate import rotate
from kvbridge.handoff.stages.translate import translate

__all__ = [
    "align",
    "assemble",
    "check",
    "features",
    "judge",
    "repair",
    "replan",
    "rotate",
    "translate",
]
