"""Models that replay recorded times: they wait instead of computing, and make random gradients."""
