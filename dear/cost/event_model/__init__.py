"""Event model of a training step: its passes, its messages, and the link that they share."""
