"""The client in the words of the wire: it sends request messages, and yields chunks as workers publish them."""
