"""What is a command and no stage."""
