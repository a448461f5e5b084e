"""Communication between ranks: backends, rendezvous, collectives and one-sided windows."""
