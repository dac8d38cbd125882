"""Schedules of clusters: plans, their legality and cost, the primitives that apply them."""
