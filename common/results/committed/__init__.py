"""Records that come with the repository, and the pages of docs that quote them."""
