"""Measuring what the integer attention costs in accuracy: data sources, the evaluation loop, the drop test."""
