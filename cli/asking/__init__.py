"""Commands that ask: clients, and an operator's."""
