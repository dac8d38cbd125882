"""Measured plans instead of estimated ones: MetaSchedule, a cost model that learns, builders and runners."""
