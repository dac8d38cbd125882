"""Schedule primitives of clusters.

Each is a function on an s_tir Schedule made of stock primitives and annotations, because only those are recorded in a
trace and replay from a tuning database.  Annotation values are flat: integers and strings.  None of the primitives
changes what the function computes, so a scheduled function still runs on any target.
"""

from .exchange import EXCHANGE, set_exchange
from .fuse_stages import ROW_TILE, fuse_stages
from .pipeline import PIPELINE_DEPTH, set_pipeline
from .place_stages import ROLE, place_stages
from .tile_gemm import GemmLoops, tile_gemm

__all__ = [
    "EXCHANGE",
    "PIPELINE_DEPTH",
    "ROLE",
    "ROW_TILE",
    "GemmLoops",
    "fuse_stages",
    "place_stages",
    "set_exchange",
    "set_pipeline",
    "tile_gemm",
]
