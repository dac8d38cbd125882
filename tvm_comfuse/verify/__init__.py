"""Checks of results and of kernels."""
