"""The parts that commands share: settings, sessions, supervision, terminal output."""
