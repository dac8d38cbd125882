"""From a scheduled cluster and its plan to a TIRx kernel, and the TIR pipeline that does it during compilation."""
