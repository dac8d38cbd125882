"""From a model to a library: import, fuse, legalize the rest, compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm.target import Target

from tvm_comfuse import _autoload
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.cuda.launch import DynamicShared
from tvm_comfuse.dump import Dump
from tvm_comfuse.errors import BuildError, ComfuseError, ModelError, TargetError
from tvm_comfuse.frontend.messages import telling_line
from tvm_comfuse.output import LIBRARY_SUFFIX
from tvm_comfuse.relax_pipeline import lower
from tvm_comfuse.runtime import Compiled
from tvm_comfuse.target import HOPPER_ARCH, is_cuda, parse_target

#: the text of a ComfuseError
_OWN_MESSAGE = re.compile(r"needed (.+?); found (.+); try: (.+)")

if TYPE_CHECKING:
    from tvm_comfuse.fusion import Plans, Records

__all__ = ["Compiled", "compile", "load", "to_module"]


def compile(
    model: Any,
    target: str | dict[str, Any] | Target = "h200",
    *,
    example_args: tuple[Any, ...] | None = None,
    plans: Plans | None = None,
    tuning_records: Records | None = None,
    use_pretuned: bool = True,
    form: str = "auto",
    rows: int | None = None,
    dump: str | Path | None = None,
) -> Compiled:
    """Compile a model, with every cluster that can be one as one kernel, or as two where these are faster.

    model         a torch.nn.Module (with example_args), an ExportedProgram, a Relax IRModule, or what the command line
                  takes: a ``.pt2`` or Relax ``.json`` file, ``file.py:function``, ``package.module:function``
    target        see parse_target
    example_args  tensors to export a torch module with
    plans         the plan of some matmuls by their names in ``explain``, or one of the words ``split`` (two kernels), ``off``
                  (no fusion), or all that ``explain --json`` or ``tune --json`` wrote, whose shapes are then compared; the
                  others get the best one that is known
    tuning_records  a tuning database of measured plans, or its folder
    use_pretuned  whether measured plans that come with the package are used
    form          ``auto``: a cluster is one kernel only where that takes no longer than two, a product and one for the rows;
                  ``fused`` or ``split``: always the one or the other
    rows          where M is symbolic, the number of rows for which tuning records are chosen, as in ``tune``; those of the
                  most rows if None
    dump          a folder for the IR after each phase, CUDA source and the compiler's figures

    The outputs of a torch model with a dict or nested results are one flat tuple, in the order of torch.export.
    Raises ModelError, TargetError, PlanError, DatabaseError and BuildError.
    """
    from tvm_comfuse.frontend import legalize, simplify_views
    from tvm_comfuse.fusion import fuse

    parsed = parse_target(target)
    _autoload()
    writer = Dump(dump)
    mod = to_module(model, example_args)
    writer.ir("import", mod)
    mod, explanation = fuse(
        mod, parsed, plans, tuning_records=tuning_records, use_pretuned=use_pretuned, form=form, rows=rows
    )
    writer.ir("fuse", mod)
    writer.json("explain", explanation.to_dict())
    with _build_errors():
        mod = legalize()(simplify_views()(mod))
    writer.ir("legalize", mod)
    launches = DynamicShared()
    executable = _compile(mod, parsed, [*writer.instruments(), launches.instrument()])
    compiled = Compiled(executable, parsed, explanation, launches.sizes)
    if dump is not None:
        for number, source in enumerate(compiled.sources()):
            writer.text(f"kernels{number}", "cu", source)
        writer.json("ptxas", [report.to_dict() for report in compiled.kernel_report()])
    return compiled


def to_module(model: Any, example_args: tuple[Any, ...] | None = None) -> tvm.IRModule:
    """A Relax module in normal form of anything ``compile`` takes.  Raises ModelError."""
    from tvm_comfuse.frontend import from_relax, from_torch, load_model

    if isinstance(model, tvm.IRModule):
        return from_relax(model)
    if isinstance(model, (str, Path)):
        if example_args is not None:
            raise ModelError("no example_args for a model that is a file", "some", "leave them out")
        return load_model(str(model)).mod
    return from_torch(model, example_args)


def load(path: str | Path) -> Compiled:
    """A library written by ``Compiled.export_library``.

    Raises ModelError if the file is none, TargetError if it needs a GPU driver that is not there.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError("an existing library", f"nothing at {path}", "check the path")
    if path.suffix != LIBRARY_SUFFIX:  # TVM chooses its loader by it
        needed = f"a library written by export_library, which ends in {LIBRARY_SUFFIX}"
        raise ModelError(needed, str(path), "give that file")
    with own_cuda_compiler(HOPPER_ARCH):
        try:
            module = tvm.runtime.load_module(str(path))
        except RuntimeError as error:
            if "cuda" in str(error).lower():
                raise TargetError(
                    "a CUDA driver, which the library's kernels need", "none", "load it elsewhere"
                ) from error
            raise ModelError(
                "a library written by export_library", f"{path}: {telling_line(error, last=True)}", "write it again"
            ) from error
    return Compiled(module, parse_target("cuda" if _has_cuda(module) else "llvm"), None)


def _compile(mod: tvm.IRModule, target: Target, instruments: list[Any]) -> Any:
    """Relax and TIR pipelines down to an executable.  Raises BuildError with the message of the pass that failed."""
    context = tvm.transform.PassContext(opt_level=3, instruments=instruments)
    compiler = own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH)))
    with _build_errors(), context, target, compiler:
        return tvm.compile(
            mod, target=target, relax_pipeline=lower(target), tir_pipeline="comfuse" if is_cuda(target) else "default"
        )


@contextmanager
def _build_errors() -> Iterator[None]:
    try:
        yield
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, ComfuseError):
            raise
        # TVM gives an exception of a Python pass back as a RuntimeError with the same message
        own = _OWN_MESSAGE.search(str(error))
        found = f"{telling_line(error, last=True)} ({type(error).__name__})"
        words = own.groups() if own else ("a module that TVM compiles", found, "look at dump=FOLDER")
        raise BuildError(*words) from error


def _has_cuda(module: Any) -> bool:
    return module.kind == "cuda" or any(_has_cuda(imported) for imported in module.imports)
