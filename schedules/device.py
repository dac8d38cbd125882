"""What a plan must know about a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

#: the two 132-SM parts share the arch; TVM's tag for the H100 says 50 MiB of L2, which the H200's CUDA driver does not
_H100_L2_BYTES = 50 * 1024 * 1024
_HOPPER_ARCH = "sm_90a"


@dataclass(frozen=True)
class Device:
    """One GPU.

    name               as in file names and reports, e.g. ``h200``
    sms                streaming multiprocessors
    shared_memory      bytes a CTA may use, with opt-in
    registers          32-bit registers of an SM
    max_threads        of a CTA
    l2_bytes           size of the L2 cache
    hbm_gbps           GB/s of device memory reached by a copy (read + written)
    dense_tflops       TFLOP/s of a bf16 matrix product in the main loop over all SMs
    l2_to_sm_gbps      GB/s from L2 into shared memory over all SMs
    active_clusters    most clusters of 1, 2, ... CTAs that run at once with one CTA on an SM
    measured           False if the numbers are from data sheets or a sibling
    """

    name: str
    sms: int
    shared_memory: int
    registers: int
    max_threads: int
    l2_bytes: int
    hbm_gbps: float
    dense_tflops: float
    l2_to_sm_gbps: float
    active_clusters: tuple[int, ...]
    measured: bool

    def clusters(self, size: int) -> int:
        """Most clusters of ``size`` CTAs that run at once; 0 for a size that cannot be launched."""
        return self.active_clusters[size - 1] if 1 <= size <= len(self.active_clusters) else 0


#: measured on one 700 W part, driver 580: copy, occupancy query.  The product is what the tensor cores do at 1.64 GHz, the
#: clock under sustained load, less what main loops lose; 13.9 TB/s of L2 are 64 bytes a cycle and SM, which explains the main
#: loops of benchmarks/results/h200/forms.json.
H200 = Device(
    name="h200",
    sms=132,
    shared_memory=232448,
    registers=65536,
    max_threads=1024,
    l2_bytes=60 * 1024 * 1024,
    hbm_gbps=4300.0,
    dense_tflops=862.0,
    l2_to_sm_gbps=13900.0,
    active_clusters=(132, 66, 39, 30, 22, 17, 15, 15),
    measured=True,
)

#: the same chip with other memory: data sheet bandwidth, everything else assumed equal to the H200
H100 = Device(
    name="h100",
    sms=132,
    shared_memory=232448,
    registers=65536,
    max_threads=1024,
    l2_bytes=_H100_L2_BYTES,
    hbm_gbps=3350.0,
    dense_tflops=862.0,
    l2_to_sm_gbps=13900.0,
    active_clusters=(132, 66, 39, 30, 22, 17, 15, 15),
    measured=False,
)

DEVICES = {device.name: device for device in (H200, H100)}


def device_of(target: tvm.target.Target) -> Device | None:
    """The device of a CUDA target for Hopper; None for every other target.

    ``sm_90a`` alone is taken for an H200.  TVM's target ``nvidia/nvidia-h100`` is an H100; TVM does not keep the name
    of a tag, so it is told by the L2 size that the tag sets.
    """
    if target.kind.name != "cuda" or str(target.attrs.get("arch", "")) != _HOPPER_ARCH:
        return None
    tag = str(getattr(target, "tag", "") or "")
    if "h100" in tag or int(target.attrs.get("l2_cache_size_bytes", 0)) == _H100_L2_BYTES:
        return H100
    return H200
