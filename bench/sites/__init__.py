"""Sites on one machine, joined by links of packets that can be long, lose some, and be cut."""
