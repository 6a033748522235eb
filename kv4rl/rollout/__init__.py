"""Collecting responses: prompt groups, the two collectors, traces, and the simulator that drives them."""
