"""Metrics, logs, traces and the status page of every process."""
