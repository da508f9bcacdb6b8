"""The first floor: creating and destroying torch process groups."""
