"""What a router believes of its workers, and where it hears it."""
