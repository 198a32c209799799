"""The console: web pages that show a fleet as it changes."""
