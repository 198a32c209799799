"""Commands that look into things and measure."""
