"""Compare this library on CPU ranks with other systems and with a lower bound. See README.md."""
