"""From a canonical function to its spec.

A canonical function holds the blocks ``gemm``, ``stage_<i>``, ``stage_<i>_out<k>`` and ``reduce_<i>`` (see
docs/architecture.md).  ``analyze`` reads them into a ClusterSpec and refuses every other form with the clause that
failed.  It reads block bodies only, so it takes a function before and after scheduling.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from .normal_form import (
    MERGE_OPS,
    Block,
    approximable,
    check_pair,
    is_load,
    is_one,
    loads,
    normal_form,
    not_canonical,
    same_indices,
)
from .normal_form import operations as operations_of
from .packed import packable
from .spec import KINDS, MERGE, MERGE_WITH, WIDE_PRODUCT, ClusterSpec, Operand, Output, Reduction, RowsSpec, Stage


def analyze(func: tirx.PrimFunc) -> ClusterSpec:
    """The spec of a canonical function, scheduled or not.

    Raises LoweringError, naming the clause, if the function is not canonical.
    """
    return Analysis(func).spec()


def blocks(func: tirx.PrimFunc) -> dict[str, Any]:
    """Name -> SBlock of every block below the root, in program order."""
    found: dict[str, Any] = {}

    def visit(block: Any) -> None:
        if block.name_hint in found:
            raise not_canonical("unique block names", f"two blocks named {block.name_hint}")
        found[block.name_hint] = block

    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, visit)])
    if isinstance(func.body, s_tir.SBlockRealize):
        found.pop(func.body.block.name_hint)
    return found


def normal_forms(func: tirx.PrimFunc) -> dict[str, Block]:
    """Every block below the root in normal form, by name in program order."""
    return {name: normal_form(name, block) for name, block in blocks(func).items()}


# --- the parts of analyze ---------------------------------------------------------------------------------------------


class Analysis:
    """One run of analyze; holds the buffers and blocks by name.

    first  parameters in front of the operands: x and w
    base   block whose value the first stage reads
    """

    first, base = 2, "gemm"

    def __init__(self, func: tirx.PrimFunc):
        self.func = func
        if not isinstance(func, tirx.PrimFunc):
            raise not_canonical("a PrimFunc", type(func).__name__)
        other = [param.name for param in func.params if not isinstance(param.ty, tirx.BufferType)]
        if other:
            raise not_canonical("buffer parameters only", f"parameters {other}")
        self.params = list(func.params)
        self.blocks = normal_forms(func)
        #: buffers made by blocks, and what they hold
        self.made = {block.store.buffer: name for name, block in self.blocks.items()}
        if len(self.made) != len(self.blocks):
            raise not_canonical(
                "one block for each buffer", f"{len(self.blocks)} blocks write {len(self.made)} buffers"
            )

    def spec(self) -> ClusterSpec:
        """Reads the product, then the stages in order, then the operands."""
        if "gemm" not in self.blocks:
            raise not_canonical("a block named gemm", f"blocks {sorted(self.blocks)}")
        m, n, k, layout = self._product(self.blocks["gemm"])
        rows = self._rows(m, n)
        kind = str((self.func.attrs or {}).get("comfuse.kind", KINDS[0 if rows.reductions else 1]))
        if kind not in KINDS:
            raise not_canonical(f"comfuse.kind one of {KINDS}", kind)
        if (kind == KINDS[0]) != bool(rows.reductions):
            raise not_canonical("comfuse.kind gemm_reduce exactly with a row reduction", kind)
        x, w = (str(param.dtype) for param in self.params[:2])
        wide = bool((self.func.attrs or {}).get(WIDE_PRODUCT, False))
        return ClusterSpec(rows.m, n, rows.operands, rows.stages, k, x, layout, kind, w, wide)

    def _rows(self, m: Any, n: int) -> RowsSpec:
        """Stages and operands."""
        self.m, self.n, self.kinds, self.readers = m, n, dict[int, str](), dict[int, list[str]]()
        for block in self.blocks.values():
            if block.store.buffer not in self.params and block.store.buffer.dtype != "float32":
                raise not_canonical("float32 between the blocks", f"{block.name} of {block.store.buffer.dtype}")
        stages = self._stages()
        outputs = {output.index for stage in stages for output in stage.outputs}
        for index, buffer in enumerate(self.params):
            if index >= self.first and index not in outputs and index not in self.kinds:
                self.kinds[index] = self._kind_by_shape(buffer)
        operands = tuple(
            Operand(buffer.name, index, self.kinds[index], str(buffer.dtype), tuple(self.readers.get(index, ())))
            for index, buffer in enumerate(self.params)
            if index >= self.first and index not in outputs
        )
        static = int(m) if isinstance(m, (int, tirx.IntImm)) else None
        return RowsSpec(static, n, operands, tuple(stages))

    def _product(self, gemm: Block) -> tuple[Any, int, int, str]:
        """M, N, K and the layout of w; gemm[i, j] += float32(x[i, k]) * float32(w[j, k] or w[k, j])."""
        if len(self.params) < 3 or len(gemm.node.iter_vars) != 3 or gemm.op != "sum":
            raise not_canonical(
                "gemm to sum over k of three iteration variables", f"{len(gemm.node.iter_vars)} of them"
            )
        i, j, k = (it.var for it in gemm.node.iter_vars)
        x, w = self.params[:2]
        if not isinstance(gemm.value, tirx.Mul):
            raise not_canonical("gemm to sum a product", type(gemm.value).__name__)
        left, right = _uncast(gemm.value.a), _uncast(gemm.value.b)
        if not (is_load(left, x, (i, k)) and (is_load(right, w, (j, k)) or is_load(right, w, (k, j)))):
            raise not_canonical(
                "gemm to multiply x[i, k] with w[j, k] or w[k, j], the first two parameters", str(gemm.value)
            )
        if not same_indices(gemm.store.indices, (i, j)):
            raise not_canonical("gemm to write at [i, j]", str(gemm.store.indices))
        layout = "NK" if is_load(right, w, (j, k)) else "KN"
        shape = [x.shape[1], *w.shape]
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise not_canonical("static N and K", f"x {list(x.shape)}, w {list(w.shape)}")
        n = int(w.shape[0] if layout == "NK" else w.shape[1])
        return x.shape[0], n, int(x.shape[1]), layout

    def _stages(self) -> list[Stage]:
        """All stages in order; checks that each block reads only what the key rule allows."""
        levels = {block.level for block in self.blocks.values() if block.level is not None}
        if levels != set(range(len(levels))) or not levels:
            raise not_canonical("stages numbered from 0 without holes", f"{sorted(levels)}")
        stages: list[Stage] = []
        carried, rows = self.base, list[str]()
        for level in range(len(levels)):
            stage, carried, rows = self._stage(level, carried, rows)
            stages.append(stage)
        if stages[-1].reductions or not stages[-1].outputs:
            raise not_canonical("a last stage with outputs and no reduction", f"stage {len(stages) - 1}")
        for stage in stages[:-1]:
            if not stage.reductions:
                raise not_canonical("a reduction in every stage but the last", f"none in stage {stage.index}")
        return stages

    def _stage(self, level: int, carried: str, rows: list[str]) -> tuple[Stage, str, list[str]]:
        """One stage, then the carried value and the row values that the next one may read."""
        mine = [b for b in self.blocks.values() if b.level == level]
        own = f"stage_{level}" if f"stage_{level}" in self.blocks else None
        value = own or carried
        reductions, outputs, operations = [], [], 0
        for block in mine:
            tiles = {carried, value} if block.output is not None else {carried if block.name == own else value}
            self._check_reads(block, tiles, rows)
            operations += operations_of(block.value, block.j) + (block.op is not None)
            if block.nth is not None:
                reductions.append(self._reduction(block, rows))
            elif block.output is not None:
                late = own is not None and any(self.made.get(load.source) == own for load in loads(block.value))
                outputs.append(self._output(block, late))
            elif not same_indices(block.store.indices, (block.i, block.j)) or block.op:
                raise not_canonical("a stage block to write at [i, j]", block.name)
        reductions.sort(key=lambda r: self.blocks[r.block].nth or 0)
        outputs.sort(key=lambda o: self.blocks[o.block].output or 0)
        cheaper = any(approximable(block.value) for block in mine)
        stage = Stage(level, own, tuple(reductions), tuple(outputs), operations, cheaper)
        return stage, value, rows + [reduction.block for reduction in reductions]

    def _check_reads(self, block: Block, tiles: set[str], rows: list[str]) -> None:
        """Every load of a block: the carried tile at [i, j], row values of earlier stages at [i], operands."""
        for load in loads(block.value):
            source = self.made.get(load.source)
            if source is None:
                self._note_operand(block, load)
            elif source in tiles:
                if not same_indices(load.indices, (block.i, block.j)):
                    raise not_canonical(f"{block.name} to read {source} at [i, j]", str(load))
            elif source not in rows:
                raise not_canonical(
                    f"{block.name} to read the carried tile {sorted(tiles)}, row values of earlier stages and operands",
                    f"a load of {source} (row values: {rows})",
                )
            elif not same_indices(load.indices, (block.i,)):
                raise not_canonical(f"{block.name} to read the row value {source} at [i]", str(load))

    def _note_operand(self, block: Block, load: Any) -> None:
        """Learns an operand's kind from where it is read."""
        index = next((n for n, buffer in enumerate(self.params) if buffer.same_as(load.source)), None)
        if index is None or index < self.first:
            raise not_canonical(f"{block.name} to read parameters behind x and w", f"a load of {load.source.name}")
        if block.name not in self.readers.setdefault(index, []):
            self.readers[index].append(block.name)
        at, shape = list(load.indices), list(load.source.shape)
        known = {
            "tile": same_indices(at, (block.i, block.j)) and not is_one(shape[1]),
            "row": same_indices(at[:1], (block.i,)) and (len(at) == 1 or is_one(shape[1])),
            "col": block.j is not None and same_indices(at, (block.j,)),
            "scalar": len(at) == 1 and is_one(shape[0]) and isinstance(at[0], tirx.IntImm),
        }
        kind = next((name for name, is_it in known.items() if is_it), None)
        if kind is None or self.kinds.setdefault(index, kind) != kind:
            raise not_canonical("operands read at [i, j], [j], [i] or [0], each in one way", f"{load} in {block.name}")

    def _kind_by_shape(self, buffer: Any) -> str:
        """The kind of an operand that no block reads."""
        shape = [int(e) if isinstance(e, tirx.IntImm) else None for e in buffer.shape]
        if len(shape) == 2:
            return "row" if shape[1] == 1 else "tile"
        if len(shape) != 1:
            raise not_canonical("operands of one or two dimensions", f"{buffer.name} {list(buffer.shape)}")
        return "scalar" if shape == [1] else "col" if shape == [self.n] else "row"

    def _reduction(self, block: Block, rows: list[str]) -> Reduction:
        if block.op is None or not same_indices(block.store.indices, (block.i,)):
            raise not_canonical("a reduction block to write one value a row", block.name)
        merge, first = (_annotation(block.node, key) for key in (MERGE, MERGE_WITH))
        if merge is not None:
            if merge not in MERGE_OPS or first not in rows:
                raise not_canonical(
                    f"{MERGE} one of {list(MERGE_OPS)} and {MERGE_WITH} an earlier reduction", f"{merge}, {first}"
                )
            check_pair(merge, self.blocks[first], block, self.n)
        of_carried = isinstance(block.value, tvm.ir.TensorLoad) and block.value.source in self.made
        return Reduction(block.name, block.op, merge, first, of_carried, bool(loads(block.value)))

    def _output(self, block: Block, late: bool) -> Output:
        index = next((n for n, buffer in enumerate(self.params) if buffer.same_as(block.store.buffer)), None)
        if index is None:
            raise not_canonical("an output block to write a parameter", block.name)
        kind = "row" if is_one(block.store.buffer.shape[1]) and self.n != 1 else "tile"
        at = block.store.indices
        good = same_indices(at, (block.i, block.j)) if kind == "tile" else same_indices(at[:1], (block.i,))
        if not good or block.op:
            raise not_canonical("an output block to write at [i, j], or at [i, 0]", block.name)
        can_pack = kind == "tile" and packable(block.value, block.j)
        return Output(block.name, index, str(block.store.buffer.dtype), kind, late, can_pack)


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _annotation(node: Any, key: str) -> str | None:
    value = node.annotations.get(key) if node.annotations else None
    return None if value is None else str(value)
