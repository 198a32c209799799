"""Fleets in virtual time: the real router core, scheduler and block pool over a trace, without a broker or a clock."""
