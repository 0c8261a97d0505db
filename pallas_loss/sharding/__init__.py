"""A vocabulary split over the devices of a mesh, beside tokens split over others.

Each shard folds its own columns into row sums; those merge, by the rule of ``RowSums``, in one
collective of a few ``[T]`` vectors. Then every shard knows the coefficients of its d-logits, and
only ``dx`` is a sum over shards. So sharding is a backend that wraps another (``shard``, ``mesh``)
and a *placement* that says what lies where; the derivative rule does not know of it.
"""

from pallas_loss.sharding.base import Placement
from pallas_loss.sharding.find import find
from pallas_loss.sharding.manual import Manual
from pallas_loss.sharding.merge import merge_over_axis
from pallas_loss.sharding.mesh import MeshLinear
from pallas_loss.sharding.placement import LOCAL, Local, OnMesh
from pallas_loss.sharding.rows import MeshRows, ShardRows, counting
from pallas_loss.sharding.shard import ShardLinear

__all__ = [
    "LOCAL",
    "Local",
    "Manual",
    "MeshLinear",
    "MeshRows",
    "OnMesh",
    "Placement",
    "ShardLinear",
    "ShardRows",
    "counting",
    "find",
    "merge_over_axis",
]
