"""`tokenbus replay`: a trace against a fleet that is not there."""
