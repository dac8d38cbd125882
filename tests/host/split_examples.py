"""Split forms for tests."""

from __future__ import annotations

import tvm

from tvm_comfuse.frontend import from_relax
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.relay_patterns.split_form import SplitForm, split_form

#: operators with a row reduction
REDUCING = ("layer_norm", "rms_norm", "ln_relu", "rms", "softcap_softmax")


def form_of(module: tvm.IRModule) -> SplitForm:
    """The split form of the only cluster of a module."""
    (cluster,) = discover(from_relax(module)).clusters
    return split_form(cluster)
