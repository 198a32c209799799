"""What a worker says and hears on the bus: its subjects, card, event log, snapshots, and the fence before every
write."""
