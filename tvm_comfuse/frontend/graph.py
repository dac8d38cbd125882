"""Rewriting Relax functions by local rules.

A rule is a function ``rule(call, graph) -> Expr | None``.  It looks at the function as it was before the sweep
(``graph.value``, ``graph.readers``) and, where it matches, builds the replacement from ``graph.new(...)`` of old
operands and ``graph.emit(...)`` of new calls.  Old and new never mix by accident: a match reads only old expressions, a
replacement holds only new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import tvm
from tvm import relax

MAX_SWEEPS = 64  # every rule makes the function smaller or moves an operator one way; this only bounds a mistake

Rule = Callable[[tvm.ir.Call, "Graph"], "relax.Expr | None"]


class Graph:
    """What a rule may ask and do."""

    def __init__(self, function: relax.Function, new: Callable[[relax.Expr], relax.Expr], builder: relax.BlockBuilder):
        self._values = relax.analysis.get_var2val(function)
        self._uses = _count_uses(function)
        self._readers = _readers(self._values)
        self.new = new
        self._builder = builder

    def value(self, expr: relax.Expr) -> relax.Expr:
        """What a variable is bound to; other expressions, parameters included, are returned as they are."""
        while isinstance(expr, tvm.ir.Var) and expr in self._values:
            expr = self._values[expr]
        return expr

    def call(self, expr: relax.Expr, *names: str) -> tvm.ir.Call | None:
        """The call that ``expr`` is or is bound to, if it calls one of the operators ``names``."""
        value = self.value(expr)
        return value if self.is_op(value, *names) else None

    def single_use(self, expr: relax.Expr) -> bool:
        """Is the variable ``expr`` read exactly once in its function?"""
        return isinstance(expr, tvm.ir.Var) and self._uses[expr] == 1

    def readers(self, expr: relax.Expr) -> list[tuple[relax.Var, relax.Expr]]:
        """The bindings (variable, value) that read the variable ``expr``; returned values have no reader."""
        return self._readers.get(expr, [])

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind a new expression in front of the one that is being replaced."""
        return self._builder.emit(expr)

    @staticmethod
    def is_op(expr: Any, *names: str) -> bool:
        """Is ``expr`` a call of one of the operators ``names``?"""
        return isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in names


class ModuleRewriter:
    """Applies rules to every Relax function of a module until none matches.  The module given is not changed."""

    def __init__(self, rules: Iterable[Rule]):
        self._rules = list(rules)

    def run(self, mod: tvm.IRModule) -> tvm.IRModule:
        for _ in range(MAX_SWEEPS):
            sweep = _Sweep(mod, self._rules)
            mod, fired = sweep.run()
            if not fired:
                return mod
            mod = relax.transform.DeadCodeElimination()(mod)
            mod = relax.transform.CanonicalizeBindings()(mod)
        raise RuntimeError(f"rules {[rule.__name__ for rule in self._rules]} do not come to an end")


@relax.expr_functor.mutator
class _Sweep(relax.PyExprMutator):
    """One walk over the module; the first rule that matches a call replaces it."""

    def __init__(self, mod: tvm.IRModule, rules: list[Rule]):
        super().__init__(mod)
        self._mod, self._rules, self._fired = mod, rules, False
        self._graph: Graph | None = None

    def run(self) -> tuple[tvm.IRModule, bool]:
        for name, function in self._mod.functions_items():
            if isinstance(function, relax.Function):
                self._graph = Graph(function, self.visit_expr, self.builder_)
                self.builder_.update_func(name, self.visit_expr(function))
        return (self.builder_.get(), True) if self._fired else (self._mod, False)

    def visit_call_(self, call: tvm.ir.Call) -> relax.Expr:
        assert self._graph is not None
        if isinstance(call.op, tvm.ir.Op):
            for rule in self._rules:
                replacement = rule(call, self._graph)
                if replacement is not None:
                    self._fired = True
                    return replacement
        return super().visit_call_(call)


def _operands(expr: relax.Expr) -> list[relax.Expr]:
    if isinstance(expr, tvm.ir.Call):
        return list(expr.args)
    if isinstance(expr, relax.Tuple):
        return list(expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relax.If):
        return [expr.cond]
    return []


def _count_uses(function: relax.Function) -> Counter[relax.Var]:
    """How often each variable is read."""
    uses: Counter[relax.Var] = Counter()

    def visit(expr: relax.Expr) -> None:
        operands = _operands(expr)
        if isinstance(expr, relax.SeqExpr):
            # A variable that is bound to another one is another name, and keeps both alive.
            bindings = [binding for block in expr.blocks for binding in block.bindings]
            operands = [expr.body, *(binding.value for binding in bindings if hasattr(binding, "value"))]
        uses.update(operand for operand in operands if isinstance(operand, tvm.ir.Var))

    relax.analysis.post_order_visit(function, visit)
    return uses


def _readers(values: dict[relax.Var, relax.Expr]) -> dict[relax.Var, list[tuple[relax.Var, relax.Expr]]]:
    readers: dict[relax.Var, list[tuple[relax.Var, relax.Expr]]] = {}
    for name, value in values.items():
        for operand in _operands(value):
            if isinstance(operand, tvm.ir.Var):
                readers.setdefault(operand, []).append((name, value))
    return readers
