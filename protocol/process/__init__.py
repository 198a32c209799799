"""What every server process does about its process: signals, reloading of settings, freed memory."""
