"""Roles: the code of each warp group or warp, specialised and compiled to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.calls import pointee, split
from tvm_comfuse.verify.interpreter.expressions import Context
from tvm_comfuse.verify.interpreter.scheduler import GENERATED
from tvm_comfuse.verify.interpreter.stamp_calls import ANCHOR, STAMP
from tvm_comfuse.verify.interpreter.state import WARP
from tvm_comfuse.verify.interpreter.statements import Statements
from tvm_comfuse.verify.interpreter.tree import Buffer, Expr, Kernel, Stmt
from tvm_comfuse.verify.interpreter.values import Value

WARPS_OF_GROUP = 4


@dataclass
class Role:
    """Code of warp group `group`, or of its warp `warp`; run(actor) gives the generator.  source: the Python text."""

    group: int
    warp: int | None
    run: Callable[[Any], Any]
    source: str


def calls(stmts: list[Stmt]) -> Iterator[Expr]:
    """Every call among statements, outer ones first."""

    def of_expr(expr: Expr) -> Iterator[Expr]:
        if expr.op == "call":
            yield expr
        for arg in expr.args:
            yield from of_expr(arg)

    for stmt in stmts:
        for arg in stmt.args:
            yield from of_expr(arg)
        yield from calls(stmt.body)
        yield from calls(stmt.other)


def is_product(call: Expr) -> bool:
    """Whether a call is a wgmma.mma_async."""
    return str(call.value).startswith("ptx.wgmma_") and "mma_async" in split(call)[1]


def stamp_buffer(kernel: Kernel) -> Buffer | None:
    """The parameter that stamps are written to; None for a kernel without them."""
    found = (call for call in calls(kernel.device) if call.value in (STAMP, ANCHOR))
    return next((pointee(call.args[0]).value for call in found), None)


def compile_roles(kernel: Kernel, groups: int, names: dict[str, Any], parameters: dict[Any, Value]) -> list[Role]:
    """Every role of a kernel.

    names       Python objects that the code may name: tensors and tensor maps
    parameters  values of shape variables; `tensors` and `maps` of the code are in `names` by the buffers' and variables' names
    """
    accumulators = {pointee(split(call)[0][0]).value for call in calls(kernel.device) if is_product(call)}
    return [
        _Compiler(kernel, group, warp, accumulators, names, parameters).role()
        for group, warp in actors_of(kernel, groups)
    ]


def actors_of(kernel: Kernel, groups: int) -> list[tuple[int, int | None]]:
    """(warp group, None) of each warp group that multiplies, (warp group, warp) of each warp of the others."""
    actors: list[tuple[int, int | None]] = []
    for group in range(groups):
        whole = _Compiler(kernel, group, None, set(), {}, {}).multiplies()
        actors += [(group, None)] if whole else [(group, warp) for warp in range(WARPS_OF_GROUP)]
    return actors


class _Compiler:
    def __init__(
        self,
        kernel: Kernel,
        group: int,
        warp: int | None,
        accumulators: set[Buffer],
        names: dict[str, Any],
        parameters: dict[Any, Value],
    ):
        self.kernel, self.group, self.warp, self.names = kernel, group, warp, names
        self.accumulators, self.parameters = accumulators, parameters
        self.lanes = WARP if warp is not None else WARP * WARPS_OF_GROUP
        self.varying: set[Buffer] = set()

    def writer(self) -> Statements:
        """A fresh writer that knows the actor's place."""
        tensors = {buffer: f"tensor_{buffer.name}" for buffer in self.kernel.params}
        maps = {stmt.value: f"map_{stmt.value.name}" for stmt in self.kernel.host if stmt.kind == "bind"}
        writer = Statements(self.lanes, tensors, self.accumulators, maps, self.varying)
        writer.names.update(self.names)
        writer.environment.update(self.parameters)
        lane = np.arange(self.lanes, dtype=np.int32)
        known: dict[str, Any] = {"warp_group": self.group, "lane": lane % WARP}
        known["warp"] = self.warp if self.warp is not None else lane // WARP
        for scope, variable, _ in self.kernel.scopes:
            if scope in known:
                writer.environment[variable] = writer.constant(known[scope])
            else:
                writer.environment[variable] = Value(f"{scope}_id")
        return writer

    def multiplies(self) -> bool:
        """Whether this warp group reaches a wgmma."""
        writer = self.writer()

        def reaches(stmts: list[Stmt]) -> bool:
            for stmt in stmts:
                if stmt.kind == "if" and self._static(stmt.args[0]):
                    condition = writer.value(stmt.args[0], Context())
                    if condition.is_known and not condition.varying:
                        if reaches(stmt.body if condition.known else stmt.other):
                            return True
                        continue
                if any(is_product(call) for arg in stmt.args for call in calls([Stmt("eval", [arg])])):
                    return True
                if reaches(stmt.body) or reaches(stmt.other):
                    return True
            return False

        return reaches(self.kernel.device)

    def _static(self, expr: Expr) -> bool:
        """Whether a condition is made of ids and constants."""
        if expr.op == "var":
            return any(expr.value is variable for _, variable, _ in self.kernel.scopes)
        return expr.op not in ("load", "call") and all(self._static(arg) for arg in expr.args)

    def role(self) -> Role:
        """The compiled role.  Starts again as long as it learns that registers differ between lanes."""
        while True:
            before = len(self.varying)
            writer = self.writer()
            writer.block(self.kernel.device, Context())
            if len(self.varying) == before:
                break
        head = ["def role(ag):", "  yield None"]
        for scope in ("cta", "cluster", "rank"):
            head.append(f"  {scope}_id = ag.{scope}_id")
        source = "\n".join([*head, *writer.lines]) + "\n"
        scope_names = writer.names
        name = f"{GENERATED} {self.group}" + (">" if self.warp is None else f" warp {self.warp}>")
        exec(compile(source, name, "exec"), scope_names)
        return Role(self.group, self.warp, scope_names["role"], source)
