"""A compiled model: run it, write it, look into it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax
from tvm.target import Target

from tvm_comfuse.cuda import CubinReport, compile_cubin, sources
from tvm_comfuse.errors import BuildError, ModelError, TargetError
from tvm_comfuse.output import check_suffix
from tvm_comfuse.target import HOPPER_ARCH, is_cuda, name_of

if TYPE_CHECKING:
    from tvm_comfuse.explanation import Explanation


class Compiled:
    """The result of ``tvm_comfuse.compile`` or ``tvm_comfuse.load``.

    executable   TVM's executable, or the runtime module of a loaded library
    target       what it was compiled for
    explanation  which matmuls were fused and why the others were not; None for a loaded library
    """

    def __init__(
        self,
        executable: Any,
        target: Target,
        explanation: Explanation | None,
        dynamic_shared: Mapping[str, int] | None = None,
    ):
        self._dynamic_shared = dict(dynamic_shared or {})
        self.executable = executable
        self.target = target
        self.explanation = explanation

    def __repr__(self) -> str:
        if self.explanation is None:
            return f"Compiled({name_of(self.target)})"
        return f"Compiled({name_of(self.target)}, {self.explanation.summary})"

    def run(self, *inputs: Any) -> Any:
        """Call the model's ``main``.

        inputs  torch tensors, numpy arrays or TVM tensors, copied to the target's device if they are not there.
        Gives a tensor, or a (nested) tuple of tensors if the Relax model returns one (several outputs of a torch model are a
        flat one): torch tensors if any input is one, else TVM tensors.  Raises ModelError for a wrong number of inputs, a
        wrong shape or dtype.
        """
        from tvm_comfuse.frontend import to_tvm

        device = self._device
        given = [x if isinstance(x, tvm.runtime.Tensor) and x.device == device else to_tvm(x, device) for x in inputs]
        try:
            result = self._machine["main"](*given)
        except (ValueError, TypeError, RuntimeError) as error:
            shapes = ", ".join(f"{list(x.shape)} {x.dtype}" for x in given)
            raise ModelError("inputs as in the model", f"{shapes} ({_first_line(error)})", "give others") from error
        return _convert(result, to_torch=any(_is_torch(x) for x in inputs))

    def export_library(self, path: str | Path) -> Path:
        """Write a shared library that ``tvm_comfuse.load`` and TVM's runtime can load; makes missing folders.

        path  must end in ``.so``
        Raises OutputError for another path, BuildError for what the linker says.
        """
        path = Path(path)
        check_suffix(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.executable.export_library(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            hint = "check the path and the C++ compiler"
            raise BuildError(f"to write a library at {path}", _first_line(error), hint) from error
        return path

    def sources(self) -> list[str]:
        """CUDA source of each device module; none for a CPU target."""
        return sources(self.executable)

    def kernel_report(self, *, compiler: str = "auto") -> list[CubinReport]:
        """Compile the CUDA source to cubins and say what the compiler reports.  Needs no GPU.  Raises BuildError."""
        arch = str(self.target.attrs.get("arch", HOPPER_ARCH)) if is_cuda(self.target) else HOPPER_ARCH
        reports = [compile_cubin(source, arch, compiler=compiler) for source in self.sources()]
        return [report.with_dynamic_shared(self._dynamic_shared) for report in reports]

    @property
    def _device(self) -> tvm.runtime.Device:
        device = tvm.cuda(0) if is_cuda(self.target) else tvm.cpu()
        if is_cuda(self.target) and not device.exist:
            raise TargetError("a GPU to run on", "none", "compile for the target llvm to run on this machine")
        return device

    @cached_property
    def _machine(self) -> relax.VirtualMachine:
        devices = [self._device, tvm.cpu()] if is_cuda(self.target) else [self._device]
        return relax.VirtualMachine(self.executable, devices)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _convert(result: Any, *, to_torch: bool) -> Any:
    if isinstance(result, tvm.runtime.Tensor):
        from tvm_comfuse.frontend import to_torch as convert

        return convert(result) if to_torch else result
    return tuple(_convert(part, to_torch=to_torch) for part in result)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
