"""Tools built on the library: place, draw and blame. Nothing below this package imports them."""
