"""The parts that the rules of `tokenbus wire-check` share: probes, exchanges, schemas, checks."""
