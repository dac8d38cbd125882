"""Measured plans: the database that keeps them, and what fills it."""
