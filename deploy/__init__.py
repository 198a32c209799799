"""What it takes to run Tokenbus in containers, and to watch it there."""
