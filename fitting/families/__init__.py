"""Map families: which sender columns each group of receiver heads reads. A new one is one file and
one line here."""

from kvbridge.asset.maps.dense import Group
from kvbridge.fitting.families.base import Family
from kvbridge.fitting.families.full_head import full_head
from kvbridge.fitting.families.head_local import head_local

FAMILIES: dict[str, Family] = {
    "full-head": full_head,
    "head-local": head_local,
}

__all__ = ["FAMILIES", "Family", "Group"]
