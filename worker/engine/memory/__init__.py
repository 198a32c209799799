"""The memory that models take: estimated from their files, made to fit, and shared with other workers."""
