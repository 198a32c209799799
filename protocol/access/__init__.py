"""Who may use a fleet, and how much of it: keys, their records, and where these are kept."""
