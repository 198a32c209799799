"""The programs that Tokenbus is compared with, each in its own process."""
