"""One kernel of each family on the GPU: launched in a child process, with poisoned outputs and guard bands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.families import FAMILIES, Family
from tvm_comfuse.verify.gpu import FirstLaunches, Limits


@pytest.fixture(scope="module")
def launches() -> Iterator[FirstLaunches]:
    with FirstLaunches("cuda", Limits(start=120, build=120, launch=30)) as started:
        yield started


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_first_launch(family: Family, launches: FirstLaunches) -> None:
    func = family.cluster(parse_target("cuda"))
    # the second launch takes tags behind those of the first
    for seed in (0, 1):
        result = launches.check(family.name, func, family.m, seed)
        assert not result.failure, result.report()
