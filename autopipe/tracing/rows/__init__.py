"""Whether rows of a batch meet, found by running a recording on others; what must run on all of them."""
