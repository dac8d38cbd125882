"""The wrappers for exchanges: mailboxes in shared and global memory, the launch counter."""

from __future__ import annotations

import re

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.verify.interpreter.calls import Calls
from tvm_comfuse.verify.interpreter.expressions import Context
from tvm_comfuse.verify.interpreter.tree import Expr, Kernel, UnsupportedError, show
from tvm_comfuse.verify.interpreter.values import Value

_SLOTS = re.compile(r"_mail_slots\[(\d+)\]")
_MAIL, _STATE = "_mail", "_state"
_TAKE = re.compile(r"func\.comfuse_take_(cluster|grid)_(\d+)")


def mail_arrays(kernel: Kernel) -> dict[str, int]:
    """Slots of every mail array in global memory, by the name of the function that gives its addresses."""
    found = {}
    for name, source in kernel.sources.items():
        if name.endswith(_MAIL):
            match = _SLOTS.search(source)
            if match is None:
                raise LoweringError("an array of mail slots", source[:80], "keep emit/workspace.py and this file alike")
            found[name] = int(match.group(1))
    return found


class MailCalls(Calls):
    """Writes exchanges."""

    def func_comfuse_post_cluster(self, call: Expr, context: Context) -> None:
        slot, *others = call.args
        rank, value, tag = (self.code(expr, context) for expr in others)
        where = self.text(call, [slot])
        self.emit(
            f"yield from ag.post_cluster({self.shared(slot, context)}, {rank}, {value}, {tag}, {context.argument}, {where})"
        )

    def func_comfuse_post_grid(self, call: Expr, context: Context) -> None:
        slot, *others = call.args
        value, tag = (self.code(expr, context) for expr in others)
        where = self.text(call, [slot])
        self.emit(f"yield from ag.post_grid({self.slot(slot, context)}, {value}, {tag}, {context.argument}, {where})")

    def func_comfuse_leave(self, call: Expr, context: Context) -> None:
        state, ctas, tags = call.args
        arguments = f"{self.named(state, _STATE)!r}, {self.code(ctas, context)}, {self.code(tags, context)}"
        self.emit("yield None")
        self.emit(f"ag.leave_grid({arguments}, {context.argument}, 'comfuse_leave')")

    def slot(self, expr: Expr, context: Context) -> str:
        """Source of (array, index) of a slot in global memory."""
        return f"{self.named(expr, _MAIL)!r}, {self.code(expr.args[0], context)}"

    def named(self, expr: Expr, ending: str) -> str:
        """The function that an address in static memory comes from."""
        name = str(expr.value).removeprefix("func.")
        if expr.op != "call" or not name.endswith(ending):
            raise UnsupportedError(f"static memory at {show(expr)}")
        return name

    def instruction(self, call: Expr, context: Context) -> None:
        """A statement that executes an instruction."""
        match = _TAKE.fullmatch(str(call.value))
        if match is None:
            super().instruction(call, context)
        else:
            self._take(call, match.group(1), int(match.group(2)), context)

    def _take(self, call: Expr, scope: str, count: int, context: Context) -> None:
        """comfuse_take_{scope}_{count}: tag, slots, registers; all slots must have the tag."""
        tag, slots, registers = call.args[0], call.args[1 : 1 + count], call.args[1 + count :]
        where = self.text(call, slots[:1])
        if scope == "grid":
            places = [self.slot(slot, context) for slot in slots]
            name = places[0].split(",", 1)[0]
            at = ", ".join(place.split(",", 1)[1] for place in places)
            target = f"ag.take_grid({name}, [{at}]"
        else:
            at = ", ".join(self.shared(slot, context) for slot in slots)
            target = f"ag.take_cluster([{at}]"
        got = self.temporary(f"yield from {target}, {self.code(tag, context)}, {context.argument}, {where})")
        for number, register in enumerate(registers):
            self.put(register, f"{got}[{number}]", context)

    def instruction_value(self, expr: Expr, context: Context) -> Value:
        """Calls that give a value."""
        if expr.value != "func.comfuse_enter":
            raise UnsupportedError(f"call {expr.value}")
        state, takes = expr.args
        arguments = f"{self.named(state, _STATE)!r}, {self.code(takes, context)}, {context.argument}, 'comfuse_enter'"
        return Value(self.temporary(f"yield from ag.enter_grid({arguments})"))
