"""The front: NATS, admission, detokenizing, chunks and lifecycle. It never computes, so it always answers."""
