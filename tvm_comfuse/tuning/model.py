"""The cost model: XGBoost learns by what factor a measured time is off the estimate.

The estimate (``schedules.cost``) knows nothing of a machine's moods, but it is right about sizes: what is left to learn
is small, alike between tasks, and learnt from few measurements.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model.xgb_model import FeatureGroup

from tvm_comfuse.errors import ModelError
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database.files import DatabaseError, replace_file
from tvm_comfuse.tuning.features import PlanFeatures, roofline
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.space import Space

#: seconds from which on a result is no measurement: MetaSchedule's mark of a failure is 1e10
_FAILED = 1e6
#: shallow trees and few of them: there are some dozens of measurements, and the factors lie within 2 of one another
_BOOSTER = {
    "max_depth": 4,
    "eta": 0.1,
    "min_child_weight": 1.0,
    "lambda": 1.0,
    "subsample": 0.9,
    "colsample_bytree": 0.5,
    "objective": "reg:squarederror",
    "seed": 0,
    "nthread": 1,
}
_ROUNDS = 120
_VERSION = 5


class CostModelWarning(UserWarning):
    """A saved cost model cannot be used, or a new one not be saved; a search goes on without."""


@derived_object
class PlanModel(ms.cost_model.XGBModel._cls):
    """MetaSchedule's XGBoost model with another target and without a warm-up.

    Scores are the roofline's time over the predicted one, so in 0 to 1 and comparable between calls.  Without any
    measurement the prediction is the estimate.  Groups, updates and grouping by workload are those of TVM's model.
    """

    def __init__(self, device: Device):
        super().__init__(extractor=PlanFeatures(device), num_warmup_samples=0)
        self.device = device

    def predict(self, context: Any, candidates: list[Any]) -> np.ndarray:
        """Scores of scheduled candidates."""
        arrays = self.extractor.extract_from(context, candidates)
        return self.scores(context, _matrix([array.numpy() for array in arrays]))

    def rank(self, context: Any, space: Space, plans: Iterable[Plan]) -> np.ndarray:
        """Scores of legal plans of a space, which need not be scheduled."""
        return self.scores(context, self.matrix(context, space, plans))

    def matrix(self, context: Any, space: Space, plans: Iterable[Plan]) -> np.ndarray:
        """What `scores` takes of plans: it does not change while the model learns."""
        return _matrix(self.extractor.of_plans(context, space, plans))

    def save(self, path: str) -> None:
        """See write."""
        self.write(path)

    def load(self, path: str) -> None:
        """See read.  An exception comes back from TVM as a RuntimeError with its text."""
        self.read(path)

    def write(self, path: str | Path) -> None:
        """Writes the measurements with their features; trees are grown again when they are read.

        Raises DatabaseError for a file that cannot be written.
        """
        groups = {
            name: {"features": [x.tolist() for x in group.features], "seconds": [float(c) for c in group.costs]}
            for name, group in self.data.items()
        }
        # as a whole: a search killed here leaves the old one
        replace_file(Path(path), [json.dumps({"version": _VERSION, "groups": groups})])

    def read(self, path: str | Path) -> None:
        """Reads what `write` wrote, in the place of what was known.  Raises ModelError for anything else."""
        try:
            data = _groups(json.loads(Path(path).read_text(encoding="utf-8")))
            booster = _grown(data)  # what XGBoost does not take is no model either
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            hint = "leave it out: the model learns again from the tuning records"
            raise ModelError("a cost model of an earlier search", f"{path}: {error}", hint) from error
        self.data, self.data_size = data, sum(len(group.costs) for group in data.values())
        self.booster = booster

    def resume(self, path: str | Path) -> None:
        """Reads what an earlier search wrote, if it did; without it a search teaches the model its records again."""
        if not Path(path).exists():
            return
        try:
            self.read(path)
        except ModelError as error:
            text = f"the cost model is left out and learns again from the tuning records: {error.found}"
            warnings.warn(text, CostModelWarning, stacklevel=3)

    def keep(self, path: str | Path) -> None:
        """Writes it for the next search, which does without one that cannot be written."""
        try:
            self.write(path)
        except DatabaseError as error:
            warnings.warn(f"the cost model is not kept: {error}", CostModelWarning, stacklevel=3)

    def _train(self, xs: list[np.ndarray], ys: np.ndarray) -> None:
        """Grows the trees from all groups.  The arguments are what TVM's model would learn from, and not used."""
        self.booster = _grown(self.data)

    def _validate(self, xs: list[np.ndarray], ys: np.ndarray) -> list[tuple[str, float]]:
        """TVM's figures for its log, which are about another target."""
        return []

    def scores(self, context: Any, matrix: np.ndarray) -> np.ndarray:
        """Scores of the candidates of a workload, one row each."""
        import xgboost as xgb

        logs = matrix[:, 0].astype("float64")
        if self.booster is not None and len(matrix):
            logs = logs + self.booster.predict(xgb.DMatrix(matrix))
        (func,) = (func for _, func in context.mod.functions_items())
        return roofline(analyze(func), self.device) / np.exp(logs)


def _groups(values: Any) -> OrderedDict[str, FeatureGroup]:
    """The groups of a saved model.  Raises ValueError, LookupError, TypeError or AttributeError for anything else."""
    if values["version"] != _VERSION:
        raise ValueError(f"version {values['version']}")
    groups = OrderedDict()
    for name, group in values["groups"].items():
        features = [np.array(x, "float32") for x in group["features"]]
        costs = np.array(group["seconds"], "float32")
        if costs.shape != (len(features),) or any(x.ndim != 2 for x in features):
            raise ValueError(f"group {name} has not one time for each candidate's features")
        groups[name] = FeatureGroup(name, features, costs)
    return groups


def _grown(groups: dict[str, FeatureGroup]) -> Any:
    """The trees of all groups; None without two measurements of one."""
    import xgboost as xgb

    rows: list[np.ndarray] = []
    targets: list[float] = []
    for group in groups.values():
        good = [n for n, cost in enumerate(group.costs) if cost < _FAILED]
        if len(good) < 2:
            continue
        vectors = [_vector(group.features[n]) for n in good]
        off = np.array([math.log(group.costs[n]) for n in good]) - [vector[0] for vector in vectors]
        rows += vectors
        # what a whole task is off by does not order its candidates
        targets += list(off - np.median(off))
    return xgb.train(_BOOSTER, xgb.DMatrix(np.array(rows), label=np.array(targets)), _ROUNDS) if rows else None


def _matrix(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([_vector(array) for array in arrays]) if arrays else np.zeros((0, 1))


def _vector(array: np.ndarray) -> np.ndarray:
    """One row for a candidate: the plan's numbers are the same in every row, TVM's are averaged over the stores."""
    return np.asarray(array, "float32").mean(axis=0)
