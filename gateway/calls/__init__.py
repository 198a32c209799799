"""Serves what is asked and answered in one piece and generates nothing, in any API."""
