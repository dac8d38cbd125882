"""From a scheduled cluster and its plan to a TIRx kernel, and the TIR pipeline that does it during compilation."""

#: raised when the same plan becomes a kernel whose time is no longer what tuning records say; they bind to it
KERNEL_VERSION = 2
