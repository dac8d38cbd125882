"""What a canonical function of a cluster says, as plain data; ``analyze`` (analysis.py) reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

#: block annotations of the second reduction of a mergeable pair
MERGE, MERGE_WITH = "comfuse.merge", "comfuse.merge_with"
#: attribute of functions whose product the model has in float32
WIDE_PRODUCT = "comfuse.wide_product"
KINDS = ("gemm_reduce", "gemm_elementwise")


@dataclass(frozen=True)
class Operand:
    """An input other than x and w.

    index    position among the function's parameters
    kind     ``tile`` [M, N], ``col`` [N], ``row`` [M] or [M, 1], ``scalar`` [1]
    readers  blocks that read it
    """

    name: str
    index: int
    kind: str
    dtype: str
    readers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """A row value: ``op`` over the N columns, float32 [M].

    merge, merge_with  set on the second reduction of a pair whose partials can be exchanged together with those of the
                       first (block name ``merge_with``): ``moments`` (sum, centred squares) or ``softmax`` (maximum,
                       sum of exponentials)
    of_carried         it reduces the carried value itself, and not something that is computed from it
    reads              it reads something: TVM simplifies v - v to a constant
    """

    block: str
    op: str
    merge: str | None = None
    merge_with: str | None = None
    of_carried: bool = field(default=False, compare=False)
    reads: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Output:
    """An output: ``tile`` [M, N] or ``row`` [M, 1]; index is its position among the function's parameters.

    late      it reads the value that its own stage carries
    packable  packed half-precision instructions can compute it from the carried value (packed.packable)
    """

    block: str
    index: int
    dtype: str
    kind: str
    late: bool = False
    packable: bool = False


@dataclass(frozen=True)
class Stage:
    """Elementwise work between two row reductions.

    carried     block that makes this stage's float32 [M, N] value; None if the value of an earlier stage, or the
                product, stays the carried one
    operations  scalar operations that all blocks of the stage do for one element of the tile (normal_form.operations)
    approximable  one of them is a function that fast_math makes cheaper
    """

    index: int
    carried: str | None
    reductions: tuple[Reduction, ...]
    outputs: tuple[Output, ...]
    operations: int = 0
    approximable: bool = False

    @cached_property
    def passes(self) -> list[tuple[str, ...]]:
        """Blocks in the order in which a kernel computes them, together what one pass over the tile computes.

        Outputs of the value that the stage before carries; the carried value with the reductions; the late outputs.
        """
        early, late = ([(o.block,) for o in self.outputs if o.late == when] for when in (False, True))
        reductions = tuple(reduction.block for reduction in self.reductions)
        return [*early, ((self.carried,) if self.carried else ()) + reductions, *late]


@dataclass(frozen=True)
class RowsSpec:
    """Stages over the rows of [M, N] tensors, float32 in between: all of a ``rows`` function, and the epilogue of a cluster.

    m  rows, None if symbolic
    """

    m: int | None
    n: int
    operands: tuple[Operand, ...]
    stages: tuple[Stage, ...]

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """All outputs in the order of the function's parameters."""
        every = [output for stage in self.stages for output in stage.outputs]
        return tuple(sorted(every, key=lambda output: output.index))

    @cached_property
    def passes(self) -> list[tuple[str, ...]]:
        """Those of all stages in order."""
        return [blocks for stage in self.stages for blocks in stage.passes]

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """All reductions in program order."""
        return tuple(reduction for stage in self.stages for reduction in stage.reductions)

    @cached_property
    def tile_operands(self) -> tuple[Operand, ...]:
        """The [M, N] operands, in the order of Plan.operands."""
        return tuple(operand for operand in self.operands if operand.kind == "tile")

    @cached_property
    def tile_outputs(self) -> tuple[Output, ...]:
        """The [M, N] outputs, in the order of Plan.store."""
        return tuple(output for output in self.outputs if output.kind == "tile")

    @cached_property
    def col_operands(self) -> tuple[Operand, ...]:
        """The [N] operands."""
        return tuple(operand for operand in self.operands if operand.kind == "col")


@dataclass(frozen=True)
class ClusterSpec(RowsSpec):
    """One cluster: out = stages(x [M, K] @ w).

    w_layout      ``NK`` or ``KN``
    wide_product  whether the model has the product in float32; else it rounds it to the dtype of x
    """

    k: int
    x_dtype: str
    w_layout: str
    kind: str
    w_dtype: str
    wide_product: bool = False


def rounds(spec: ClusterSpec) -> list[list[Reduction]]:
    """The reductions grouped into exchanges, in program order.

    All reductions of a stage make one round; the second of a mergeable pair joins the round of its first, so a stage
    whose only reduction it was needs no round of its own.
    """
    groups: list[list[Reduction]] = []
    home: dict[str, list[Reduction]] = {}
    for stage in spec.stages:
        own: list[Reduction] = []
        for reduction in stage.reductions:
            group = own if reduction.merge_with is None else home[reduction.merge_with]
            group.append(reduction)
            home[reduction.block] = group
        if own:
            groups.append(own)
    return groups
