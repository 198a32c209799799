"""Fleets in virtual time: the real router core, scheduler and block pool over a trace, without a broker or a clock."""

if __name__ != "tokenbus.replay":
    raise ImportError("import tokenbus.replay: it is no package of its own")
