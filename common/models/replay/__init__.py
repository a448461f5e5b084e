"""Models that replay recorded times: their gradients, and the pace of their compute."""
