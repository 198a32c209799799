"""Files for running Tokenbus in containers and monitoring it."""
