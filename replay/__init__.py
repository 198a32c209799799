"""Replays traces on fleets in virtual time: the real router core, scheduler and block pool, without a broker or
clock."""

if __name__ != "tokenbus.replay":
    raise ImportError("import tokenbus.replay: it is not a package of its own")
