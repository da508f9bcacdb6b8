"""Tools on top of the library: machines and placement, pictures, checks, and hang reports."""
