"""A real systemd, 252 and 257, with the units as packages install them."""
