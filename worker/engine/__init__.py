"""The engine: scheduler, block pool, step loop, and the runners that execute its steps."""
