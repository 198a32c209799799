"""What each step computes, for whom, and how tokens are chosen of it."""
