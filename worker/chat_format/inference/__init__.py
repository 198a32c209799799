"""Infers chat formats from chat templates."""
