"""The wrappers for clock stamps of an instrumented kernel."""

from __future__ import annotations

from tvm_comfuse.verify.interpreter.expressions import Context
from tvm_comfuse.verify.interpreter.mail_calls import MailCalls
from tvm_comfuse.verify.interpreter.tree import Expr
from tvm_comfuse.verify.interpreter.values import Value

STAMP, ANCHOR, CLOCK = "func.comfuse_stamp", "func.comfuse_anchor", "func.comfuse_clock"


class StampCalls(MailCalls):
    """Writes stamps."""

    def func_comfuse_stamp(self, call: Expr, context: Context) -> None:
        address, keep = call.args
        place, _ = self.element(self.pointer(address, context))
        arguments = f"{place}, {self.code(keep, context)}, {context.argument}, {self.text(call, [address])}"
        self.emit(f"ag.stamp({arguments})")

    def func_comfuse_anchor(self, call: Expr, context: Context) -> None:
        address, entry = call.args
        place, _ = self.element(self.pointer(address, context))
        arguments = f"{place}, {self.code(entry, context)}, {context.argument}, {self.text(call, [address])}"
        self.emit(f"ag.anchor({arguments})")

    def instruction_value(self, expr: Expr, context: Context) -> Value:
        """Calls that give a value."""
        if expr.value != CLOCK:
            return super().instruction_value(expr, context)
        return Value(self.temporary("ag.clock()"))
