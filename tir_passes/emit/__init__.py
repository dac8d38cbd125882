"""The parts a kernel is put together from.

Each part is a Python function or small class that emits TIRx statements into the open frame: `dsl` has the vocabulary,
`kernel` (one folder up) reads from top to bottom.
"""
