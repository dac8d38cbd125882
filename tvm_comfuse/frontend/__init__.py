"""From a model to a Relax module that the rest of the package can work on."""

from tvm_comfuse.frontend.legalization import expand_attention, legalize, legalize_map
from tvm_comfuse.frontend.load import LoadedModel, load_model
from tvm_comfuse.frontend.normal_form import hoist_row_permutations, normalize, simplify_views
from tvm_comfuse.frontend.relax_import import from_relax, load_relax
from tvm_comfuse.frontend.tensors import host_target, run_module, to_torch, to_tvm
from tvm_comfuse.frontend.torch_import import from_torch, load_exported_program

__all__ = [
    "LoadedModel",
    "expand_attention",
    "from_relax",
    "from_torch",
    "hoist_row_permutations",
    "host_target",
    "legalize",
    "legalize_map",
    "load_exported_program",
    "load_model",
    "load_relax",
    "normalize",
    "run_module",
    "simplify_views",
    "to_torch",
    "to_tvm",
]
