"""Keeps records for a set time and size: in a JetStream bucket where the broker has JetStream, else in memory."""
