"""Measured plans instead of estimated ones: the search that finds them and the database that keeps them."""
