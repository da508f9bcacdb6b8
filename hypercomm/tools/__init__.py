"""Tools on top of the library: machines and placement, pictures, and hang reports."""
