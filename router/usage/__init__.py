"""Counts what requests have used, and keeps the counts in a bucket that all routers share."""
